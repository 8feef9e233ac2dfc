"""The cases of the parity check: model x backend x batch x dtype x feature, as a list of values."""

from dataclasses import dataclass
from typing import Any

DECODER = "BertLMHeadModel"
HEADS = (
    "BertForPreTraining",
    "BertForMaskedLM",
    "BertForNextSentencePrediction",
    "BertForSequenceClassification",
    "BertForMultipleChoice",
    "BertForTokenClassification",
    "BertForQuestionAnswering",
)
BACKENDS = ("eager", "sdpa")
DTYPES = ("float64", "float32", "bfloat16", "float16")
BATCHES = {  # what each is for
    "full": "sentences of one length, no mask",
    "padded": "ragged sentences, padding on the right, a 2-D mask",
    "left": "padding on the left, positions shifted with it",
    "long": "as long as the position table allows, ragged",
    "embeds": "inputs_embeds in place of input_ids",
    "mask3d": "a mask for every query",
    "mask4d": "a bool mask for every query, 4-D",
    "additive": "scores added, 4-D",
    "emptyrow": "a sequence that is all padding: the others are compared, our one rule covers it",
}
MASKS_OF_QUERIES = ("mask3d", "mask4d", "additive")
FEATURES: dict[str, dict[str, Any]] = {  # config overrides that each needs
    "": {},
    "attentions": {},
    "gradients": {},
    "checkpointed": {},  # our gradients with checkpointing, theirs without
    "dropout": {},  # training mode, the same seed
    "head_mask": {},
    "pruned": {},
    "pruned_layer": {},
    "chunked": {"chunk_size_feed_forward": 4},
    "gelu_new": {"hidden_act": "gelu_new"},
    "relu": {"hidden_act": "relu"},
    "crossed": {"add_cross_attention": True},  # a decoder that looks at an encoder
    "relative_key": {"position_embedding_type": "relative_key"},
    "relative_key_query": {"position_embedding_type": "relative_key_query"},
}
PACKED_FEATURES = (
    "gradients",
    "checkpointed",
    "head_mask",
    "pruned",
    "pruned_layer",
    "chunked",
    "relative_key",
    "relative_key_query",
)


@dataclass(frozen=True)
class Case:
    """One comparison with transformers."""

    model: str = "BertModel"
    backend: str = "sdpa"
    batch: str = "padded"
    dtype: str = "float64"
    feature: str = ""

    @property
    def name(self) -> str:
        return "-".join(part for part in (self.model, self.backend, self.batch, self.dtype, self.feature) if part)

    def __str__(self) -> str:
        return self.name

    @property
    def overrides(self) -> dict[str, Any]:
        return FEATURES[self.feature]


def _cases() -> list[Case]:
    batches = [Case("BertModel", b, batch, t) for t in DTYPES for b in BACKENDS for batch in BATCHES]
    heads = [Case(m, b, "padded", t) for t in ("float64", "float32", "bfloat16") for m in HEADS for b in BACKENDS]
    features = [
        Case("BertModel", b, "padded", t, f)
        for t in ("float64", "float32", "bfloat16", "float16")
        for f in FEATURES
        if f not in ("", "gradients", "checkpointed", "crossed")
        for b in BACKENDS
    ]
    gradients = [
        Case(m, b, "padded", t, f)
        for t in ("float64", "float32", "bfloat16")
        for m in ("BertModel", *HEADS)
        for f in ("gradients", "checkpointed")
        for b in BACKENDS
        if t == "float64" or m in ("BertModel", "BertForMaskedLM")
    ]
    decoders = [
        Case(DECODER, b, batch, t, f)
        for t in DTYPES
        for f in ("", "crossed", "gradients")
        for b in BACKENDS
        for batch in ("full", "padded")
        if f != "gradients" or (t == "float64" and batch == "padded")
    ]
    # packed, against their sdpa at the real tokens; its loss for question answering counts no padding, theirs does
    packed = [
        Case("BertModel", "packed", batch, t) for t in DTYPES for batch in BATCHES if batch not in MASKS_OF_QUERIES
    ]
    packed += [Case("BertModel", "packed", "padded", t, f) for t in DTYPES for f in PACKED_FEATURES]
    packed += [
        Case(m, "packed", "padded", t, f)
        for m in HEADS
        for t, f in (("float64", ""), ("float32", ""), ("float64", "gradients"), ("float64", "checkpointed"))
        if m != "BertForQuestionAnswering"
    ]
    # one model in memory at a time serves all its cases: sorted so that they follow each other
    order = {name: i for i, name in enumerate(("BertModel", *HEADS, DECODER))}
    every = [*batches, *features, *heads, *gradients, *decoders, *packed]
    return sorted(every, key=lambda c: (order[c.model], str(c.overrides), DTYPES.index(c.dtype)))


CASES = tuple(_cases())
BASE_CASES = tuple(  # for a second checkpoint of another shape: what a shape can change
    case
    for case in CASES
    if case.feature in ("", "head_mask", "pruned", "gradients")
    and case.batch in ("full", "padded", "long")
    and (case.batch != "long" or case.dtype == "float32")
    and (case.model in ("BertModel", "BertForPreTraining") or (case.dtype == "float64" and not case.feature))
)
