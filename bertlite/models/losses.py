"""Labels and losses of the task heads.

Label -100 means "no label here" wherever labels are class indices.
"""

from collections.abc import Sequence
from math import prod

from torch import Tensor
from torch.nn import functional as F

from bertlite.stack.inputs import check_tensor, values_readable
from bertlite.stack.layouts import Layout, Padded

IGNORED = -100
Items = int | Tensor | None  # divide a loss by this number of labels


def cross_entropy_of_labels(logits: Tensor, labels: Tensor, name: str = "labels", items: Items = None) -> Tensor:
    """Return the mean over the labels that are not -100, in nats; or their sum over `items`.

    Raises:
        ValueError: labels have another shape, are not integers, or (checked only on the CPU) are out of range.
    """
    check_tensor(name, labels)
    if isinstance(labels, Tensor):  # torch.fx traces with stand-ins
        check_labels(logits, labels, name)
    rows, labels = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1).long()
    if items is None:
        return F.cross_entropy(rows, labels, ignore_index=IGNORED)
    return F.cross_entropy(rows, labels, ignore_index=IGNORED, reduction="sum") / items


def check_labels(logits: Tensor, labels: Tensor, name: str) -> None:
    """Raise ValueError for labels that are not class indices for logits (…, classes)."""
    classes = logits.shape[-1]
    check_positions(labels, logits.shape[:-1], name)
    if labels.device.type == "cpu" and labels.numel() and values_readable(labels):
        low, high = (int(end) for end in labels.masked_fill(labels == IGNORED, 0).aminmax())
        if low < 0 or high >= classes:
            wrong = low if low < 0 else high
            raise ValueError(f"{name} holds {wrong}; the classes are 0 to {classes - 1}, and -100 for none")


def check_positions(labels: Tensor, positions: Sequence[int], name: str) -> None:
    """Raise ValueError unless labels have one class index for each position."""
    if labels.is_floating_point() or not fits(labels, positions):
        wanted = f"class indices of shape {tuple(positions)}"
        raise ValueError(f"{name} is {labels.dtype} of shape {tuple(labels.shape)}; expected {wanted}")


def fits(labels: Tensor, positions: Sequence[int]) -> bool:
    """Return whether labels have one value for each position: flat, or of the same shape except for axes of 1."""
    if labels.dim() > 1 and [n for n in labels.shape if n != 1] != [n for n in positions if n != 1]:
        return False
    return labels.numel() == prod(positions)


def token_labels(positions: Tensor, logits: Tensor, real: Tensor | None = None) -> Tensor:
    """Return token indices, (B,), as labels for logits (B, S).

    An index does not count if it is past the end, or if `real`, (B, S), is False there: padding that was left out.
    """
    check_tensor("positions", positions)
    labels = positions.clamp(min=0).masked_fill(positions >= logits.shape[1], IGNORED)
    if real is None:
        return labels
    return labels.where(real.gather(1, labels.long().clamp(min=0)[:, None])[:, 0], IGNORED)


def span_loss(start: Tensor, end: Tensor, starts: Tensor, ends: Tensor, real: Tensor | None = None) -> Tensor:
    """Return the mean of the losses of the first and the last token, given logits, (B, S), and indices, (B,)."""
    first = cross_entropy_of_labels(start, token_labels(starts, start, real), "start_positions")
    last = cross_entropy_of_labels(end, token_labels(ends, end, real), "end_positions")
    return (first + last) / 2


def pack_labels(layout: Layout, labels: Tensor) -> Tensor:
    """Return the labels of the tokens that were computed: only real tokens, if padding is left out."""
    check_tensor("labels", labels)
    if isinstance(layout, Padded):
        return labels
    check_positions(labels, layout.shape, "labels")
    return layout.pack(labels.reshape(layout.shape), IGNORED)


def labels_padding(labels: Tensor | None, mask: Tensor | None) -> bool:
    """Return whether a label that counts is at a position where a mask, (B, S), has 0."""
    if labels is None or mask is None or labels.numel() != mask.numel():
        return False
    return bool(((labels.reshape(mask.shape) != IGNORED) & (mask == 0)).any())


def shifted(labels: Tensor) -> Tensor:
    """Return labels (…, S) shifted left: each position gets the label after it, and the last gets none."""
    check_tensor("labels", labels)
    return F.pad(labels, (0, 1), value=IGNORED)[..., 1:]


def labels_without_padding(labels: Tensor, real: Tensor) -> Tensor:
    """Return labels that do not count where `real` is False: padding that was left out has no logits."""
    return labels.masked_fill(~real.view_as(labels), IGNORED)
