"""The BERT you can read, prove, prune and run."""

from bertlite.config import BertConfig, kept_heads
from bertlite.heads import (
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForNextSentencePrediction,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
)
from bertlite.model import BertModel
from bertlite.pruning import densify, prune_heads, prune_heads_, scatter_heads, with_pruned

__all__ = [
    "BertConfig",
    "BertForMaskedLM",
    "BertForMultipleChoice",
    "BertForNextSentencePrediction",
    "BertForPreTraining",
    "BertForQuestionAnswering",
    "BertForSequenceClassification",
    "BertForTokenClassification",
    "BertModel",
    "densify",
    "kept_heads",
    "prune_heads",
    "prune_heads_",
    "scatter_heads",
    "with_pruned",
]
