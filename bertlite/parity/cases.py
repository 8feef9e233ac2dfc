"""The cases of the parity check, as a list of values: model x backend x batch x dtype x feature x mode."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

Overrides: TypeAlias = Mapping[str, bool | int | str]  # fields of the config

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
BATCHES = {  # what each contains
    "full": "sentences of one length, no mask",
    "padded": "ragged sentences, padding on the right, a 2-D mask",
    "left": "padding on the left, positions shifted with it",
    "long": "as long as the position table allows, ragged",
    "embeds": "inputs_embeds instead of input_ids",
    "mask3d": "a mask for every query",
    "mask4d": "a bool mask for every query, 4-D",
    "additive": "scores added, 4-D",
    "emptyrow": "one sequence is all padding: its outputs must be finite; the other sequences are compared",
}
MASKS_OF_QUERIES = ("mask3d", "mask4d", "additive")
FEATURES: dict[str, Overrides] = {  # the config overrides of each
    "": {},
    "attentions": {},
    "gradients": {},
    "checkpointed": {},  # our gradients with checkpointing, theirs without it
    "dropout": {},  # training mode, the same seed
    "head_mask": {},
    "pruned": {},
    "pruned_layer": {},
    "chunked": {"chunk_size_feed_forward": 4},
    "gelu_new": {"hidden_act": "gelu_new"},
    "relu": {"hidden_act": "relu"},
    "crossed": {"add_cross_attention": True},  # a decoder that attends to an encoder's output
    "relative_key": {"position_embedding_type": "relative_key"},
    "relative_key_query": {"position_embedding_type": "relative_key_query"},
}
GRADIENTS = ("gradients", "checkpointed")  # the features whose tensors are gradients
KERNELS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # the kernels of SDPA: dtypes and batches of each
    "math": (DTYPES, ("full", "padded")),
    "flash": (("bfloat16", "float16"), ("full",)),
    "efficient": (("float32", "bfloat16", "float16"), ("full", "padded")),
    "cudnn": (("bfloat16", "float16"), ("full", "padded")),
}
MODES = {  # ways to run a case other than a plain call
    **dict.fromkeys(KERNELS, "with this kernel of SDPA alone, on both sides"),
    "tf32": "float32 matmuls in TensorFloat-32, on both sides",
    "compiled": "ours through torch.compile, theirs not",
    "graph": "ours captured as a CUDA graph and replayed, theirs not",
    "beside": "ours on the device, compared with ours on the CPU",
}
CPU_KERNELS = ("math", "flash")
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
    """One comparison with transformers: a model, a backend, a batch, a dtype, a feature and a way to run it."""

    model: str = "BertModel"
    backend: str = "sdpa"
    batch: str = "padded"
    dtype: str = "float64"
    feature: str = ""
    mode: str = ""  # a key of MODES, or empty for a plain call

    @property
    def name(self) -> str:
        parts = (self.model, self.backend, self.batch, self.dtype, self.feature, self.mode)
        return "-".join(part for part in parts if part)

    def __str__(self) -> str:
        return self.name

    @property
    def overrides(self) -> Overrides:
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
    # packed is compared with their sdpa at the real tokens; our packed loss for question answering leaves padding
    # out and theirs does not, so that head is not compared
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
    return [*batches, *features, *heads, *gradients, *decoders, *packed, *_kernels(CPU_KERNELS)]


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
    """Return the cases of the CPU and those that need a GPU.

    Dropout is only in float64: a GPU draws other numbers for each dtype.
    """
    same = [case for case in CASES if case.feature != "dropout" or case.dtype == "float64"]
    matmuls = [
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
        *(Case("BertModel", "sdpa", "padded", t, mode="compiled") for t in DTYPES),
        *(Case("BertModel", b, "padded", "bfloat16", mode="compiled") for b in ("eager", "packed")),
        *(Case("BertModel", "sdpa", "padded", "bfloat16", f, "compiled") for f in ("pruned", "gradients")),
        *(Case("BertModel", "sdpa", "emptyrow", t, mode="compiled") for t in ("float32", "bfloat16")),
        Case("BertForMaskedLM", "sdpa", "padded", "bfloat16", mode="compiled"),
    ]
    graphs = [  # packed copies lengths to the host, which a graph cannot
        Case("BertModel", b, batch, t, f, "graph")
        for b in BACKENDS
        for batch, f in (("full", ""), ("padded", ""), ("emptyrow", ""), ("padded", "pruned"))
        for t in DTYPES
    ]
    others = (kernel for kernel in KERNELS if kernel not in CPU_KERNELS)
    return [*same, *matmuls, *_kernels(others), *beside, *compiled, *graphs]


def _in_order(cases: Iterable[Case]) -> tuple[Case, ...]:
    """Sort the cases by model, so that each model is loaded once."""
    order = {name: i for i, name in enumerate(("BertModel", *HEADS, DECODER))}
    return tuple(sorted(cases, key=lambda c: (order[c.model], str(c.overrides), DTYPES.index(c.dtype))))


def cases_for(device: str, shape_only: bool = False) -> tuple[Case, ...]:
    """Return the cases of a device.

    Args:
        shape_only: only the cases that depend on the model's shape, for another checkpoint.
    """
    if device == "cpu":
        return tuple(case for case in CASES if not shape_only or (_depends_on_shape(case) and not case.mode))
    return tuple(case for case in GPU_CASES if not shape_only or _depends_on_shape(case))


def _depends_on_shape(case: Case) -> bool:
    return (
        case.feature in ("", "head_mask", "pruned", "gradients")
        and case.batch in ("full", "padded", "long")
        and (case.batch != "long" or case.dtype == "float32")
        and (case.mode != "compiled" or (case.dtype == "bfloat16" and not case.feature))
        and (case.model in ("BertModel", "BertForPreTraining") or (case.dtype == "float64" and not case.feature))
    )


CASES = _in_order(_cases())
GPU_CASES = _in_order(_gpu_cases())
