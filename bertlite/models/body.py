"""The base of the task heads: running BERT below them, labels and losses, and returning logits.

Shapes:  B sequences · S positions.  Label -100 means "no label here" wherever labels are class indices.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from bertlite.config import BertConfig, LabelKind, own_field
from bertlite.models.layers import BertLMPredictionHead, head_of_tokens
from bertlite.models.losses import (
    Items,
    check_labels,
    cross_entropy_of_labels,
    labels_padding,
    labels_without_padding,
    pack_labels,
)
from bertlite.models.outputs import LogitsOutput
from bertlite.stack.body import BertBody, Body, has_hooks, has_hooks_within, output_or_tuple
from bertlite.stack.outputs import EncoderOutput

Out = TypeVar("Out")
FIRST = ("input_ids", "attention_mask", "token_type_ids", "position_ids")  # these may be positional
COMMON = ("inputs_embeds", "head_mask", "output_attentions", "output_hidden_states", "return_dict")


def takes(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a head's `forward` from a function of its own arguments and, as `**inputs`, BertModel's.

    Its signature names every argument: Trainer drops columns of a data set that the signature lacks, and exporters
    order inputs by it.  A misspelt keyword is a TypeError.  With return_dict=False it returns a tuple.

    Args:
        names: the arguments of BertModel that it takes, in addition to FIRST and COMMON.
    """

    def decorate(run: Callable[..., Any]) -> Callable[..., Any]:
        # The signature that callers read: BertModel's arguments, then the head's own, then options for the output.
        mine, parameters = inspect.signature(run).parameters.values(), []
        for name, each in inspect.signature(BertBody.forward).parameters.items():
            if name in ("self", *FIRST, *COMMON, *names):
                parameters.append(each)
            if name == "use_cache":  # the last input; options for the output follow
                parameters += [each for each in mine if each.kind is each.KEYWORD_ONLY]

        known = [each.name for each in parameters[1:]]

        @functools.wraps(run)
        def forward(self: Any, *inputs: Any, return_dict: bool | None = None, **options: Any) -> Any:
            wrong = [name for name in options if name not in known]
            if wrong or len(inputs) > len(FIRST):
                what = f"got an unexpected keyword argument {wrong[0]!r}" if wrong else "takes 4 positional arguments"
                raise TypeError(f"{type(self).__name__}.forward() {what}; have: {', '.join(known)}")
            out = run(self, **dict(zip(FIRST, inputs, strict=False)), **options)
            return output_or_tuple(out, self.config.return_dict if return_dict is None else return_dict)

        forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return forward

    return decorate


class HeadBody(Body, Generic[Out]):
    """Base of the task heads: run the BertModel below, and return logits with their loss."""

    bert: Any
    cls: Any
    base_class: ClassVar[type[Any]]  # the class of `bert`
    head_class: ClassVar[type[nn.Module]]  # the class of `cls`
    output_type: ClassVar[type[Any]] = LogitsOutput
    needs_pooler: ClassVar[bool] = False
    needs_tokens: ClassVar[bool] = True  # False: the head reads only the pooler
    padding_reader: ClassVar[str | None] = None  # the part of the head that reads positions of padding
    takes_choices: ClassVar[bool] = False  # inputs are (B, choices, S)
    own_labels: ClassVar[bool] = False  # id2label names its outputs, of which there may be any number

    if TYPE_CHECKING:

        def __call__(self, *inputs: Any, **options: Any) -> Out: ...

    def build(self, config: BertConfig) -> None:
        self.bert = self.base_class(config, add_pooling_layer=self.needs_pooler)
        self.build_head(config)

    def build_head(self, config: BertConfig) -> None:
        self.cls = self.head_class(config)

    def logits(self, encoded: EncoderOutput) -> Tensor:
        return self.cls(encoded.last_hidden_state if self.needs_tokens else encoded.pooler_output)

    def encode(self, labels: Tensor | None = None, **inputs: Any) -> EncoderOutput:
        """Run BERT; if the head reads only the pooler, the last layer may compute only first tokens.

        Padding is computed if the head reads it, or if it has a label of a token, (B, S), in `labels`.
        """
        skips = getattr(self.bert, "leaves_padding_out", False)
        if self.padding_reader or (skips and labels_padding(labels, inputs.get("attention_mask"))):
            inputs["skip_padding"] = False
        if not self.needs_tokens:
            inputs["first_token_only"] = self.first_token_suffices(inputs)
        first = [inputs.pop(name, None) for name in FIRST]  # positional: transformers' users have hooks that expect it
        return self.bert(*first, **inputs, return_encoded=True)

    def first_token_suffices(self, inputs: Mapping[str, Any]) -> bool:
        """Return whether the last layer may compute only first tokens, since the head reads only the pooler.

        It computes all tokens if hidden states or attentions are returned, or if a hook sees it or its output.
        """
        bert, config = self.bert, self.config
        asked = {name: inputs.get(name) for name in ("output_attentions", "output_hidden_states")}
        wanted = [getattr(config, name) if x is None else x for name, x in asked.items()]
        wanted += [own_field(config, "pooling") == "mean", self.takes_choices and own_field(config, "pooler_norm")]
        if any(wanted) or config.is_decoder or not bert.may_skip_padding():
            return False
        layers = bert.encoder.layer
        last_is_seen = len(layers) and has_hooks_within(layers[len(layers) - 1])
        return not (has_hooks(bert) or has_hooks(bert.encoder) or last_is_seen)

    def loss(self, logits: Tensor, labels: Tensor, items: Items = None) -> Tensor:
        return cross_entropy_of_labels(logits, labels, items=items)

    @property
    def label_kind(self) -> LabelKind:
        """The kind of one label: the index of a class, a flag for each class, or a number."""
        return "class"

    def label_shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return {name of the labels: shape of their logits} for inputs of a shape, (B, S)."""
        return {"labels": (*(shape if self.needs_tokens else shape[:1]), self.classes(self.config))}

    def classes(self, config: BertConfig) -> int:
        """Return the number of logits of a label."""
        return config.num_labels

    def check_labels(self, labels: Mapping[str, Any], shape: tuple[int, ...]) -> None:
        """Check that labels fit the loss, without running the model.

        Args:
            labels: {name: labels}; labels of other heads are ignored.
            shape: the shape of the inputs.

        Raises:
            ValueError: labels are missing, or do not fit.
        """
        shapes = self.label_shapes(shape)
        missing = [name for name in shapes if not isinstance(labels.get(name), Tensor)]
        if missing:
            raise ValueError(f"there are no {' and no '.join(missing)}; label the data, or take target='kl'")
        for name, logits in shapes.items():
            zero = torch.zeros((), device=labels[name].device, dtype=torch.float32)
            self.check_label(name, labels[name], zero.expand(logits))

    def check_label(self, name: str, labels: Tensor, logits: Tensor) -> None:
        """Raise ValueError if labels of one name do not fit logits of this shape."""
        check_labels(logits, labels, name)

    def example_loss(self, out: Any, labels: Mapping[str, Tensor], rows: slice, real: Tensor) -> Tensor:
        """Compute the loss of some examples of a batch.

        Args:
            out: the model's output for the whole batch.
            labels: {name: labels of the batch}.
            rows: the examples.
            real: (B, S) or (B · choices, S), False for padding, which has no loss.

        Returns:
            A scalar; nan if no label counts.
        """
        chosen = labels["labels"][rows]
        return self.loss(out.logits[rows], labels_without_padding(chosen, real[rows]) if self.needs_tokens else chosen)

    @takes("cu_seqlens")
    def forward(self, *, labels: Tensor | None = None, num_items_in_batch: Items = None, **inputs: Any) -> Any:
        """Run BERT and the head.  Inputs are as for BertModel; the class describes `labels` and the logits.

        Args:
            cu_seqlens: for packed sequences; logits and labels for each token are then (T, …).
            num_items_in_batch: the number of labels in the whole batch, if this is a part of it.  The loss is then
                the part's share of the batch's mean, so that parts add up.  By default it is the mean of this part.

        Returns:
            LogitsOutput, its loss None without labels; with return_dict=False the tuple of its values.

        Raises:
            ValueError: an input or a label does not fit this model.
        """
        encoded = self.encode(labels, **inputs)
        logits, loss = self.logits(encoded), None
        if labels is not None:
            labels = pack_labels(encoded.layout, labels) if self.needs_tokens else labels
            loss = self.loss(logits, labels, num_items_in_batch)
        logits = encoded.layout.unpack(logits) if self.needs_tokens else logits
        return self.finish(encoded, loss, logits=logits)

    def finish(self, encoded: EncoderOutput, loss: Tensor | None, **parts: Any) -> Any:
        """Return the output of this head."""
        states, attentions = encoded.hidden_states, encoded.attentions
        return self.output_type(loss=loss, **parts, hidden_states=states, attentions=attentions)


class LanguageModelBody(HeadBody[Out]):
    """Heads whose decoder is tied to the word embeddings."""

    def tie_decoder(self) -> None:
        head: BertLMPredictionHead = self.cls.predictions
        head.bias = head.decoder.bias
        if self.config.tie_word_embeddings:
            head.decoder.weight = self.bert.embeddings.word_embeddings.weight

    def get_output_embeddings(self) -> nn.Linear:
        return self.cls.predictions.decoder

    def set_output_embeddings(self, decoder: nn.Linear) -> None:
        self.cls.predictions.decoder = decoder
        self.cls.predictions.bias = decoder.bias

    def classes(self, config: BertConfig) -> int:
        return config.vocab_size


class ClassifierBody(HeadBody[Out]):
    """Heads that are one dropout and one linear layer."""

    dropout: nn.Dropout
    classifier: nn.Linear

    def build_head(self, config: BertConfig) -> None:
        rate = config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
        self.dropout = nn.Dropout(rate)
        self.head = head_of_tokens(config) if self.needs_tokens else None
        self.classifier = nn.Linear(config.hidden_size, self.classes(config))

    def logits(self, encoded: EncoderOutput) -> Tensor:
        x = encoded.last_hidden_state if self.needs_tokens else encoded.pooler_output
        return self.classifier(self.dropout(x if self.head is None else self.head(x)))
