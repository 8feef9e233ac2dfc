"""The cases of the parity check: model x backend x batch x dtype x feature, as a list of values."""

from collections.abc import Iterable
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
KERNELS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # of SDPA: the dtypes and the batches that each takes
    "math": (DTYPES, ("full", "padded")),
    "flash": (("bfloat16", "float16"), ("full",)),
    "efficient": (("float32", "bfloat16", "float16"), ("full", "padded")),
    "cudnn": (("bfloat16", "float16"), ("full", "padded")),
}
RUNS = {  # how a case is run, where it is not simply called
    **dict.fromkeys(KERNELS, "with this kernel of SDPA alone, on both sides"),
    "tf32": "products of float32 numbers in TensorFloat-32, on both sides",
    "compiled": "ours through torch.compile, theirs not",
    "graph": "ours captured as a CUDA graph and replayed, theirs not",
    "beside": "ours on the device beside ours on the CPU",
}
ON_CPU = ("math", "flash")  # the kernels that a CPU has
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
    run: str = ""

    @property
    def name(self) -> str:
        parts = (self.model, self.backend, self.batch, self.dtype, self.feature, self.run)
        return "-".join(part for part in parts if part)

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
    return [*batches, *features, *heads, *gradients, *decoders, *packed, *_kernels(ON_CPU)]


def _kernels(names: Iterable[str]) -> list[Case]:
    return [
        Case("BertModel", "sdpa", batch, dtype, feature, kernel)
        for kernel in names
        for dtype in KERNELS[kernel][0]
        for batch in KERNELS[kernel][1]
        for feature in ("", "gradients")
        if not (feature and dtype == "float16")
    ]


def _gpu_cases() -> list[Case]:
    """Also what a CPU cannot be asked; without dropout, which there draws other numbers for each dtype."""
    same = [case for case in CASES if case.feature != "dropout" or case.dtype == "float64"]
    products = [
        Case("BertModel", b, batch, "float32", f, "tf32")
        for b in (*BACKENDS, "packed")
        for batch in ("padded", "long")
        for f in ("", "gradients", "pruned")
    ]
    beside = [
        Case("BertModel", b, "padded", t, f, "beside")
        for b in (*BACKENDS, "packed")
        for t in DTYPES
        for f in ("", "pruned", "gradients")
        if not (f == "gradients" and t == "float16")
    ]
    compiled = [  # few, since each takes a while
        *(Case("BertModel", "sdpa", "padded", t, run="compiled") for t in DTYPES),
        *(Case("BertModel", b, "padded", "bfloat16", run="compiled") for b in ("eager", "packed")),
        *(Case("BertModel", "sdpa", "padded", "bfloat16", f, "compiled") for f in ("pruned", "gradients")),
        *(Case("BertModel", "sdpa", "emptyrow", t, run="compiled") for t in ("float32", "bfloat16")),
        Case("BertForMaskedLM", "sdpa", "padded", "bfloat16", run="compiled"),
    ]
    graphs = [  # packed takes lengths to the host, which a graph cannot
        Case("BertModel", b, batch, t, f, "graph")
        for b in BACKENDS
        for batch, f in (("full", ""), ("padded", ""), ("emptyrow", ""), ("padded", "pruned"))
        for t in DTYPES
    ]
    others = (kernel for kernel in KERNELS if kernel not in ON_CPU)
    return [*same, *products, *_kernels(others), *beside, *compiled, *graphs]


def _in_order(cases: Iterable[Case]) -> tuple[Case, ...]:
    """Sorted so that cases of one model follow each other: one in memory at a time serves them all."""
    order = {name: i for i, name in enumerate(("BertModel", *HEADS, DECODER))}
    return tuple(sorted(cases, key=lambda c: (order[c.model], str(c.overrides), DTYPES.index(c.dtype))))


def cases_for(device: str, shape_only: bool = False) -> tuple[Case, ...]:
    """The cases of a device; `shape_only` for a second checkpoint of another shape: those that a shape can change."""
    if device == "cpu":
        return tuple(case for case in CASES if not shape_only or (_by_shape(case) and not case.run))
    return tuple(case for case in GPU_CASES if not shape_only or _by_shape(case))


def _by_shape(case: Case) -> bool:
    return (
        case.feature in ("", "head_mask", "pruned", "gradients")
        and case.batch in ("full", "padded", "long")
        and (case.batch != "long" or case.dtype == "float32")
        and (case.run != "compiled" or (case.dtype == "bfloat16" and not case.feature))
        and (case.model in ("BertModel", "BertForPreTraining") or (case.dtype == "float64" and not case.feature))
    )


CASES = _in_order(_cases())
GPU_CASES = _in_order(_gpu_cases())
