"""A small model that the native kernels run, and helpers of their tests.

Shapes:  L 3 layers · D 80 hidden · N 5 heads · H 16 head dim · I 37 neurons
"""

import contextlib
import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from conftest import make, tensors
from torch import Tensor, nn

from bertlite import prune_heads, prune_neurons
from bertlite.inference import InferenceModel
from bertlite.inference.checks import MIXED, ComputeDtype
from bertlite.inference.native.conversion import native_copy
from bertlite.inference.native.encoder import NativeEncoder
from bertlite.inference.native.rounding import Sample, rotated
from bertlite.inference.native.weights import NativeWeights, aligned_tensor
from bertlite.models.base import BertPreTrainedModel
from bertlite.parity.compare import as_well, largest
from bertlite.runtime import library
from bertlite.runtime.structs import Kernels

SIZES: dict[str, Any] = {"hidden_size": 80, "num_attention_heads": 5}
ROTARY: dict[str, Any] = {  # ModernBERT's layers, whose windows end before the sequences do
    "position_embedding_type": "rotary_local",
    "position_biased_input": False,
    "rotary_base": 1000.0,
    "local_attention": 3,
    "local_layers": [1],
    "norm_first": True,
    "gated": True,
}
DTYPES = (torch.float32, torch.bfloat16, torch.int8)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
WITH_MIXED = (*DTYPES, MIXED)
PRUNED = {0: range(5), 1: [1, 3], 2: [0]}  # a layer without heads
NEURONS = {0: [0, 36], 1: range(37)}  # and one without neurons
ROUNDING = 1e-6  # relative to the largest number: a few of float32's steps
OF_FEW = 4e-6  # of a few numbers, as a pooler's: half of what the plain model's error is in the mean of many models


def flags_here() -> frozenset[str]:
    """Return the flags of this processor; where torch is limited to AVX2, without those of AVX-512."""
    limited = torch.backends.cpu.get_cpu_capability() == "AVX2"
    return frozenset(flag for flag in library.processor_flags() if not (limited and flag.startswith("avx512")))


def why_no_kernels() -> str | None:
    """Return the reason why there are no kernels here; None if a wheel has them or a compiler can make them."""
    with contextlib.suppress(library.NativeKernelsError):
        if not library.PREBUILT.exists():
            library.find_compiler()
        return library.missing_platform()
    return library.missing_platform() or "needs a C++ compiler: set CXX or install g++"


native = pytest.mark.skipif(why_no_kernels() is not None, reason=str(why_no_kernels()))


def no_home() -> Path:
    """Stand in for `Path.home` of a user who has none."""
    raise RuntimeError("Could not determine home directory.")


def kernels_or_skip(name: str | None = None, reproducible: bool = False) -> Kernels:
    """Return the kernels of a set of instructions, by default the best; skip the test where they cannot run."""
    if (reason := why_no_kernels()) is not None:
        pytest.skip(reason)
    wanted = name or library.usable_sets(reproducible=reproducible)[0].name
    missing = library.INSTRUCTION_SETS[wanted].needs - flags_here()
    if missing:
        pytest.skip(f"needs a processor with {', '.join(sorted(missing))}")
    try:  # which may be another than the first, if its bfloat16 is slow here
        return library.kernels_for(wanted, reproducible) if name else library.load_kernels(reproducible)
    except library.NativeKernelsError as error:
        if "no C++ compiler" in str(error):  # and a wheel that lacks this set
            pytest.skip(str(error))
        raise


def make_native(cls: Any = None, **changes: Any) -> Any:
    """Make a random model in float64 whose heads are as wide as the kernels take them."""
    return make(*([] if cls is None else [cls]), **{**SIZES, **changes})


def natively(
    model: BertPreTrainedModel,
    dtype: ComputeDtype,
    name: str | None = None,
    reproducible: bool = False,
    sample: Sample | None = None,
) -> InferenceModel:
    """Return the model as the kernels of a set of instructions run it."""
    kernels, numbers = kernels_or_skip(name, reproducible), torch.int8 if dtype == MIXED else dtype
    copied = native_copy(model, numbers, kernels, sample)
    if dtype == MIXED:
        floats = native_copy(model, torch.float32 if reproducible else torch.bfloat16, kernels)
        ours, theirs = (cast(NativeEncoder, each.base_model.encoder) for each in (copied, floats))
        ours.weights = mix(ours.weights, theirs.weights, kept=(model.config.num_hidden_layers // 2,))
    return InferenceModel(copied, "native", dtype)


def mix(integers: NativeWeights, floats: NativeWeights, kept: tuple[int, ...]) -> NativeWeights:
    """Return weights with some layers in floats, as folders from before format 10 may have them."""
    shape = replace(integers.shape, kept=kept, floats=floats.shape.numbers)
    data = aligned_tensor(shape.size()).zero_()
    for place, (start, count) in shape.offsets.items():
        source = floats if place[0] in kept else integers
        first = source.at[place][0]
        data[start : start + count] = source.data[first : first + count]
    return NativeWeights(shape, data)


def pruned(model: BertPreTrainedModel) -> BertPreTrainedModel:
    return prune_neurons(prune_heads(model, PRUNED), NEURONS)


def assert_near(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> None:
    """Assert that outputs are as near to the truth, in float64, as those of another model that rounds as much."""
    assert list(ours) == list(truth)
    assert ours, "nothing to compare"
    for place in truth:
        assert ours[place].dtype == theirs[place].dtype, place
        assert ours[place].shape == truth[place].shape, place
        mine, other, true = without_forbidden(ours[place], theirs[place], truth[place])
        error, allowed, _ = as_well(mine, other, true)
        rounding = OF_FEW if true.numel() < 500 else ROUNDING  # of a few numbers, others may be right by chance
        allowed = max(allowed, rounding * largest(true))
        assert error <= allowed, f"{place}: {error:.2e}, of {allowed:.2e} allowed"


def without_forbidden(*outputs: Tensor) -> list[Tensor]:
    """Replace the lowest number of a dtype, which forbids a position, by 0 where all have it."""
    lowest = [x == torch.finfo(x.dtype).min for x in outputs]
    everywhere = torch.stack(lowest).all(0)
    return [x.masked_fill(everywhere, 0) for x in outputs]


class RoundedLinear(nn.Module):
    """A linear layer in float64 of the 8-bit integers that the kernels round to, with a scale for each token.

    Args:
        heads: round the outputs to bfloat16.
        part: so many inputs at a time are padded to whole vectors before they are rotated: the size of a head.
    """

    def __init__(self, linear: nn.Linear, heads: bool, part: int) -> None:
        super().__init__()
        self.linear, self.heads, self.part = linear, heads, part
        self.weight, self.bias, self.out_features = linear.weight, linear.bias, linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        inputs, weight = (rotated(self.padded(each)) for each in (x, self.linear.weight))
        out = nn.functional.linear(in_unsigned_8_bits(inputs), in_8_bits(weight), self.linear.bias)
        return out.bfloat16().to(x.dtype) if self.heads else out

    def padded(self, x: Tensor) -> Tensor:
        parts = x.unflatten(-1, (x.shape[-1] // self.part, self.part))
        return nn.functional.pad(parts, (0, -self.part % 16 if self.part > 1 else 0)).flatten(-2)


def in_8_bits(x: Tensor) -> Tensor:
    """Round rows to 255 steps between their largest number and its opposite."""
    if not x.numel():
        return x
    step = x.abs().amax(-1, keepdim=True) / 127
    return (x / step.masked_fill(step == 0, 1)).round() * step


def in_unsigned_8_bits(x: Tensor) -> Tensor:
    """Round rows to 256 steps from their least number, at most 0, to their largest, at least 0; 0 is a step."""
    if not x.numel():
        return x
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    step = (high - low) / 255
    step = step.masked_fill(step == 0, 1)
    zero = (-low / step).round()
    return ((x / step + zero).round().clamp(0, 255) - zero) * step


def in_integers(model: BertPreTrainedModel) -> BertPreTrainedModel:
    """Return a copy that rounds to 8-bit integers what the kernels round, and else computes as the model does."""
    rounded = copy.deepcopy(model)
    words = rounded.base_model.embeddings.word_embeddings.weight
    words.data = in_8_bits(words.data)
    layer: Any
    for layer in rounded.base_model.encoder.layer:
        for name, part in list(layer.named_modules()):
            if isinstance(part, nn.Linear):
                inside, _, last = name.rpartition(".")
                size = layer.attention.self.attention_head_size if name == "attention.output.dense" else 1
                heads = last in ("query", "key", "value")
                setattr(layer.get_submodule(inside), last, RoundedLinear(part, heads, size))
    return rounded


@torch.no_grad()
def check(model: BertPreTrainedModel, dtype: Any, name: str | None = None, **inputs: Any) -> Any:
    """Assert that the kernels give what the model gives for these inputs, and return what they gave.

    Under "auto" and "sdpa" they leave padding out, as the model does under "packed".
    """
    ours = natively(model, dtype, name)(**as_floats(inputs, torch.float32 if dtype in (torch.int8, MIXED) else dtype))
    plain = copy.deepcopy(model)
    if model.config.attn_implementation in ("auto", "sdpa") and leaves_padding_out(inputs):
        plain.set_attn_implementation("packed")
    truth = plain(**inputs)
    if dtype in (torch.int8, MIXED):
        theirs = {place: x.float() for place, x in tensors(in_integers(plain)(**inputs)).items()}
    else:
        theirs = tensors(copy.deepcopy(plain).to(dtype)(**as_floats(inputs, dtype)))
    assert type(ours) is type(truth)
    assert_near(tensors(ours), theirs, tensors(truth))
    return ours


def leaves_padding_out(inputs: Mapping[str, Any]) -> bool:
    """Return whether a native model leaves padding out of a forward under "auto"."""
    mask = inputs.get("attention_mask")
    readable = mask is None or (mask.dim() == 2 and bool(mask[:, :1].all()))
    return readable and not inputs.get("output_attentions")


def as_floats(inputs: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return inputs with those of floats in another dtype, as a user of that dtype would give them."""
    return {name: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in inputs.items()}
