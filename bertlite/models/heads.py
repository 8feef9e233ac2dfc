"""The task heads: BERT with something on top, and its loss.  Attribute names are checkpoint keys.

Shapes:  B sequences · S positions · D hidden.  Label -100 means "no label here" wherever labels are class indices.
"""

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bertlite.config import PROBLEMS, BertConfig, LabelKind, own_field
from bertlite.models.base import BertModel, BertPreTrainedModel
from bertlite.models.body import FIRST, ClassifierBody, HeadBody, LanguageModelBody, Out, takes
from bertlite.models.layers import BertOnlyMLMHead, BertOnlyNSPHead, BertPreTrainingHeads, head_of_tokens
from bertlite.models.losses import (
    Items,
    check_labels,
    cross_entropy_of_labels,
    fits,
    labels_without_padding,
    pack_labels,
    shifted,
    span_loss,
    token_labels,
)
from bertlite.models.outputs import CausalLMOutput, LogitsOutput, PreTrainingOutput, QuestionAnsweringOutput
from bertlite.stack.inputs import check_tensor
from bertlite.support.habits import habit_hint

__all__ = [
    "BertForMaskedLM",
    "BertForMultipleChoice",
    "BertForNextSentencePrediction",
    "BertForPreTraining",
    "BertForQuestionAnswering",
    "BertForSequenceClassification",
    "BertForTokenClassification",
    "BertLMHeadModel",
]


class MaskedLMBody(LanguageModelBody[Out]):
    head_class = BertOnlyMLMHead


class CausalLMBody(MaskedLMBody[Out]):
    output_type = CausalLMOutput
    padding_reader = "the choice of positions to score"

    def example_loss(self, out: Any, labels: Mapping[str, Tensor], rows: slice, real: Tensor) -> Tensor:
        return self.loss(out.logits[rows], shifted(labels_without_padding(labels["labels"][rows], real[rows])))

    @takes("encoder_hidden_states", "encoder_attention_mask", "past_key_values", "use_cache")  # and no packed tokens
    def forward(
        self,
        *,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Items = None,
        shift_labels: Tensor | None = None,
        **inputs: Any,
    ) -> Any:
        """Run BERT as a decoder and score the next word at every position.

        Args:
            labels: (B, S), the words, or -100 to ignore one; position i is compared with label i + 1.
            shift_labels: (B, S), labels that are shifted already, instead of `labels`.
            logits_to_keep: score only this many last positions, or the positions in a tensor; 0 is all.
            inputs: as for BertModel; with labels nothing is cached.

        Returns:
            CausalLMOutput.
        """
        if labels is not None:
            inputs["use_cache"] = False

        # Only the positions that are asked for meet the vocabulary, which is most of the work.
        encoded = self.encode(**inputs)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.cls(encoded.last_hidden_state[:, kept])

        # Labels may be shifted already, as by transformers' Trainer; otherwise each position predicts the next word.
        loss = None
        if shift_labels is None and labels is not None:
            shift_labels = shifted(labels)
        if shift_labels is not None:
            if logits.shape[1] != shift_labels.shape[-1]:
                raise ValueError(
                    f"the labels have shape {tuple(shift_labels.shape)}; logits_to_keep leaves {logits.shape[1]}"
                )
            exact = logits if logits.dtype == torch.float64 else logits.float()  # transformers sums in float32 too
            loss = self.loss(exact, shift_labels, num_items_in_batch)

        cached, crossed = encoded.past_key_values, encoded.cross_attentions
        return self.finish(encoded, loss, logits=logits, past_key_values=cached, cross_attentions=crossed)


class PreTrainingBody(LanguageModelBody[Out]):
    output_type = PreTrainingOutput
    head_class = BertPreTrainingHeads
    needs_pooler = True

    def label_shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        return {**super().label_shapes(shape), "next_sentence_label": (shape[0], 2)}

    def example_loss(self, out: Any, labels: Mapping[str, Tensor], rows: slice, real: Tensor) -> Tensor:
        words = labels_without_padding(labels["labels"][rows], real[rows])
        follows = cross_entropy_of_labels(out.seq_relationship_logits[rows], labels["next_sentence_label"][rows])
        return cross_entropy_of_labels(out.prediction_logits[rows], words) + follows

    @takes("cu_seqlens")  # but no count of labels, since none serves both losses
    def forward(
        self, *, labels: Tensor | None = None, next_sentence_label: Tensor | None = None, **inputs: Any
    ) -> Any:
        """Run BERT and both pre-training heads.

        Args:
            labels: (B, S), the masked words, elsewhere -100.
            next_sentence_label: (B,), 0 if the second segment follows the first, else 1.  The loss, the sum of both,
                needs both kinds of labels.
        """
        encoded = self.encode(labels, **inputs)
        words, follows = self.cls(encoded.last_hidden_state, encoded.pooler_output)
        loss = None
        if labels is not None and next_sentence_label is not None:
            words_loss = cross_entropy_of_labels(words, pack_labels(encoded.layout, labels))
            loss = words_loss + cross_entropy_of_labels(follows, next_sentence_label, "next_sentence_label")
        words = encoded.layout.unpack(words)
        return self.finish(encoded, loss, prediction_logits=words, seq_relationship_logits=follows)


class NextSentencePredictionBody(HeadBody[Out]):
    head_class = BertOnlyNSPHead
    needs_pooler = True
    needs_tokens = False

    def classes(self, config: BertConfig) -> int:
        return 2


class SequenceClassificationBody(ClassifierBody[Out]):
    own_labels = True
    needs_pooler = True
    needs_tokens = False

    @property
    def label_kind(self) -> LabelKind:
        if self.config.problem_type is None:
            return "number" if self.config.num_labels == 1 else "class"
        return PROBLEMS[self.config.problem_type]

    def check_label(self, name: str, labels: Tensor, logits: Tensor) -> None:
        self.loss(logits, labels)

    def problem(self, labels: Tensor) -> str:
        """Return the config's problem_type, or the labels' by transformers' rule; the config is not changed."""
        if self.config.problem_type is not None or self.config.num_labels == 1:
            return self.config.problem_type or "regression"
        return "multi_label_classification" if labels.is_floating_point() else "single_label_classification"

    def loss(self, logits: Tensor, labels: Tensor, items: Items = None) -> Tensor:
        check_tensor("labels", labels)
        problem = self.problem(labels)
        if problem == "single_label_classification":
            return cross_entropy_of_labels(logits, labels, items=items)
        if not fits(labels, logits.shape):
            raise ValueError(f"labels has shape {tuple(labels.shape)}; {problem} takes {tuple(logits.shape)}")
        labels = labels.reshape(logits.shape).to(logits.dtype)
        each = F.mse_loss if problem == "regression" else F.binary_cross_entropy_with_logits
        return each(logits, labels) if items is None else each(logits, labels, reduction="sum") / items


class TokenClassificationBody(ClassifierBody[Out]):
    own_labels = True


class MultipleChoiceBody(ClassifierBody[Out]):
    needs_pooler = True
    needs_tokens = False
    takes_choices = True

    def build_head(self, config: BertConfig) -> None:
        super().build_head(config)
        self.bert.pooler.skips_padding = own_field(config, "pooler_norm") and not self.bert.pooler.means

    def classes(self, config: BertConfig) -> int:
        return 1

    def label_shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        return {"labels": shape[:2]}

    @takes()  # choices are rows, never packed
    def forward(self, *, labels: Tensor | None = None, num_items_in_batch: Items = None, **inputs: Any) -> Any:
        """Run BERT on every choice and score it.

        Args:
            input_ids, attention_mask, token_type_ids, position_ids: (B, choices, S).
            inputs_embeds: (B, choices, S, D).
            labels: (B,), the right choice.

        Returns:
            LogitsOutput with logits (B, choices); hidden states and attentions have B·choices rows.
        """
        name = "input_ids" if inputs.get("inputs_embeds") is None else "inputs_embeds"
        first, shape = inputs.get(name), ("batch", "choices", "length", "hidden_size")[: 3 + (name != "input_ids")]
        check_tensor(name, first)
        if first is not None and first.dim() != len(shape):
            raise ValueError(f"{name} has shape {tuple(first.shape)}; expected ({', '.join(shape)})")
        flat = {each: x.flatten(0, 1) for each in (*FIRST, "inputs_embeds") if (x := inputs.get(each)) is not None}
        encoded = self.encode(**{**inputs, **flat})
        assert first is not None  # BERT has checked it
        logits = self.logits(encoded).reshape(first.shape[:2])
        loss = None if labels is None else self.loss(logits, labels, num_items_in_batch)
        return self.finish(encoded, loss, logits=logits)


class QuestionAnsweringBody(HeadBody[Out]):
    output_type = QuestionAnsweringOutput
    padding_reader = "the softmax over positions"
    qa_outputs: nn.Linear

    def build_head(self, config: BertConfig) -> None:
        if config.num_labels != 2:
            raise ValueError(f"num_labels is {config.num_labels}; question answering has 2, for start and end")
        self.head = head_of_tokens(config)
        if self.head is not None:
            self.dropout = nn.Dropout(config.classifier_dropout or 0.0)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)

    def label_shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        return {"start_positions": shape, "end_positions": shape}

    def check_label(self, name: str, labels: Tensor, logits: Tensor) -> None:
        check_labels(logits, token_labels(labels, logits), name)

    def example_loss(self, out: Any, labels: Mapping[str, Tensor], rows: slice, real: Tensor) -> Tensor:
        given = out.start_logits, out.end_logits, labels["start_positions"], labels["end_positions"]
        return span_loss(*(x[rows] for x in given))

    @takes("cu_seqlens")
    def forward(
        self, *, start_positions: Tensor | None = None, end_positions: Tensor | None = None, **inputs: Any
    ) -> Any:
        """Run BERT and score every token as start and as end of the answer.

        Args:
            start_positions, end_positions: (B,), token indices.  As in transformers, indices past the end do not
                count, and a negative one is the first token.  The loss, the mean of both, needs both.  Padding that
                BERT left out gets the lowest score of the dtype, so that no answer starts or ends there.

        Raises:
            ValueError: an input or a label does not fit this model, or labels are given with cu_seqlens.
        """
        if inputs.get("cu_seqlens") is not None and not (start_positions is None is end_positions):
            raise ValueError(
                "start_positions and end_positions are indices in rows: give them with input_ids (B, S) and an"
                " attention_mask, which attn_implementation='packed' packs"
            )

        # Padding that was left out gets the lowest score, so that no answer can lie there.
        encoded = self.encode(**inputs)
        x = encoded.last_hidden_state
        start, end = self.qa_outputs(x if self.head is None else self.dropout(self.head(x))).split(1, dim=-1)
        start, end = start.squeeze(-1).contiguous(), end.squeeze(-1).contiguous()  # (B, S)
        lowest = torch.finfo(start.dtype).min
        start, end = encoded.layout.unpack(start, lowest), encoded.layout.unpack(end, lowest)

        loss = None
        if start_positions is not None and end_positions is not None:
            loss = span_loss(start, end, start_positions, end_positions, encoded.layout.real())
        return self.finish(encoded, loss, start_logits=start, end_logits=end)


class BertForMaskedLM(MaskedLMBody[LogitsOutput], BertPreTrainedModel):
    """Predict masked words.  labels (B, S), or -100 for none; logits (B, S, vocabulary); loss in nats per label."""

    config: BertConfig
    pipeline_tag = "fill-mask"


class BertLMHeadModel(CausalLMBody[CausalLMOutput], BertPreTrainedModel):
    """Predict the next word: BERT as a decoder (is_decoder=True), with cross-attention if add_cross_attention=True."""

    config: BertConfig
    pipeline_tag = "text-generation"

    def __init__(self, config: BertConfig) -> None:
        if not config.is_decoder:
            raise ValueError(
                "BertLMHeadModel predicts left to right and needs is_decoder=True; or use BertForMaskedLM"
            )
        super().__init__(config)

    def generate(self, *_: Any, **__: Any) -> NoReturn:
        """Raise NotImplementedError: bertlite.hf's class generates text."""
        raise NotImplementedError(f"bertlite has no 'generate'{habit_hint('generate')}")


class BertForPreTraining(PreTrainingBody[PreTrainingOutput], BertPreTrainedModel):
    """Predict masked words, and whether the second segment follows the first: the pre-training of BERT."""

    config: BertConfig
    pipeline_tag = "fill-mask"


class BertForNextSentencePrediction(NextSentencePredictionBody[LogitsOutput], BertPreTrainedModel):
    """Predict whether the second segment follows the first.  labels (B,), 0 if it does; logits (B, 2)."""

    config: BertConfig
    pipeline_tag = "text-classification"


class BertForSequenceClassification(SequenceClassificationBody[LogitsOutput], BertPreTrainedModel):
    """Label a sequence.  logits (B, num_labels).

    labels are (B,) class indices, (B, num_labels) floats for several labels at once, or (B,) numbers when num_labels
    is 1.  The loss is cross-entropy, binary cross-entropy or squared error, respectively.  `config.problem_type`
    chooses it; if that is None, the labels do.
    """

    config: BertConfig
    pipeline_tag = "text-classification"


class BertForMultipleChoice(MultipleChoiceBody[LogitsOutput], BertPreTrainedModel):
    """Pick one of several continuations."""

    config: BertConfig
    pipeline_tag = "multiple-choice"


class BertForTokenClassification(TokenClassificationBody[LogitsOutput], BertPreTrainedModel):
    """Label every token.  labels (B, S), or -100 for none; logits (B, S, num_labels)."""

    config: BertConfig
    pipeline_tag = "token-classification"


class BertForQuestionAnswering(QuestionAnsweringBody[QuestionAnsweringOutput], BertPreTrainedModel):
    """Find the answer in the text: its first and its last token."""

    config: BertConfig
    pipeline_tag = "question-answering"


HEADS: dict[str, Any] = {name: globals()[name] for name in __all__}
CLASSES: dict[str, type[BertPreTrainedModel]] = {"BertModel": BertModel, **HEADS}  # every model of bertlite
