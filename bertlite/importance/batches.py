"""Reading calibration data: batches checked before any work, losses example by example, models left as found.

Shapes:  B examples · S positions;  rows are B, or B·choices in multiple choice
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bertlite.heads.losses import IGNORED, check_labels, cross_entropy, inside
from bertlite.heads.models import (
    CausalLMBody,
    HeadBody,
    LanguageModelBody,
    MultipleChoiceBody,
    NextSentencePredictionBody,
    PreTrainingBody,
    QuestionAnsweringBody,
    SequenceClassificationBody,
    TokenClassificationBody,
)
from bertlite.stack.body import BertBody

Batch = Mapping[str, Any]
Loss = Callable[[Any, Batch], Tensor]  # (model output, batch) -> (B,), each example's loss

LABELS = ("labels", "start_positions", "end_positions", "next_sentence_label")


@contextmanager
def as_found(*models: Any) -> Iterator[None]:
    """Models to be read: in eval mode and frozen, while gradients are recorded.

    Afterwards training mode, requires_grad and the random state are what they were, also after an error.
    """
    modes = [(module, module.training) for model in models for module in model.modules()]
    trained = [(parameter, parameter.requires_grad) for model in models for parameter in model.parameters()]
    gpus = {parameter.device.index for parameter, _ in trained if parameter.is_cuda}
    with torch.random.fork_rng(sorted(gpus)), torch.enable_grad():
        try:
            for model in models:
                model.eval().requires_grad_(False)
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            for parameter, wanted in trained:
                parameter.requires_grad_(wanted)


def check_model(model: Any) -> None:
    if not isinstance(getattr(model, "base_model", None), BertBody):
        raise TypeError(f"{type(model).__name__} is no model of bertlite or bertlite.hf; load it with one of these")


def read_batches(model: Any, batches: Iterable[Batch], labelled: bool = False) -> list[Batch]:
    """The batches, on the model's device.

    Raises:
        ValueError: there are none; or one has no inputs or, if they are needed, no labels that the model can take.
        TypeError: a batch is no mapping.
    """
    read: list[Batch] = []
    for i, batch in enumerate(batches):
        if not isinstance(batch, Mapping):
            raise TypeError(f"batch {i} is a {type(batch).__name__}; expected a mapping of the model's inputs")
        if batch.get("input_ids") is None and batch.get("inputs_embeds") is None:
            raise ValueError(
                f"batch {i} has neither input_ids nor inputs_embeds; it has {', '.join(batch) or 'nothing'}"
            )
        moved = {name: x.to(model.device) if isinstance(x, Tensor) else x for name, x in batch.items()}
        if labelled:
            try:
                check_fit(model, moved)
            except ValueError as error:
                raise ValueError(f"batch {i}: {error}") from None
        read.append(moved)
    if not read:
        raise ValueError("there are no batches: give at least one (a generator that was read before is empty)")
    return read


def check_fit(model: Any, batch: Batch) -> None:
    """Refuse labels that the model's loss would refuse, without running the model."""
    shapes = logit_shapes(model, batch)
    missing = [name for name in shapes if not isinstance(batch.get(name), Tensor)]
    if missing:
        raise ValueError(f"there are no {' and no '.join(missing)}; label the data, or take target='kl'")
    for name, shape in shapes.items():
        labels, logits = batch[name], torch.zeros((), device=model.device).expand(shape)
        if isinstance(model, SequenceClassificationBody):
            model.loss(logits, labels)
        elif isinstance(model, QuestionAnsweringBody):
            check_labels(logits, inside(labels, logits), name)
        else:
            check_labels(logits, labels, name)


def logit_shapes(model: Any, batch: Batch) -> dict[str, tuple[int, ...]]:
    """{name of the labels: shape of the logits they are for}."""
    config, (B, S) = model.config, (examples(batch), mask_shape(batch)[-1])
    if isinstance(model, PreTrainingBody):
        return {"labels": (B, S, config.vocab_size), "next_sentence_label": (B, 2)}
    if isinstance(model, LanguageModelBody):
        return {"labels": (B, S, config.vocab_size)}
    if isinstance(model, QuestionAnsweringBody):
        return {"start_positions": (B, S), "end_positions": (B, S)}
    if isinstance(model, NextSentencePredictionBody):
        return {"labels": (B, 2)}
    if isinstance(model, MultipleChoiceBody):
        return {"labels": (B, mask_shape(batch)[1])}
    if isinstance(model, SequenceClassificationBody):
        return {"labels": (B, config.num_labels)}
    if isinstance(model, HeadBody):
        return {"labels": (B, S, config.num_labels)}
    raise ValueError(f"{type(model).__name__} has no loss of its own; pass loss=, or take target='kl'")


def inputs_of(batch: Batch) -> dict[str, Any]:
    """A batch without its labels."""
    return {name: value for name, value in batch.items() if name not in LABELS}


def examples(batch: Batch) -> int:
    return int(mask_shape(batch)[0])


def mask_shape(batch: Batch) -> tuple[int, ...]:
    """(B, S), or (B, choices, S)."""
    ids = batch.get("input_ids")
    return tuple(batch["inputs_embeds"].shape[:-1] if ids is None else ids.shape)


def real_tokens(batch: Batch) -> Tensor:
    """(rows, S), True where a token is no padding; an attention mask that says more than that is not looked at."""
    shape, mask = mask_shape(batch), batch.get("attention_mask")
    if isinstance(mask, Tensor) and tuple(mask.shape) == shape:
        return mask.reshape(-1, shape[-1]) != 0
    given = batch["inputs_embeds"] if batch.get("input_ids") is None else batch["input_ids"]
    return torch.ones(shape, dtype=torch.bool, device=given.device).reshape(-1, shape[-1])


def example_losses(model: Any, out: Any, batch: Batch) -> Tensor:
    """The model's own loss of each example by itself: (B,), nan for one without any label; padding has none."""
    return torch.stack([loss_of(model, out, batch, slice(i, i + 1)) for i in range(examples(batch))])


def loss_of(model: Any, out: Any, batch: Batch, rows: slice) -> Tensor:
    if isinstance(model, QuestionAnsweringBody):
        ends = ((out.start_logits, "start_positions"), (out.end_logits, "end_positions"))
        losses = [cross_entropy(x[rows], inside(batch[name][rows], x[rows]), name) for x, name in ends]
        return (losses[0] + losses[1]) / 2
    labels = batch["labels"][rows]
    if isinstance(model, LanguageModelBody | TokenClassificationBody):
        real = real_tokens(batch)[rows].view_as(labels)
        labels = labels.masked_fill(~real, IGNORED)  # of padding that is left out there is no logit
    if isinstance(model, PreTrainingBody):
        follows = cross_entropy(out.seq_relationship_logits[rows], batch["next_sentence_label"][rows])
        return cross_entropy(out.prediction_logits[rows], labels) + follows
    if isinstance(model, CausalLMBody):
        labels = F.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    return model.loss(out.logits[rows], labels)
