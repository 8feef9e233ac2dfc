"""From scores to a choice: which heads or neurons go, so that a target is met.

A choice is {layer: [units]} of what to remove, numbered as in the unpruned model.  Scores are (layers, units), nan
where a unit is gone already; the higher, the longer it is kept.
"""

from collections.abc import Iterable, Mapping

from torch import Tensor

from bertlite.config import ConfigLike

Choice = dict[int, list[int]]


def rank_heads(
    scores: Tensor,
    amount: int | float,
    *,
    uniform: bool = False,
    at_least: int = 0,
    at_most: int | None = None,
    protect: Mapping[int, Iterable[int]] | None = None,
) -> Choice:
    """The heads to remove: those with the lowest scores.  Serves neurons too.

    Args:
        scores: (layers, heads); a model's own, as `head_importance` returns them.
        amount: of the heads still there, how many go: an int, or a float between 0 and 1 as a share, rounded.
        uniform: take from the layers with most heads left, so that layers end alike; else wherever scores are lowest.
        at_least, at_most: heads that each layer keeps.
        protect: {layer: heads} that stay.

    Raises:
        ValueError: the target cannot be met, the scores are no (layers, heads) table, or a layer or head is unknown.
    """
    raise NotImplementedError


rank_neurons = rank_heads


def macs(config: ConfigLike, length: int) -> int:
    """Multiply-accumulates of the encoder's layers for one sequence of so many tokens, pruned parts left out.

    A head costs 4·S·D·H + 2·S²·H and a neuron 2·S·D; biases, norms, softmax, embeddings and task heads are not
    counted.
    """
    raise NotImplementedError


def rank_by_macs(
    config: ConfigLike,
    budget: float,
    length: int,
    head_scores: Tensor,
    neuron_scores: Tensor | None = None,
) -> tuple[Choice, Choice]:
    """The heads and neurons to remove so that the encoder stays within a budget of multiply-accumulates.

    Among all numbers of heads kept, each with as many neurons as the budget then allows, the one that keeps the
    highest sum of scores (Kwon et al. 2022, section 4.1): scores of both must be in one unit, such as "fisher" on the
    same data.  Without neuron scores all neurons stay.

    Args:
        budget: MACs as a share, above 0 and up to 1, of those of the model as built.
        length: tokens of the sequence that is counted.

    Raises:
        ValueError: the budget cannot be met.
    """
    raise NotImplementedError


def rank_by_latency(
    budget: float,
    head_scores: Tensor,
    head_times: Mapping[int, float],
    neuron_scores: Tensor | None = None,
    neuron_times: Mapping[int, float] | None = None,
) -> tuple[Choice, Choice]:
    """The heads and neurons to remove so that measured times add up to at most a budget: a knapsack.

    Args:
        budget: the time that all attention (and, with neurons, feed-forward) sublayers may take together.
        head_times: {heads kept: time of one attention sublayer}, in the unit of `budget`.  Only these numbers are
            chosen from; 0, the sublayer removed, has its own entry if it may be chosen.
        neuron_times: the same for neurons and feed-forward sublayers.

    Raises:
        ValueError: the budget is below the fastest choice, which is named; or a table does not fit the scores.
    """
    raise NotImplementedError


def rearrange(choice: Mapping[int, Iterable[int]], gradients: Tensor) -> Choice:
    """As many heads of each layer, exchanged for others where that costs less, heads of a layer counted together.

    Greedy, on (1-m)ᵀ F (1-m) with F the layer's Fisher information (Kwon et al. 2022, section 4.2): never worse than
    what was given.

    Args:
        gradients: (examples, layers, heads), from `head_gradients`.
    """
    raise NotImplementedError
