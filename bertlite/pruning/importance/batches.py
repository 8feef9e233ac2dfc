"""Read calibration data: check batches before any work, compute each example's loss, restore models.

Shapes:  B examples · S positions;  rows are B, or B·choices in multiple choice
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from bertlite.models.body import HeadBody
from bertlite.models.structure import BertLike, check_model
from bertlite.stack.inputs import check_tensor

Batch = Mapping[str, Any]  # a model's inputs, and its labels
Loss = Callable[[Any, Batch], Tensor]  # (model output, batch) -> (B,), each example's loss

LABELS = ("labels", "start_positions", "end_positions", "next_sentence_label")


@contextmanager
def eval_mode(*models: BertLike) -> Iterator[None]:
    """Put models in eval mode and freeze their parameters, with gradients recorded.

    Training mode, requires_grad and the random state are restored, also after an error.  Parameters are found by name,
    since pruning replaces them.
    """
    trained = [{name: x.requires_grad for name, x in model.named_parameters()} for model in models]
    modes: list[tuple[nn.Module, bool]] = [(module, module.training) for model in models for module in model.modules()]
    gpus = {parameter.device.index for model in models for parameter in model.parameters() if parameter.is_cuda}
    with torch.inference_mode(False), torch.random.fork_rng(sorted(gpus)), torch.enable_grad():
        try:
            for model in models:
                model.eval().requires_grad_(False)
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            for model, wanted in zip(models, trained, strict=True):
                for name, parameter in model.named_parameters():
                    parameter.requires_grad_(wanted[name])


def head_of(model: BertLike) -> HeadBody[Any]:
    """Return a model, typed as one that has a task head.

    Raises:
        ValueError: it has no task head.
    """
    if not hasattr(model, "example_loss"):
        raise ValueError(f"{type(model).__name__} has no loss of its own; pass loss= or target='kl'")
    return cast(HeadBody[Any], model)


def read_batches(model: BertLike, batches: Iterable[Batch], labelled: bool = False) -> list[Batch]:
    """Check batches and move them to the model's device.

    Raises:
        ValueError: there are none; or one is packed, or lacks inputs that fit the model, or labels if they are needed.
        TypeError: a batch is not a mapping, `batches` is one, or the model is not one of bertlite's.
    """
    check_model(model)
    if isinstance(batches, Mapping):
        raise TypeError("this is one batch, not a list of batches: pass [batch]")
    if not isinstance(batches, Iterable):
        raise TypeError(f"batches is of type {type(batches).__name__}; give a list of batches")

    # A fault in the last batch would cost the work on all before it, so batches are checked before any runs.
    read: list[Batch] = []
    for i, batch in enumerate(batches):
        if not isinstance(batch, Mapping):
            raise TypeError(f"batch {i} is a {type(batch).__name__}; expected a mapping of the model's inputs")
        if batch.get("input_ids") is None and batch.get("inputs_embeds") is None:
            raise ValueError(f"batch {i} has no input_ids or inputs_embeds; it has {', '.join(batch) or 'nothing'}")

        if batch.get("cu_seqlens") is not None:
            raise ValueError(
                f"batch {i} has cu_seqlens, whose tokens have no rows; give rows with an attention_mask, and leave"
                " padding out with attn_implementation='packed'"
            )

        for name in ("input_ids", "inputs_embeds"):
            check_tensor(name, batch.get(name))
        if not count_examples(batch):
            raise ValueError(f"batch {i} has no example")

        # Batches move to the model's device once, for several passes over them.
        with torch.inference_mode(False):  # autograd saves no tensor of it, but a copy
            moved = {
                name: (x.clone() if x.is_inference() else x).to(model.device) if isinstance(x, Tensor) else x
                for name, x in batch.items()
            }

        if labelled:
            try:
                head_of(model).check_labels(moved, input_shape(moved))
            except ValueError as error:
                raise ValueError(f"batch {i}: {error}") from None
        read.append(moved)
    if not read:
        raise ValueError("there are no batches: give at least one (a generator that was read before is empty)")
    return read


def inputs_of(batch: Batch) -> dict[str, Any]:
    """Return a batch without its labels."""
    return {name: value for name, value in batch.items() if name not in LABELS}


def count_examples(batch: Batch) -> int:
    return input_shape(batch)[0]


def input_shape(batch: Batch) -> tuple[int, ...]:
    """Return (B, S), or (B, choices, S)."""
    ids = batch.get("input_ids")
    return tuple(batch["inputs_embeds"].shape[:-1] if ids is None else ids.shape)


def real_tokens(batch: Batch) -> Tensor:
    """Return (rows, S) bool, True where a token is not padding; masks of another shape are ignored."""
    shape, mask = input_shape(batch), batch.get("attention_mask")
    if isinstance(mask, Tensor) and tuple(mask.shape) == shape:
        return mask.reshape(-1, shape[-1]) != 0
    given = batch["inputs_embeds"] if batch.get("input_ids") is None else batch["input_ids"]
    return torch.ones(shape, dtype=torch.bool, device=given.device).reshape(-1, shape[-1])


def flatten(x: Tensor, real: Tensor) -> Tensor:
    """Return the states of real tokens, (T, …), from (rows, S, …) or from packed states, which have no padding."""
    # index_select is faster than x[real].
    return x.flatten(0, 1).index_select(0, real.flatten().nonzero()[:, 0]) if x.dim() == 3 else x


def per_example(what: str, numbers: object, batch: Batch) -> Tensor:
    """Return the values of a loss or metric.

    Raises:
        ValueError: it is not (B,).
    """
    if isinstance(numbers, Tensor) and tuple(numbers.shape) == (count_examples(batch),):
        return numbers
    shape = tuple(numbers.shape) if isinstance(numbers, Tensor) else type(numbers).__name__
    raise ValueError(f"the {what} returned {shape}; expected one number for each of {count_examples(batch)} examples")


def example_losses(model: BertLike, out: Any, batch: Batch) -> Tensor:
    """Compute the model's own loss of each example: (B,), nan for an example without labels."""
    head, real = head_of(model), real_tokens(batch)
    return torch.stack([head.example_loss(out, batch, slice(i, i + 1), real) for i in range(count_examples(batch))])
