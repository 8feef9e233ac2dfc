"""The cases of the parity check, as a list of values: model x backend x batch x dtype x feature x mode.

`choose` finds a few that together cover every facet of all of them.  A facet is a field of a case, such as its
backend, or a pair of them, such as its backend and its dtype.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from math import fsum
from typing import TypeAlias

from torch.nn.attention import SDPBackend

from bertlite.config import POSITIONS
from bertlite.models import heads

Names: TypeAlias = str | Iterable[str]  # one name or several
Overrides: TypeAlias = Mapping[str, bool | int | str]  # fields of the config
Facet: TypeAlias = tuple[str, ...]  # its name and its values, such as ("backend × dtype", "sdpa", "float64")

DECODER = "BertLMHeadModel"
PRETRAINING, MASKED_LM = heads.BertForPreTraining.__name__, heads.BertForMaskedLM.__name__  # the first has all parts
HEADS = tuple(name for name in heads.HEADS if name != DECODER)
BACKENDS = ("eager", "sdpa")
DTYPES = ("float64", "float32", "bfloat16", "float16")
BATCHES = {  # {name: contents}
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
RELATIVE = tuple(name for name, kind in POSITIONS.items() if kind.in_bert and kind.in_scores)
FEATURES: dict[str, Overrides] = {  # {name: overrides of the config}
    "": {},
    "attentions": {},
    "gradients": {},
    "checkpointed": {},  # our gradients with checkpointing, theirs without it
    "dropout": {},  # training mode, the same seed
    "head_mask": {},
    "pruned": {},
    "pruned_layer": {},
    "chunked": {"chunk_size_feed_forward": 4},
    **{name: {"hidden_act": name} for name in ("gelu_new", "relu")},
    "crossed": {"add_cross_attention": True},  # a decoder that attends to an encoder's output
    **{name: {"position_embedding_type": name} for name in RELATIVE},
}
GRADIENTS = ("gradients", "checkpointed")  # the features whose tensors are gradients
COPIES = ("pruned", "pruned_layer", "head_mask")  # the features that copy the models
KERNELS: dict[str, tuple[SDPBackend, Names, Names]] = {  # kernels of SDPA: torch's, dtypes and batches
    "math": (SDPBackend.MATH, DTYPES, ("full", "padded")),
    "flash": (SDPBackend.FLASH_ATTENTION, ("bfloat16", "float16"), ("full",)),
    "efficient": (SDPBackend.EFFICIENT_ATTENTION, ("float32", "bfloat16", "float16"), ("full", "padded")),
    "cudnn": (SDPBackend.CUDNN_ATTENTION, ("bfloat16", "float16"), ("full", "padded")),
}
CPU_KERNELS = ("math", "flash")
PACKED_FEATURES = (*GRADIENTS, *COPIES, "chunked", *RELATIVE)
SLOWER = {"float64": 2.0, "float32": 1.0, "bfloat16": 3.0, "float16": 10.0}  # on a CPU, with a float64 truth
PAIRS = (("backend", "dtype"), ("backend", "batch"), ("backend", "feature"), ("backend", "mode"), ("dtype", "mode"))


@dataclass(frozen=True)
class Case:
    """One comparison with transformers: a model, a backend, a batch, a dtype, a feature and a way to run it.

    The backend may also be `optimize_for_inference`'s "native"; `family` is empty for a BERT's checkpoint.
    """

    model: str = "BertModel"
    backend: str = "sdpa"
    batch: str = "padded"
    dtype: str = "float64"
    feature: str = ""
    mode: str = ""  # a kernel of SDPA, used alone on both sides; or empty for a plain call
    family: str = ""

    @property
    def name(self) -> str:
        parts = (self.family, self.model, self.backend, self.batch, self.dtype, self.feature, self.mode)
        return "-".join(part for part in parts if part)

    def __str__(self) -> str:
        return self.name

    @property
    def overrides(self) -> Overrides:
        return FEATURES[self.feature]


def each_case(
    models: Names, backends: Names, batches: Names, dtypes: Names, features: Names = "", **others: str
) -> Iterator[Case]:
    """Yield a case for every combination of these values; all have the same mode and family."""
    fields = ([x] if isinstance(x, str) else x for x in (models, dtypes, features, backends, batches))
    for model, dtype, feature, backend, batch in product(*fields):
        yield Case(model, backend, batch, dtype, feature, **others)


def _cases() -> Iterator[Case]:
    # Against the same backend of theirs: all kinds of batches, features, heads, gradients, and the decoder.
    changed = [f for f in FEATURES if f not in ("", "crossed", *GRADIENTS)]
    yield from each_case("BertModel", BACKENDS, BATCHES, DTYPES)
    yield from each_case("BertModel", BACKENDS, "padded", DTYPES, changed)
    yield from each_case(HEADS, BACKENDS, "padded", DTYPES[:3])
    yield from each_case(("BertModel", *HEADS), BACKENDS, "padded", "float64", GRADIENTS)
    yield from each_case(("BertModel", MASKED_LM), BACKENDS, "padded", ("float32", "bfloat16"), GRADIENTS)
    yield from each_case(DECODER, BACKENDS, ("full", "padded"), DTYPES, ("", "crossed"))
    yield from each_case(DECODER, BACKENDS, "padded", "float64", "gradients")
    # packed is compared with their sdpa at the real tokens.  The head for question answering is not compared: our
    # packed loss leaves padding out, and theirs does not
    packing = [name for name in HEADS if not heads.HEADS[name].padding_reader]
    yield from each_case("BertModel", "packed", [b for b in BATCHES if b not in MASKS_OF_QUERIES], DTYPES)
    yield from each_case("BertModel", "packed", "padded", DTYPES, PACKED_FEATURES)
    yield from each_case(packing, "packed", "padded", ("float64", "float32"))
    yield from each_case(packing, "packed", "padded", "float64", GRADIENTS)
    yield from _of_kernels(CPU_KERNELS)


def _of_kernels(names: Iterable[str]) -> Iterator[Case]:
    for kernel in names:
        _, dtypes, batches = KERNELS[kernel]
        trained = [dtype for dtype in dtypes if dtype != "float16"]
        for batch in batches:
            yield from each_case("BertModel", "sdpa", batch, dtypes, mode=kernel)
            yield from each_case("BertModel", "sdpa", batch, trained, "gradients", mode=kernel)


def _in_order(cases: Iterable[Case]) -> tuple[Case, ...]:
    """Sort the cases by model, so that each model is loaded once."""
    order = {name: i for i, name in enumerate(("BertModel", *HEADS, DECODER))}
    return tuple(sorted(cases, key=lambda c: (order[c.model], str(c.overrides), DTYPES.index(c.dtype))))


CASES = _in_order(_cases())
_SHARED = [case for case in CASES if case.feature != "dropout" or case.dtype == "float64"]  # a GPU draws by dtype
GPU_CASES = _in_order([*_SHARED, *_of_kernels(kernel for kernel in KERNELS if kernel not in CPU_KERNELS)])


def cases_for(device: str, shape_only: bool = False) -> tuple[Case, ...]:
    """Return the cases of a device.

    Args:
        shape_only: only the cases that depend on the model's shape, for another checkpoint.
    """
    cases = CASES if device == "cpu" else GPU_CASES
    if not shape_only:
        return cases
    return tuple(case for case in cases if _depends_on_shape(case) and not (device == "cpu" and case.mode))


def _depends_on_shape(case: Case) -> bool:
    return (
        case.feature in ("", "head_mask", "pruned", "gradients")
        and case.batch in ("full", "padded", "long")
        and (case.batch != "long" or case.dtype == "float32")
        and (case.model in ("BertModel", PRETRAINING) or (case.dtype == "float64" and not case.feature))
    )


# The quick choice ----------------------------------------------------------------------------------------------------


def facets_of(case: Case, pairs: bool = True) -> frozenset[Facet]:
    """Return the facets of a case.

    Args:
        pairs: False, for a large checkpoint, keeps only pairs of backend and dtype, and no longest batch.
    """
    value = asdict(case)
    found: set[Facet] = {*value.items()}
    found |= {(f"{a} × {b}", value[a], value[b]) for a, b in PAIRS if pairs or b == "dtype"}
    if pairs and case.feature in GRADIENTS:
        found |= {("gradients of", case.model), ("gradients in", case.dtype)}
    return frozenset(found if pairs else found - {("batch", "long")})


def choose(cases: Sequence[Case], unsupported: Callable[[Case], object], pairs: bool = True) -> tuple[Case, ...]:
    """Return a few of the cases, in order, that together cover all facets.

    A case is left out if other cases have its facets; slow cases with common facets are left out first.

    Args:
        unsupported: whether the reference cannot compute a case.  Such a case is kept only for a facet that no other
            case has, so that the report names it as not checked.
        pairs: see `facets_of`.
    """
    facets = {case: facets_of(case, pairs) for case in cases}
    covered = Counter(facet for each in facets.values() for facet in each)
    # Summed exactly: a set's order changes with every process, and rounding would change the choice.
    cost = {case: seconds_of(case) - fsum(1 / covered[facet] for facet in facets[case]) for case in cases}
    chosen = dict.fromkeys(cases)
    for case in sorted(cases, key=lambda case: (bool(unsupported(case)), cost[case]), reverse=True):
        if all(covered[facet] > 1 for facet in facets[case]):
            del chosen[case]
            covered.subtract(facets[case])
    return tuple(chosen)


def seconds_of(case: Case) -> float:
    """Estimate the time of a case on one core, for MiniLM."""
    forwards = 1.0 if case.feature in GRADIENTS else 0.5 if case.feature in COPIES else 0.2
    return forwards * (15.0 if case.batch == "long" else 1.0) * SLOWER[case.dtype]
