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
from torch.utils.hooks import RemovableHandle

from bertlite.config import BertConfig, kept_heads, normalise_units
from bertlite.models.structure import BertLike, check_model, layers_of
from bertlite.pruning.importance.batches import (
    Batch,
    Loss,
    eval_mode,
    input_shape,
    per_example,
    read_batches,
    real_tokens,
)
from bertlite.pruning.importance.measurements import ScoringTask
from bertlite.pruning.importance.predictions import divergence, predictions
from bertlite.pruning.importance.scores import check_task
from bertlite.pruning.importance.structures import EVERY_TOKEN, HEADS, run, whole_layers

__all__ = ["ABLATIONS", "DIRECTIONS", "METRICS", "SITES", "Ablation", "Patching"]
__all__ += ["ablate", "ablated", "mean_contexts", "patch"]
ABLATIONS = ("zero", "mean")
DIRECTIONS = ("denoise", "noise")
Batches = Batch | Iterable[Batch]
Edit = Callable[[int, Tensor], Tensor | None]  # level, (…, u, W) -> the replacement, or None to keep it
Metric = Callable[[Any, Batch], Tensor]  # (model output, batch) -> (B,)
End = tuple[Any, Batch]  # the model's output for a clean or a corrupted batch, and the batch


# Sites: values of a forward that can be read and changed


@dataclass(frozen=True)
class Site:
    """A kind of value in a forward, one at each level: one unit, or its heads."""

    name: str
    modules: Callable[[BertLike], list[nn.Module]]  # for each level the module that has the value
    of_heads: bool = False  # the value is the module's input, and has a part for each head; else it is the output

    def kept(self, config: BertConfig, level: int) -> tuple[int, ...]:
        """Return the units that a level still has."""
        return kept_heads(config, level) if self.of_heads else (0,)


def projections(model: BertLike) -> list[nn.Module]:
    return [layer.attention.output.dense for layer in layers_of(model)]


HEAD = Site("head", projections, of_heads=True)
SITES = {
    site.name: site
    for site in (
        HEAD,
        Site("attention", projections),
        Site("feed_forward", lambda model: [layer.output.dense for layer in layers_of(model)]),
        Site("residual", lambda model: [model.base_model.embeddings, *layers_of(model)]),
    )
}


def check_name(what: str, name: str, known: Iterable[str]) -> None:
    """Raise ValueError for an unknown site, direction or ablation."""
    if name not in known:
        raise ValueError(f"there is no {what} {name!r}; have: {', '.join(known)}")


def check_rows(model: BertLike, batches: Iterable[Batch], labelled: bool = False) -> list[Batch]:
    """Check batches and move them to the model's device.

    Raises:
        ValueError: there are no batches; one has no inputs, lacks needed labels or is packed; or the model is
            compiled, so that no hook runs.
        TypeError: the model is not one of bertlite's, or a batch is not a mapping.
    """
    if hasattr(model, "_orig_mod"):
        raise ValueError("the model is compiled, so new hooks do not run; pass the model from before torch.compile")
    check_model(model)
    read = read_batches(model, batches, labelled)
    for i, batch in enumerate(read):
        if batch.get("cu_seqlens") is not None:
            raise ValueError(
                f"batch {i} has cu_seqlens, whose tokens have no rows; give rows with an attention_mask, and leave"
                " padding out with attn_implementation='packed'"
            )
    return read


@contextmanager
def edited(model: BertLike, site: Site, edit: Edit) -> Iterator[None]:
    """Let every forward pass its values at a site through `edit`: (R, S, u, W), or (T, u, W) for packed tokens.

    Raises:
        RuntimeError: at the end, if a module did not run, or was not called as a module.
    """
    modules, levels_run = site.modules(model), set[int]()

    def change(level: int, x: Tensor) -> Tensor:  # (…, u·W) -> (…, u·W)
        levels_run.add(level)
        count = len(site.kept(model.config, level))
        new = edit(level, x.unflatten(-1, (count, -1) if count else (0, 1)))
        return x if new is None else new.flatten(-2)

    def add_hook(level: int, module: nn.Module) -> RemovableHandle:
        def change_input(module: nn.Module, args: tuple[Any, ...]) -> Any:
            return change(level, args[0]), *args[1:]

        def change_output(module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
            return (change(level, out[0]), *out[1:]) if isinstance(out, tuple) else change(level, out)

        if site.of_heads:
            return module.register_forward_pre_hook(change_input)
        return module.register_forward_hook(change_output)

    with whole_layers(model), ExitStack() as hooks:
        for level, module in enumerate(modules):
            hooks.enter_context(add_hook(level, module))
        yield
    missed = sorted(set(range(len(modules))) - levels_run)
    if missed:
        raise RuntimeError(f"the {site.name} of level {missed[0]} was not computed by its module, so no hook reads it")


def run_edited(model: BertLike, batch: Batch, site: Site, edit: Edit) -> Any:
    """Run the model on a batch without its labels, with an edit of rows, (R, S, u, W), at a site."""
    real = real_tokens(batch)

    def edit_rows(level: int, x: Tensor) -> Tensor | None:
        if x.dim() == 4:
            return edit(level, x)
        new = edit(level, x.new_zeros(*real.shape, *x.shape[1:]).index_put((real,), x))  # padding is left out
        return None if new is None else new[real]

    with edited(model, site, edit_rows):
        return run(model, batch, **EVERY_TOKEN)


def read_values(model: BertLike, batch: Batch, site: Site) -> tuple[Any, list[Tensor]]:
    """Run the model on a batch; return its output, and the value at each level, (R, S, u, W)."""
    found: dict[int, Tensor] = {}
    out = run_edited(model, batch, site, found.__setitem__)
    return out, [found[level] for level in sorted(found)]


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
        """The change of the mean metric as a share of the difference between the runs: 0 is none, 1 all.

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
    positions: Sequence[int] | None = None,
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
    check_name("site", site, SITES)
    check_name("direction", direction, DIRECTIONS)
    if not (metric is None or callable(metric) or metric in METRICS):
        raise ValueError(f"there is no metric {metric!r}; have: {', '.join(METRICS)}, or give a function")
    both = [check_rows(model, [given] if isinstance(given, Mapping) else given) for given in (clean, corrupted)]
    if len(both[0]) != len(both[1]):
        raise ValueError(
            f"there are {len(both[0])} clean batches and {len(both[1])} corrupted ones: give equally many"
        )
    pairs, place, name, found, measured = list(zip(both[0], both[1], strict=True)), SITES[site], "", [], []
    for pair in pairs:
        check_aligned(*pair, positions)
    with eval_mode(model), torch.no_grad():
        for pair in pairs:
            (one, given), (other, given_other) = (read_values(model, batch, place) for batch in pair)
            ends = (one, pair[0]), (other, pair[1])
            name, measure = metric_of(metric, model, *ends)
            measured.append(torch.stack([measure(*end) for end in ends]))
            batch, values = (pair[1], given) if direction == "denoise" else (pair[0], given_other)
            found.append(measure_patches(model, batch, values, measure, place, positions))
    clean_value, corrupted_value = torch.cat(measured, 1).double().cpu()
    every = torch.cat(found) if place.of_heads else torch.cat(found).squeeze(2)  # (B, L, N, P) or (B, L, P)
    every = every[..., 0] if positions is None else every
    return Patching(every, clean_value, corrupted_value, direction, name)


def measure_patches(
    model: BertLike,
    batch: Batch,
    values: Sequence[Tensor],
    measure: Metric,
    site: Site,
    positions: Sequence[int] | None,
) -> Tensor:
    """Return the metric of a batch with one unit's values replaced at a time, (B, L, U, P); nan for pruned units."""
    columns = [slice(None)] if positions is None else [slice(position, position + 1) for position in positions]
    units = model.config.num_attention_heads if site.of_heads else 1
    shape = (input_shape(batch)[0], len(values), units, len(columns))
    found = torch.full(shape, torch.nan, dtype=torch.float64, device="cpu")
    for level in range(len(values)):
        for index, unit in enumerate(site.kept(model.config, level)):
            for i, where in enumerate(columns):
                edit = partial(replace_unit, level, index, where, values[level])
                found[:, level, unit, i] = measure(run_edited(model, batch, site, edit), batch).double().cpu()
    return found


def replace_unit(wanted: int, index: int, where: slice, values: Tensor, level: int, x: Tensor) -> Tensor | None:
    """Replace one unit of a level's values, (R, S, u, W), at some positions."""
    if level != wanted:
        return None
    new = x.clone()
    new[:, where, index] = values[:, where, index].to(x.dtype)
    return new


def check_aligned(clean: Batch, corrupted: Batch, positions: Sequence[int] | None) -> None:
    """Raise ValueError unless patched positions are tokens in both batches or padding in both."""
    if input_shape(clean) != input_shape(corrupted):
        raise ValueError(
            f"clean inputs are {input_shape(clean)}, corrupted ones {input_shape(corrupted)}; tokenize both together"
        )
    ours, theirs = real_tokens(clean), real_tokens(corrupted)
    length = ours.shape[1]
    for position in positions or ():
        if not 0 <= position < length:
            raise ValueError(f"there is no position {position}: the inputs have {length}, 0 to {length - 1}")
    columns = list(range(length)) if positions is None else list(positions)
    differing = (ours != theirs)[:, columns].any(1).nonzero()[:, 0].tolist()
    if differing:
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
    given = [batch.get("labels") for _, batch in (clean, corrupted)]
    if any(labels is None for labels in given):
        given = [out.logits.argmax(-1) for out, _ in (clean, corrupted)]
    right, wrong = (torch.as_tensor(labels) for labels in given)
    same = (right == wrong).nonzero()[:, 0].tolist()
    if same:
        raise ValueError(
            f"example {same[0]} has label {int(right[same[0]])} clean and corrupted, so no difference of logits;"
            " choose other pairs, give labels, or use metric='kl'"
        )

    def difference(out: Any, batch: Batch) -> Tensor:
        picked = (out.logits.gather(-1, label[:, None])[:, 0] for label in (right, wrong))
        return next(picked) - next(picked)

    return difference


def kl(model: BertLike, clean: End, corrupted: End) -> Metric:
    """Return a metric: the KL divergence of the prediction from the clean one, in nats."""
    dense = predictions(model, *clean)
    return lambda out, batch: divergence(dense, predictions(model, out, batch))


def cosine(model: BertLike, clean: End, corrupted: End) -> Metric:
    """Return a metric: the cosine similarity of the mean token vector to the clean one.

    Raises:
        ValueError: the model has a task head.
    """
    if "last_hidden_state" not in clean[0]:
        raise ValueError(f"{type(model).__name__} gives no token vectors; use metric='kl'")

    def vectors(out: Any, batch: Batch) -> Tensor:
        return predictions(model, out, batch)[0].values[:, 0]

    wanted = vectors(*clean)
    return lambda out, batch: F.cosine_similarity(vectors(out, batch), wanted, dim=-1)


METRICS: dict[str, Callable[[BertLike, End, End], Metric]] = {
    "logit_difference": logit_difference,
    "kl": kl,
    "cosine": cosine,
}


def chooses_class(model: BertLike, out: Any) -> bool:
    """Return whether a model gives each example one distribution over classes."""
    logits = out.get("logits")
    return isinstance(logits, Tensor) and logits.dim() == 2 and getattr(model, "label_kind", None) == "class"


def metric_of(metric: str | Metric | None, model: BertLike, clean: End, corrupted: End) -> tuple[str, Metric]:
    """Return the name and the function of a metric for a pair; it raises ValueError for values that are not (B,)."""
    if metric is None:
        of_class = "logit_difference" if chooses_class(model, clean[0]) else "kl"
        metric = "cosine" if "last_hidden_state" in clean[0] else of_class
    if callable(metric):
        name, measure = getattr(metric, "__name__", "given"), metric
    else:
        name, measure = metric, METRICS[metric](model, clean, corrupted)
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
    loss: Loss | None = None,
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
    check_name("ablation", method, ABLATIONS)
    task = ScoringTask(model, HEADS, "example", target=target, loss=loss, teacher=teacher)
    check_task(task, "leave_one_out")
    read, present = check_rows(model, batches, task.needs_labels), HEADS.present(model)
    increases, losses = [], []
    with eval_mode(*task.models), torch.no_grad():
        contexts = mean_contexts(model, read if reference is None else reference) if method == "mean" else None
        for batch in read:
            objective = task.objective(batch)
            losses.append(objective(run(model, batch, **EVERY_TOKEN)).double().cpu())
            shape = (len(losses[-1]), *present.shape)
            increases.append(torch.full(shape, torch.nan, dtype=torch.float64, device="cpu"))
            for layer, head in present.nonzero().tolist():
                with ablated(model, {layer: [head]}, contexts):
                    without = objective(run(model, batch, **EVERY_TOKEN)).double().cpu()
                increases[-1][:, layer, head] = without - losses[-1]
    return Ablation(torch.cat(increases), torch.cat(losses))


def context_shape(model: BertLike) -> tuple[int, int, int]:  # (L, N, H)
    return *HEADS.shape(model), model.config.hidden_size // model.config.num_attention_heads


def mean_contexts(model: BertLike, reference: Iterable[Batch]) -> Tensor:
    """Return the mean context of every head over the tokens of a reference; padding does not count.

    Returns:
        (L, N, H), float64, nan for pruned heads.
    """
    read = check_rows(model, reference)
    sums = torch.zeros(context_shape(model), dtype=torch.float64, device=model.device)
    with eval_mode(model), torch.no_grad():
        for batch in read:
            padding = ~real_tokens(batch)[:, :, None, None]
            for layer, x in enumerate(read_values(model, batch, HEAD)[1]):
                sums[layer, list(kept_heads(model.config, layer))] += x.double().masked_fill(padding, 0).sum((0, 1))
    means = sums.cpu() / sum(int(real_tokens(batch).sum()) for batch in read)
    return means.masked_fill(~HEADS.present(model)[..., None], torch.nan)


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
    wanted = context_shape(model)
    given = torch.zeros(wanted, dtype=torch.float32, device="cpu") if contexts is None else contexts
    if tuple(given.shape) != wanted:
        raise ValueError(f"contexts are {tuple(given.shape)}; expected {wanted}")
    values: dict[int, dict[int, Tensor]] = {}  # {layer: {place of a head among the ones that it has: its context}}
    for layer, chosen in normalise_units(heads, *wanted[:2], "head").items():
        kept = kept_heads(model.config, layer)
        values[layer] = {kept.index(head): given[layer, head] for head in chosen if head in kept}
        for index, value in values[layer].items():
            if value.isnan().any():
                raise ValueError(
                    f"the contexts lack head {kept[index]} of layer {layer}: compute them with this model"
                )

    def replace(layer: int, x: Tensor) -> Tensor | None:
        if not values.get(layer):
            return None
        new = x.clone()
        for index, value in values[layer].items():
            new[..., index, :] = value.to(x)
        return new

    with edited(model, HEAD, replace):
        yield
