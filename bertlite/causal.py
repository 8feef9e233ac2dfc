"""Causal analysis: change the outputs of heads and layers, and measure the effect on the model's output.

    found = patch(model, clean, corrupted)          # values of one run in another, one head at a time
    found.effect                                    # (layers, heads): 0 changes nothing, 1 restores the clean run
    ablate(model, batches, "mean", reference=others).increase  # (layers, heads), of the loss
    with ablated(model, {0: [1, 5]}, mean_contexts(model, others)):
        ...                                         # any use of the model

Heads have their numbers in the unpruned model, and a pruned one is nan.  Values are read and changed by hooks; the
model runs its usual code.  Zeros instead of a context give later layers inputs that never occur; a mean removes only
the differences between examples.

Sources: Vig et al. 2020 (arXiv:2004.12265) and, on its choices, Zhang & Nanda 2023 (arXiv:2309.16042).

Shapes:  B, E examples · R rows, B or B·choices in multiple choice · S positions · P patched positions, each alone ·
         L levels: layers, or one more for the residual stream · U units as built: N heads, or 1 at another site ·
         u units of a level that are not pruned · W width of a unit, H of a head
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bertlite.config import check_known, kept_heads, normalise_units
from bertlite.models.structure import BertLike, check_model, layers_of
from bertlite.pruning.importance.batches import Batch, eval_mode, input_shape, per_example, read_batches, real_tokens
from bertlite.pruning.importance.measurements import Objective, ScoringTask
from bertlite.pruning.importance.predictions import divergence, predictions
from bertlite.pruning.importance.scores import check_task
from bertlite.pruning.importance.structures import EVERY_TOKEN, HEADS, NEURONS, run, whole_layers

__all__ = ["ABLATIONS", "DIRECTIONS", "METRICS", "SITES", "Ablation", "Patching"]
__all__ += ["ablate", "ablated", "mean_contexts", "patch"]
ABLATIONS = ("zero", "mean")
DIRECTIONS = ("denoise", "noise")
Batches = Batch | Iterable[Batch]
Edit = Callable[[Tensor], Tensor]  # (…, u, W) -> the value in its place
Metric = Callable[[Any, Batch], Tensor]  # (model output, batch) -> (B,)
Columns = Sequence[int] | None  # positions, each patched alone; None patches all together
End = tuple[Any, Batch]  # the model's output for a clean or a corrupted batch, and the batch


# Sites: values of a forward that can be read and changed.  A site lists the modules that have its values, one for each
# level.  At "head" a value is the module's input, with a part for each head; elsewhere it is the output, as one unit.
SITES: dict[str, Callable[[BertLike], list[nn.Module]]] = {
    "head": lambda model: [HEADS.dense(layer) for layer in layers_of(model)],
    "attention": lambda model: [HEADS.dense(layer) for layer in layers_of(model)],
    "feed_forward": lambda model: [NEURONS.dense(layer) for layer in layers_of(model)],
    "residual": lambda model: [model.base_model.embeddings, *layers_of(model)],
}


@contextmanager
def edited(model: BertLike, site: str, edits: Mapping[int, Edit], batch: Batch | None = None) -> Iterator[None]:
    """Let every forward pass its values at some levels of a site through edits.

    Values are (R, S, u, W).  Packed tokens are (T, u, W) or, given the batch, rows in which padding is 0.

    Raises:
        ValueError: the model is compiled.
        RuntimeError: at the end, if a module did not run, or was not called as a module.
    """
    if hasattr(model, "_orig_mod"):
        raise ValueError("the model is compiled, so new hooks do not run; pass the model from before torch.compile")

    # A head's value is a part of the input of a projection; at other sites it is the whole output.
    modules, levels_run = SITES[site](model), set[int]()
    parts = (-1, context_shape(model)[-1]) if site == "head" else (1, -1)
    real = None if batch is None else real_tokens(batch)

    def change(level: int, x: Tensor) -> Tensor:  # (…, u·W) -> (…, u·W)
        levels_run.add(level)
        if level not in edits:
            return x
        units = x.unflatten(-1, parts)
        if real is None or units.dim() == 4:
            return edits[level](units).flatten(-2)

        # Edits count positions in rows, so packed tokens are put into rows and taken out again.
        rows = units.new_zeros(*real.shape, *units.shape[1:]).index_put((real,), units)
        return edits[level](rows)[real].flatten(-2)

    def hook(level: int, module: nn.Module, args: tuple[Any, ...], out: Any = None) -> Any:
        given = args if out is None else out
        return (change(level, given[0]), *given[1:]) if isinstance(given, tuple) else change(level, given)

    with whole_layers(model), ExitStack() as hooks:
        for level, module in enumerate(modules):
            register = module.register_forward_pre_hook if site == "head" else module.register_forward_hook
            hooks.enter_context(register(partial(hook, level)))
        yield

    # A level that no hook saw would leave the output unchanged, as if it had no effect.
    if missed := set(range(len(modules))) - levels_run:
        raise RuntimeError(f"the {site} of level {min(missed)} was not computed by its module, so no hook reads it")


def read_values(model: BertLike, batch: Batch, site: str) -> tuple[Any, list[Tensor]]:
    """Run the model on a batch; return its output, and the value at each level, (R, S, u, W)."""
    found: dict[int, Tensor] = {}

    def keep(level: int, x: Tensor) -> Tensor:
        found[level] = x
        return x  # as it is, also where one module is several levels

    edits = {level: partial(keep, level) for level in range(len(SITES[site](model)))}
    with edited(model, site, edits, batch):
        return run(model, batch, **EVERY_TOKEN), [*found.values()]


def replace_each(
    model: BertLike, batch: Batch, site: str, values: Sequence[Tensor], measure: Objective, positions: Columns = None
) -> Tensor:
    """Measure the output with one unit's value replaced at a time, at each position alone or at all together.

    The values of each level are (R, S, u, W), or (1, 1, u, W) for all tokens.

    Returns:
        (B, L, U, P), float64 on the CPU, nan for pruned units; P is 1 for all positions together.
    """
    columns: Sequence[slice | int] = [slice(None)] if positions is None else positions
    units = model.config.num_attention_heads if site == "head" else 1

    # Pruned units keep nan: they cannot be measured, which is not the same as no effect.
    shape = (input_shape(batch)[0], len(values), units, len(columns))
    found = torch.full(shape, torch.nan, dtype=torch.float64, device="cpu")

    def replace(given: Tensor, index: int, column: slice | int, x: Tensor) -> Tensor:
        new = x.clone()
        new[:, column, index] = given[:, column, index].to(x)
        return new

    # One forward for each unit, and for each position if they are patched alone.
    for level, given in enumerate(values):
        for index, unit in enumerate(kept_heads(model.config, level) if site == "head" else [0]):
            for i, column in enumerate(columns):
                with edited(model, site, {level: partial(replace, given, index, column)}, batch):
                    found[:, level, unit, i] = measure(run(model, batch, **EVERY_TOKEN)).double().cpu()
    return found


# Patching: values of one run in another


@dataclass(frozen=True)
class Patching:
    """The metric of every patched run.  Pruned heads are nan.

    Args:
        values: (B, L, N) for heads, (B, L) for other sites; with `positions` one more axis, P.
        clean, corrupted: (B,), the metric of the unchanged runs.
        direction: "denoise", clean values in the corrupted run, or "noise", the reverse.
        metric: its name.
    """

    values: Tensor
    clean: Tensor
    corrupted: Tensor
    direction: str
    metric: str

    @property
    def base(self) -> Tensor:
        """The metric of the run that is patched, (B,)."""
        return self.corrupted if self.direction == "denoise" else self.clean

    @property
    def effect(self) -> Tensor:
        """The change of the mean metric as a share of the difference between the runs; 0 is none, 1 all.

        Raises:
            ValueError: the two runs have the same mean metric.
        """
        other = self.clean if self.direction == "denoise" else self.corrupted
        gap = other.mean() - self.base.mean()
        if gap == 0:
            raise ValueError("clean and corrupted runs have the same mean metric, so no effect can be computed")
        return (self.values.mean(0) - self.base.mean()) / gap


def patch(
    model: BertLike,
    clean: Batches,
    corrupted: Batches,
    site: str = "head",
    *,
    direction: str = "denoise",
    positions: Columns = None,
    metric: str | Metric | None = None,
) -> Patching:
    """Patch each head of each layer, one at a time, and measure the effect exactly.

    This takes one forward for each head, or for each head and position with `positions`.

    Args:
        model: a model of bertlite or bertlite.hf, with any head or none, pruned or not; restored, run in eval mode.
        clean, corrupted: a batch each, or equally many batches each, whose examples correspond in order.  Patched
            positions must be tokens in both, or padding in both.
        site: "head", a head's context, which the output projection reads; "attention" or "feed_forward", the output of
            a sublayer; or "residual", the hidden states: level 0 is the embeddings, level i the output of layer i - 1.
        direction: "denoise" puts clean values into the corrupted run and finds sufficient units; "noise" puts
            corrupted values into the clean run and finds necessary ones.
        positions: patch each of these alone, such as range(length); None patches all together.
        metric: "logit_difference", the clean label's logit minus the corrupted label's, with predictions as labels
            unless both batches have labels; "kl", KL(clean ‖ this prediction) in nats; "cosine", of mean
            token vectors; or (output, batch) -> (B,).  The default is "logit_difference" for models that classify
            examples, "cosine" for models without a head, else "kl".

    Raises:
        ValueError: an unknown name or position, inputs that do not fit together, or a metric that does not fit the
            model.
    """
    check_known("site", site, SITES)
    check_known("direction", direction, DIRECTIONS)
    if not (metric is None or callable(metric) or metric in METRICS):
        raise ValueError(f"metric {metric!r} is unknown; have: {', '.join(METRICS)}, or give a function")

    # Examples correspond in order, so both sides must have equal batches.
    both = ([given] if isinstance(given, Mapping) else given for given in (clean, corrupted))
    ours, theirs = (read_batches(model, batches) for batches in both)
    if len(ours) != len(theirs):
        raise ValueError(f"there are {len(ours)} clean batches and {len(theirs)} corrupted ones: give equally many")
    for pair in zip(ours, theirs, strict=True):
        check_aligned(*pair, positions)

    source, base = (0, 1) if direction == "denoise" else (1, 0)

    # The unchanged runs give the values to put in, and the metric at either end of the scale.
    def patch_pair(*pair: Batch) -> tuple[str, Tensor, Tensor]:  # -> the metric's name, (2, B), (B, L, U, P)
        outs, values = zip(*(read_values(model, batch, site) for batch in pair), strict=True)
        name, measure = metric_of(metric, model, *zip(outs, pair, strict=True))
        ends = torch.stack([*map(measure, outs, pair)]).double().cpu()
        batch = pair[base]
        found = replace_each(model, batch, site, values[source], lambda out: measure(out, batch), positions)
        return name, ends, found

    with eval_mode(model), torch.no_grad():
        names, ends, found = zip(*map(patch_pair, ours, theirs), strict=True)
    every = torch.cat(found) if site == "head" else torch.cat(found).squeeze(2)  # (B, L, N, P) or (B, L, P)
    of_clean, of_corrupted = torch.cat(ends, 1)
    return Patching(every[..., 0] if positions is None else every, of_clean, of_corrupted, direction, names[-1])


def check_aligned(clean: Batch, corrupted: Batch, positions: Columns) -> None:
    """Raise ValueError unless patched positions are tokens in both batches or padding in both."""
    shape, other = input_shape(clean), input_shape(corrupted)
    if shape != other:
        raise ValueError(f"clean inputs are {shape}, corrupted ones {other}; tokenize both together")

    ours, theirs = real_tokens(clean), real_tokens(corrupted)
    length = ours.shape[1]
    columns = range(length) if positions is None else positions
    for position in columns:
        if not 0 <= position < length:
            raise ValueError(f"there is no position {position}: the inputs have {length}, 0 to {length - 1}")

    # At a position that is padding on one side, a patch would move a value that no layer reads.
    if differing := (ours != theirs)[:, list(columns)].any(1).nonzero()[:, 0].tolist():
        row = differing[0]
        raise ValueError(
            f"row {row} has {int(ours[row].sum())} tokens clean and {int(theirs[row].sum())} corrupted, so some"
            " positions are padding in one of them. Pair texts with equally many tokens, or name positions that both"
            " have, such as positions=[0] for [CLS]"
        )


# Metrics: one number for each example, from a model's output


def logit_difference(model: BertLike, clean: End, corrupted: End) -> Metric:
    """Return a metric: the logit of the clean label minus the logit of the corrupted label.

    Labels come from the batches if both have some, or else from the model's predictions.

    Raises:
        ValueError: the model does not choose one class for each example, or an example has the same label twice.
    """
    if not chooses_class(model, clean[0]):
        raise ValueError(
            f"{type(model).__name__} does not give each example the logits of classes; use metric='kl', or a"
            " function of (output, batch)"
        )

    # Labels of one side alone cannot be compared, so then both come from the model.
    labels = [batch.get("labels") for _, batch in (clean, corrupted)]
    if any(each is None for each in labels):
        labels = [out.logits.argmax(-1) for out, _ in (clean, corrupted)]
    right, wrong = map(torch.as_tensor, labels)
    if same := (right == wrong).nonzero()[:, 0].tolist():
        raise ValueError(
            f"example {same[0]} has label {int(right[same[0]])} clean and corrupted, so no difference of logits;"
            " choose other pairs, give labels, or use metric='kl'"
        )

    columns = torch.stack([wrong, right], -1)
    return lambda out, batch: out.logits.gather(-1, columns).diff()[:, 0]


def kl(model: BertLike, clean: End, corrupted: End) -> Metric:
    """Return a metric: the KL divergence of the prediction from the clean one, in nats."""
    dense = predictions(model, *clean)
    return lambda out, batch: divergence(dense, predictions(model, out, batch))


def cosine(model: BertLike, clean: End, corrupted: End) -> Metric:
    """Return a metric, for models without a head: the cosine similarity of the mean token vector to the clean one."""
    if "last_hidden_state" not in clean[0]:
        raise ValueError(f"{type(model).__name__} gives no token vectors; use metric='kl'")
    wanted = predictions(model, *clean)[0].values
    return lambda out, batch: F.cosine_similarity(predictions(model, out, batch)[0].values, wanted, dim=-1)[:, 0]


METRICS = {"logit_difference": logit_difference, "kl": kl, "cosine": cosine}


def chooses_class(model: BertLike, out: Any) -> bool:
    """Return whether a model gives each example one distribution over classes."""
    logits = out.get("logits")
    return isinstance(logits, Tensor) and logits.dim() == 2 and getattr(model, "label_kind", None) == "class"


def metric_of(metric: str | Metric | None, model: BertLike, clean: End, corrupted: End) -> tuple[str, Metric]:
    """Return the name and the function of a metric for a pair; it raises ValueError for values that are not (B,)."""
    if metric is None:
        of_class = "logit_difference" if chooses_class(model, clean[0]) else "kl"
        metric = "cosine" if "last_hidden_state" in clean[0] else of_class
    measure = METRICS[metric](model, clean, corrupted) if isinstance(metric, str) else metric
    name = metric if isinstance(metric, str) else getattr(metric, "__name__", "given")
    return name, lambda out, batch: per_example("metric", measure(out, batch), batch)


# Ablation: zeros or means in place of a head's context


@dataclass(frozen=True)
class Ablation:
    """The increase of the loss of every example, in the order of the batches, with one head ablated.

    Args:
        increases: (E, L, N), float64, nan for pruned heads and for examples without a label.
        losses: (E,), the losses of the unchanged model.
    """

    increases: Tensor
    losses: Tensor

    @property
    def increase(self) -> Tensor:
        """The mean over examples, (L, N)."""
        return self.increases.nanmean(0)

    @property
    def standard_error(self) -> Tensor:
        """The standard error of the mean over examples, (L, N); nan for one example."""
        counted = self.increases[~self.losses.isnan()]
        return counted.std(0) / len(counted) ** 0.5


def ablate(
    model: BertLike,
    batches: Iterable[Batch],
    method: str = "mean",
    *,
    reference: Iterable[Batch] | None = None,
    target: str = "loss",
    loss: Metric | None = None,
    teacher: BertLike | None = None,
) -> Ablation:
    """Ablate each head alone, and measure the increase of the loss: one forward for each head.

    Args:
        model: a model of bertlite or bertlite.hf; restored afterwards, run in eval mode.
        batches: inputs of the model, with labels if the target needs them.
        method: "zero", or "mean": the head's mean context over the tokens of the reference.
        reference: inputs; by default the batches themselves.
        target, loss, teacher: as for `head_importance`.

    Raises:
        ValueError: an unknown name, no batches, or labels that are missing or do not fit.
    """
    check_known("ablation", method, ABLATIONS)
    task = ScoringTask(model, HEADS, "example", target=target, loss=loss, teacher=teacher)
    check_task(task, "leave_one_out")
    read = task.labelled(batches)
    contexts = torch.zeros(context_shape(model), dtype=torch.float32, device="cpu")

    def ablate_batch(batch: Batch) -> tuple[Tensor, Tensor]:  # -> (B, L, N), (B,)
        objective = task.objective(batch)
        whole = objective(run(model, batch, **EVERY_TOKEN)).double().cpu()
        without = replace_each(model, batch, "head", values, objective)[..., 0]
        return without - whole[:, None, None], whole

    # Zeros are the contexts above; means are taken over the reference, or over the batches themselves.
    with eval_mode(*task.models), torch.no_grad():
        if method == "mean":
            contexts = mean_contexts(model, read if reference is None else reference)
        values = [x[there][None, None] for x, there in zip(contexts, HEADS.present(model), strict=True)]
        increases, losses = zip(*map(ablate_batch, read), strict=True)
    return Ablation(torch.cat(increases), torch.cat(losses))


def context_shape(model: BertLike) -> tuple[int, int, int]:  # (L, N, H)
    return *HEADS.shape(model), model.config.hidden_size // model.config.num_attention_heads


def mean_contexts(model: BertLike, reference: Iterable[Batch]) -> Tensor:
    """Return the mean context of every head over the tokens of a reference; padding does not count.

    Returns:
        (L, N, H), float64, nan for pruned heads.
    """
    read = read_batches(model, reference)
    with eval_mode(model), torch.no_grad():
        sums = torch.zeros(context_shape(model), dtype=torch.float64, device=model.device)
        for batch in read:
            padding = ~real_tokens(batch)[:, :, None, None]
            for layer, x in enumerate(read_values(model, batch, "head")[1]):
                sums[layer, list(kept_heads(model.config, layer))] += x.double().masked_fill(padding, 0).sum((0, 1))
    tokens = sum(int(real_tokens(batch).sum()) for batch in read)
    if not tokens:
        raise ValueError("the reference holds only padding, so its heads have no mean context: give other texts")
    return (sums.cpu() / tokens).masked_fill(~HEADS.present(model)[..., None], torch.nan)


@contextmanager
def ablated(model: BertLike, heads: Mapping[int, Iterable[int]], contexts: Tensor | None = None) -> Iterator[None]:
    """Replace heads' contexts in every forward of a model within the block.

    Args:
        heads: {layer: heads}, by their numbers in the unpruned model; pruned heads stay pruned.
        contexts: (L, N, H) from `mean_contexts`, for every token; None is zeros.

    Raises:
        ValueError: a layer or head is unknown, or the contexts do not fit or lack a head.
        RuntimeError: at the end, if the model did not run, or ran without hooks.
    """
    check_model(model)
    shape, present = context_shape(model), HEADS.present(model)
    given = torch.zeros(shape, dtype=torch.float32, device="cpu") if contexts is None else contexts
    if tuple(given.shape) != shape:
        raise ValueError(f"contexts are {tuple(given.shape)}; expected {shape}")

    # Pruned heads have no context to replace; heads that remain must have one to put there.
    chosen = torch.zeros_like(present)
    for layer, units in normalise_units(heads, *shape[:2], "head").items():
        chosen[layer, list(units)] = present[layer, list(units)]
    if lacking := (chosen & given.isnan().any(-1).cpu()).nonzero().tolist():
        layer, head = lacking[0]
        raise ValueError(f"the contexts lack head {head} of layer {layer}: compute them with this model")

    def replace(layer: int, x: Tensor) -> Tensor:
        kept = present[layer]
        return torch.where(chosen[layer, kept, None].to(x.device), given[layer, kept].to(x), x)

    with edited(model, "head", {layer: partial(replace, layer) for layer in chosen.any(1).nonzero()[:, 0].tolist()}):
        yield
