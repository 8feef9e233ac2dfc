"""The sites of a forward whose values can be read and changed by hooks; the model runs its usual code.

Shapes:  L levels, layers but for the residual stream, which has one more · R rows, B or B·choices in multiple choice ·
         S positions · U units as built, heads or the one of another site · u units of one level that are not pruned ·
         W width of a unit
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from bertlite.config import BertConfig, kept_heads
from bertlite.models.structure import BertLike, layers_of
from bertlite.pruning.importance.batches import Batch, check_model, eval_mode, read_batches, real_tokens
from bertlite.pruning.importance.structures import EVERY_TOKEN, run, whole_layers

Edit = Callable[[int, Tensor], Tensor | None]  # level, (R, S, u, W) -> the replacement, or None to keep it


@dataclass(frozen=True)
class Site:
    """A kind of value in a forward, one at each level: one unit, or its heads."""

    name: str
    modules: Callable[[BertLike], list[nn.Module]]  # of each level, the one that has the value
    of_heads: bool = False  # the value is the module's input, and has a part for each head; else it is the output

    def kept(self, config: BertConfig, level: int) -> tuple[int, ...]:
        """Return the units that a level still has."""
        return kept_heads(config, level) if self.of_heads else (0,)

    def present(self, model: BertLike) -> Tensor:
        """Return (L, U) bool: the units that are not pruned."""
        units = model.config.num_attention_heads if self.of_heads else 1
        there = torch.zeros(len(self.modules(model)), units, dtype=torch.bool, device="cpu")
        for level in range(len(there)):
            there[level, list(self.kept(model.config, level))] = True
        return there


def projections(model: BertLike) -> list[nn.Module]:
    return [layer.attention.output.dense for layer in layers_of(model)]


SITES = {
    site.name: site
    for site in (
        Site("head", projections, of_heads=True),
        Site("attention", projections),
        Site("feed_forward", lambda model: [layer.output.dense for layer in layers_of(model)]),
        Site("residual", lambda model: [model.base_model.embeddings, *layers_of(model)]),
    )
}


def site_of(name: str) -> Site:
    """Return the site of a name.

    Raises:
        ValueError: there is none.
    """
    if name not in SITES:
        raise ValueError(f"there is no site {name!r}; have: {', '.join(SITES)}")
    return SITES[name]


def read_rows(model: BertLike, batches: Iterable[Batch], labelled: bool = False) -> list[Batch]:
    """Check batches and move them to the model's device.

    Raises:
        ValueError: there are no batches; one has no inputs, lacks labels that are needed or is packed; or the model is
            compiled, so that no hook runs.
        TypeError: the model is not one of bertlite's, or a batch is not a mapping.
    """
    if hasattr(model, "_orig_mod"):
        raise ValueError("the model is compiled, so new hooks do not run; pass the one that was compiled")
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
def edited(model: BertLike, site: Site, edit: Edit, real: Tensor | None = None) -> Iterator[None]:
    """Let every forward pass its values at a site through `edit`.

    Args:
        real: (R, S) bool of the rows that will run, from which packed tokens are put in rows and back; without it
            values are those of rows, or (1, T, u, W) of packed tokens.

    Raises:
        RuntimeError: at the end, if a module did not run, or was not called as a module.
    """
    modules, levels_run = site.modules(model), set[int]()

    def add_hook(level: int, module: nn.Module) -> RemovableHandle:
        count = len(site.kept(model.config, level))

        def change(x: Tensor) -> Tensor:
            levels_run.add(level)
            return edited_value(level, edit, count, real, x) if count else x

        def change_input(module: nn.Module, args: tuple[Any, ...]) -> Any:
            return change(args[0]), *args[1:]

        def change_output(module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
            return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)

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


def edited_value(level: int, edit: Edit, count: int, real: Tensor | None, x: Tensor) -> Tensor:  # (…, u·W) -> (…, u·W)
    """Pass a module's input or output through an edit, as rows of units."""
    packed, rows = x.dim() == 2, x
    if packed:
        rows = x[None] if real is None else x.new_zeros(*real.shape, x.shape[-1]).index_put((real,), x)
    if real is not None and rows.shape[:2] != real.shape:
        raise ValueError(f"level {level} computed {tuple(rows.shape[:2])} tokens of {tuple(real.shape)}; run them all")
    new = edit(level, rows.unflatten(-1, (count, -1)))
    if new is None:
        return x
    new = new.flatten(-2)
    return (new[0] if real is None else new[real]) if packed else new


def run_edited(model: BertLike, batch: Batch, site: Site, edit: Edit) -> Any:
    """Run the model on a batch without its labels, with an edit at a site."""
    with edited(model, site, edit, real_tokens(batch)):
        return run(model, batch, **EVERY_TOKEN)


def read_values(model: BertLike, batch: Batch, site: Site) -> tuple[Any, list[Tensor]]:
    """Run the model on a batch; return its output, and the value at each level, (R, S, u, W)."""
    found: dict[int, Tensor] = {}
    real = real_tokens(batch)

    def keep(level: int, x: Tensor) -> None:
        found[level] = x

    out = run_edited(model, batch, site, keep)
    none = torch.zeros(*real.shape, 0, 1, device=real.device, dtype=torch.float32)  # of a layer without heads
    return out, [found.get(level, none) for level in range(len(site.modules(model)))]


def activations_at(model: BertLike, batch: Batch, site: str = "head") -> Tensor:
    """Return the values of a model at a site for a batch, in eval mode and without gradients.

    Args:
        site: "head", a head's context, which the output projection reads; "attention" or "feed_forward", what the
            sublayer adds to the residual stream; or "residual", the hidden states: level 0 is the embeddings, level i
            the output of layer i - 1.

    Returns:
        (L, R, S, N, H) for heads, nan for pruned ones, and (L, R, S, D) for the others; zeros for padding that was
        left out.
    """
    place = site_of(site)
    (read,) = read_rows(model, [batch])
    with eval_mode(model), torch.no_grad():
        _, values = read_values(model, read, place)
    if site != "head":
        return torch.stack(values)[..., 0, :]
    size = model.config.hidden_size // model.config.num_attention_heads
    shape = (len(values), *values[0].shape[:2], model.config.num_attention_heads, size)
    full = torch.full(shape, torch.nan, dtype=model.dtype, device=model.device)
    for level, each in enumerate(values):
        kept = list(place.kept(model.config, level))
        if kept:
            full[level][:, :, kept] = each.to(full.dtype)
    return full
