"""Labels and losses of the task heads.

Label -100 means "no label here" wherever labels are class indices.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor
from torch.nn import functional as F

from bertlite.stack.masks import concrete
from bertlite.stack.packing import Packing

IGNORED = -100
Items = int | Tensor | None  # how many labels a loss is the mean of


def cross_entropy(logits: Tensor, labels: Tensor, name: str = "labels", items: Items = None) -> Tensor:
    """Mean over the labels that are not -100, in nats; or their sum over `items`.

    Raises:
        ValueError: labels of another shape, not integers, or (on the CPU, where looking is free) out of range.
    """
    if isinstance(labels, Tensor):  # torch.fx traces with stand-ins
        check_labels(logits, labels, name)
    classes = logits.shape[-1]
    rows, labels = logits.reshape(-1, classes), labels.reshape(-1).long()
    if items is None:
        return F.cross_entropy(rows, labels, ignore_index=IGNORED)
    return F.cross_entropy(rows, labels, ignore_index=IGNORED, reduction="sum") / items


def check_labels(logits: Tensor, labels: Tensor, name: str) -> None:
    classes = logits.shape[-1]
    check_places(labels, logits.shape[:-1], name)
    if labels.device.type == "cpu" and labels.numel() and concrete(labels):
        low, high = (int(end) for end in labels.masked_fill(labels == IGNORED, 0).aminmax())
        if low < 0 or high >= classes:
            raise ValueError(
                f"{name} holds {low if low < 0 else high}; the classes are 0 to {classes - 1}, and -100 for none"
            )


def check_places(labels: Tensor, places: Sequence[int], name: str) -> None:
    if labels.is_floating_point() or not fits(labels, places):
        raise ValueError(
            f"{name} is {labels.dtype} of shape {tuple(labels.shape)}; expected class indices of shape {tuple(places)}"
        )


def fits(labels: Tensor, places: Sequence[int]) -> bool:
    """Whether labels have one value for each place, in the same order: flat, or alike but for axes of one."""
    if labels.dim() > 1 and [n for n in labels.shape if n != 1] != [n for n in places if n != 1]:
        return False
    return labels.numel() == prod(places)


def inside(positions: Tensor, logits: Tensor, packing: Packing | None = None) -> Tensor:
    """Token indices, (B,), as labels for logits (B, S): those past the end, or on padding left out, do not count."""
    labels = positions.clamp(min=0).masked_fill(positions >= logits.shape[1], IGNORED)
    if packing is None:
        return labels
    real = packing.unpack(torch.ones(packing.tokens, dtype=torch.bool, device=labels.device))  # (B, S)
    return labels.where(real.gather(1, labels.long().clamp(min=0)[:, None])[:, 0], IGNORED)


def pack_labels(packing: Packing | None, labels: Tensor) -> Tensor:
    """Labels, one for each place of (B, S), of the real tokens alone where padding is left out."""
    if packing is None:
        return labels
    assert packing.shape is not None  # only rows have padding to leave out
    check_places(labels, packing.shape, "labels")
    return packing.pack(labels.reshape(packing.shape))


def shifted(labels: Tensor) -> Tensor:
    """Return labels (…, S) so that each position is judged by the one after it, the last by none."""
    return F.pad(labels, (0, 1), value=IGNORED)[..., 1:]


def without_padding(labels: Tensor, real: Tensor) -> Tensor:
    """Return labels that do not count where `real` is False: of padding that is left out there is no logit."""
    return labels.masked_fill(~real.view_as(labels), IGNORED)
