"""The outputs of the task heads; `bertlite.stack.outputs` has BERT's own."""

from typing import Any

from torch import Tensor

from bertlite.stack.outputs import ModelOutput, register


@register
class PreTrainingOutput(ModelOutput):
    """The output of BertForPreTraining: logits of the vocabulary, and of the next sentence."""

    loss: Tensor | None = None
    prediction_logits: Tensor | None = None  # (B, S, vocabulary)
    seq_relationship_logits: Tensor | None = None  # (B, 2): is the next sentence, is not
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


@register
class LogitsOutput(ModelOutput):
    """The output of a head with one set of logits; each head's docstring says their shape."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


@register
class CausalLMOutput(ModelOutput):
    """The output of BertLMHeadModel, with the keys and values of a decoder's cache."""

    loss: Tensor | None = None
    logits: Tensor | None = None  # (B, S, vocabulary)
    past_key_values: Any = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    cross_attentions: tuple[Tensor, ...] | None = None


@register
class QuestionAnsweringOutput(ModelOutput):
    """The output of BertForQuestionAnswering: logits of the first and of the last token of the answer."""

    loss: Tensor | None = None
    start_logits: Tensor | None = None  # (B, S)
    end_logits: Tensor | None = None  # (B, S)
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
