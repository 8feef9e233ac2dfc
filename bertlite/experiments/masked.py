"""Masked words: tokens are taken out of texts, and a masked language model is asked for them; no labels are needed."""

from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from bertlite.experiments.data import NO_LABEL, EncodedExamples, Examples
from bertlite.experiments.evaluate import Task
from bertlite.experiments.statistics import Array

SHARE = 0.15  # of a text's tokens, as in BERT's training (Devlin et al. 2018, arXiv:1810.04805, section 3.1)


def mask_tokens(examples: Examples, tokenizer: Any) -> EncodedExamples:
    """Put [MASK] in the place of some tokens of each text, the same every time; these are the labels, -100 the others.

    Raises:
        ValueError: the tokenizer has no [MASK].
    """
    mask = tokenizer.token_to_id("[MASK]")
    if mask is None:
        raise ValueError("the tokenizer has no [MASK], so no token can be taken out of a text")
    rows, labels = [], []
    encoded = tokenizer.encode_batch([text if len(text) > 1 else text[0] for text in examples.texts])
    for number, text in enumerate(encoded):
        positions = [i for i, special in enumerate(text.special_tokens_mask) if not special]
        chosen = {*Random(number).sample(positions, min(len(positions), max(1, round(SHARE * len(positions)))))}
        rows.append((tuple(mask if i in chosen else token for i, token in enumerate(text.ids)), tuple(text.type_ids)))
        labels.append(tuple(token if i in chosen else NO_LABEL for i, token in enumerate(text.ids)))
    return EncodedExamples(tuple(rows), tuple(labels))


def score_words(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of each label in nats, and whether the largest logit is its own: (B, S, 2)."""
    losses = F.cross_entropy(logits.float().transpose(1, 2), labels, reduction="none", ignore_index=NO_LABEL)
    return torch.stack([losses, (logits.argmax(-1) == labels).float()], -1)


def mean_of(column: int) -> Any:
    """Return the metric that is the mean of a column of `score_words` over all masked tokens."""

    def metric(outputs: Array, labels: Array) -> float:
        found = outputs[labels != NO_LABEL]
        return float(np.mean(found[:, column])) if len(found) else 0.0

    return metric


def no_divergence(dense: Array, outputs: Array) -> float:
    raise ValueError("masked words are evaluated alone, not beside a dense model's distributions")


MASKED = Task(
    "masked",
    "BertForMaskedLM",
    torch.long,
    {"loss": mean_of(0), "accuracy": mean_of(1)},
    no_divergence,
    words=True,
    scores=score_words,
)
