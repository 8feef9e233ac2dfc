"""`optimize_for_inference`: a copy of a model that runs faster, and only runs."""

from functools import partial
from typing import Any, TypedDict, TypeVar, Unpack, overload

import torch

from bertlite.checkpoint.checks import DTYPES, parse_dtype
from bertlite.config import check_known
from bertlite.inference.checks import ComputeDtype, check_unaltered, refuse_optimised
from bertlite.inference.clients.bodies import optimize_bodies
from bertlite.inference.clients.readers import reader_of, warn_of
from bertlite.inference.clients.verification import verify_model
from bertlite.inference.gpu.graphs import current, use_graphs_
from bertlite.inference.model import InferenceModel
from bertlite.inference.native.choice import kernels_if_faster, require_kernels
from bertlite.inference.native.conversion import native_copy, plain_copy
from bertlite.inference.native.rounding import Sample
from bertlite.models.base import BertPreTrainedModel
from bertlite.support.contexts import own_context
from bertlite.support.habits import refuse_others

Thing = TypeVar("Thing")
PLAIN = "plain"  # the backend that copies the model
GRAPHS = "graphs"  # the backend that replays CUDA graphs
INFERENCE_BACKENDS = ("auto", "native", GRAPHS, PLAIN)
COMPUTE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)


class Options(TypedDict, total=False):
    """The options of `optimize_for_inference`."""

    dtype: ComputeDtype | None
    backend: str
    verify: bool
    reproducible: bool
    skip_padding: bool | None
    sample: Sample | None


@overload
def optimize_for_inference(model: BertPreTrainedModel, **options: Unpack[Options]) -> InferenceModel: ...
@overload
def optimize_for_inference(model: Thing, **options: Unpack[Options]) -> Thing: ...
@own_context()
def optimize_for_inference(
    model: Any,
    *,
    dtype: ComputeDtype | None = None,
    backend: str = "auto",
    verify: bool = True,
    reproducible: bool = False,
    skip_padding: bool | None = None,
    sample: Sample | None = None,
    **habits: Any,
) -> Any:
    """Return a copy of a model that runs faster, and only runs.

    A model of transformers or bertlite.hf, or an object that holds one (a SentenceTransformer, a CrossEncoder, a
    pipeline), gives a copy of the same kind, and its library can use the copy as before.  Each encoder in it that is a
    BERT, or of one of BERT's families, is replaced; heads, pooling and everything else stay.

    The copy shares nothing with `model`: delete `model` to free its memory, and optimise again after any change of its
    weights.

    Args:
        model: BertModel or one of the task heads, pruned or not, on the CPU or a GPU; or an object of torch that holds
            such encoders, in eval mode.
        dtype: the dtype to compute in, of torch or its name: float32 or bfloat16, on a GPU also float16, on the CPU
            also int8; by default the model's own.  With int8 the matrices of the layers are 8-bit integers: the
            nearest ones, or with `sample` those that err least on it.  Their inputs are quantised at every call, by
            the smallest and largest number of each token, after a rotation that spreads outliers.  Word embeddings are
            rounded to 8 bits, attention is bfloat16, and everything else is float32.
        backend: "native" runs all layers in one call of C++ kernels, which are compiled once.  "graphs" launches all
            kernels of a GPU at once, from CUDA graphs that are recorded for sizes of batches as these come.  "auto" on
            the CPU is "native", if the kernels can run the model and are faster.  On a processor without a record the
            speed is measured; int8 is always "native".  Otherwise "auto" is "plain", with one warning that gives the
            reason and the way out (on a GPU without a warning).  "plain" is a copy of the model, in any float dtype.
        verify: compare the outputs of the model, or the object that holds it, and of the copy for two random sequences
            of up to 72 tokens, one of them padded.  The allowed difference is rounding in this dtype, measured on the
            model itself.  If the object takes other inputs, its encoders are compared.
        reproducible: give the same bits on every processor, in float32 or int8, with the native kernels.  int8 is then
            slower on processors with bfloat16 instructions, since attention is float32; float32 is slower only on AMX.
            A saved copy stays reproducible.
        skip_padding: leave padding out, which gives zeros at padded positions (True), or compute it, as the model
            does (False).  By default it is left out if no part reads it: for an encoder by itself, and for heads that
            read first tokens or score tokens.  The softmax of question answering reads it, and so does a label of
            padding.  It is also computed, with one warning, for classes, heads and objects that
            `inference.clients.readers` does not know.  attn_implementation "eager" always computes it, and "packed"
            leaves it out.
        sample: token ids of a hundred texts or more, or what a tokenizer returns for them, to which int8's weights
            are fitted.  The copy is then nearer to the model and as fast, but the fit takes time: save the copy,
            or use `bertlite pack`, which does this by default.  At most 16,384 tokens are used.  Which integers are
            chosen may depend on the machine; a saved copy has the same ones everywhere.

    Raises:
        ValueError: the backend does not exist, or not for this model, device and dtype; or it is not reproducible; or
            the model's outputs are not finite; or the dtype takes no sample, or it has too few texts.
        RuntimeError: "native" or int8 was requested and the kernels cannot be compiled; or the copy was verified and
            differs.
        TypeError: `model` is no such model and holds none, was optimised already, or has modules that a copy would not
            reproduce: linear layers that are not plain nn.Linear, layers of other classes, hooks within the encoder,
            or values and buffers that differ from its config's.
    """
    refuse_others("optimize_for_inference", habits)
    dtype = parse_compute_dtype(dtype)
    check_backend(backend)

    # An object of another library: each encoder in it comes back to this function.  The whole is verified at the end.
    if not isinstance(model, BertPreTrainedModel):
        settings = Options(dtype=dtype, backend=backend, verify=False, reproducible=reproducible, sample=sample)
        optimise = partial(optimize_for_inference, **settings)
        return optimize_bodies(model, optimise, verify, skip_padding)

    dtype = dtype or model.dtype
    for part in model.modules():
        refuse_optimised(type(model).__name__, part)

    # A wish that cannot be met is refused before any work.
    if sample is not None and dtype != torch.int8:
        raise ValueError(f"sample is for int8, and the dtype is {dtype}: leave it out")
    if reproducible and (backend in (GRAPHS, PLAIN) or dtype not in (torch.float32, torch.int8)):
        raise ValueError(f"{dtype} of backend {backend!r} is not reproducible: use float32 or int8 with 'native'")
    if backend in (GRAPHS, PLAIN) and dtype == torch.int8:
        raise ValueError(
            f"backend {backend!r} has no int8, which needs the native kernels: use 'auto', or a float dtype"
        )

    # The plain copy runs the modules themselves, so they may be anything.
    if backend == PLAIN:
        return InferenceModel(plain_copy(model, dtype), PLAIN, dtype, skip_padding)

    # Every other backend computes what plain modules would.
    check_unaltered(model)
    check_dtype(dtype, model.device)

    # With "auto" the kernels may be missing or slower; whoever needs them gets an error instead of another backend.
    required = backend == "native" or dtype == torch.int8 or reproducible
    if backend == GRAPHS:
        copied = plain_copy(model, dtype)
        with current(copied.device):  # or another GPU would be asked
            use_graphs_(copied)
    elif kernels := require_kernels(model, reproducible) if required else kernels_if_faster(model, dtype):
        backend, copied = "native", native_copy(model, dtype, kernels, sample)
    else:
        backend, copied = PLAIN, plain_copy(model, dtype)

    # The copy computes padding that its head reads.
    reader = reader_of(model, model.base_model)
    if backend != PLAIN and skip_padding is None and reader is not None:
        skip_padding = False
        warn_of(type(model).__name__, reader, stacklevel=2)
    quick = InferenceModel(copied, backend, dtype, skip_padding)
    if verify:
        verify_model(model, quick)
    return quick


def check_backend(backend: str) -> None:
    """Raise ValueError if a backend does not exist."""
    check_known("backend", backend, INFERENCE_BACKENDS)


def check_dtype(dtype: ComputeDtype, device: torch.device) -> None:
    """Raise ValueError if a dtype cannot be computed in, or not on this device."""
    if dtype not in COMPUTE_DTYPES:
        raise ValueError(f"dtype {dtype} is not among {', '.join(map(str, COMPUTE_DTYPES))}; give one of them")
    if dtype == torch.int8 and device.type != "cpu":
        raise ValueError(f"int8 is for the CPU and the model is on {device}; use bfloat16 or float16")
    if dtype == torch.float16 and device.type == "cpu":
        raise ValueError("float16 is for GPUs and the model is on the CPU; use dtype=torch.bfloat16 or torch.float32")


def parse_compute_dtype(dtype: ComputeDtype | None) -> ComputeDtype | None:
    """Return the dtype with a name: one of a checkpoint's, or int8; None is the model's own.

    Raises:
        ValueError: there is no such dtype.
    """
    return parse_dtype(dtype, {**DTYPES, "int8": torch.int8})
