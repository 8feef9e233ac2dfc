"""A check of every conversion: for a few random tokens the new model and the plain one have equal outputs.

The allowed difference depends on the model, since large weights amplify rounding errors, and is measured: the plain
model runs on each sequence several times, every time but the first with rounding noise of the dtype added to the
inputs and outputs of its linear layers and the outputs of its norms.  The new model may differ by the effect of this
noise, times a factor.

Shapes:  B sequences · S positions · R runs;  the plain model's batch is R·B rows, of which the first B get no noise
"""

import copy
import inspect
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from bertlite.models.base import BertPreTrainedModel
from bertlite.models.heads import MultipleChoiceBody
from bertlite.stack.inputs import values_readable

LENGTHS = (6, 4)  # of the sequences, so that one is padded
RUNS = 4  # of the plain model: one without noise, the others with it, since large weights amplify it unevenly
# How many times the noise outputs may differ by.  The noise of floats is a whole step of the dtype, four times the
# mean error of rounding to it; that of 8-bit integers is this error itself.  MiniLM is off by 0.2 to 1.3 times the
# noise, and without one of its layers by 5.8 times that of int8, 7.9 times that of bfloat16, or more; random models of
# any size of weights are off by up to 1.1 times.
ALLOWED = {torch.float64: 64.0, torch.float32: 64.0, torch.bfloat16: 4.0, torch.float16: 4.0, torch.int8: 3.5}
STEPS = {"highest": 0.0, "high": 2.0**-10, "medium": 2.0**-7}  # of float32 in matmuls, by torch's setting
Outputs = dict[str, Tensor]


@torch.no_grad()
def verify(model: BertPreTrainedModel, converted: BertPreTrainedModel, backend: str, dtype: torch.dtype) -> None:
    """Run both models on a few random tokens and compare their outputs.

    Args:
        converted: in eval mode; not yet compiled.
        dtype: that it computes in.

    Raises:
        RuntimeError: they differ by more than rounding.
        ValueError: the model's own outputs are not finite.
    """
    inputs = random_inputs(model)
    if not values_readable(inputs["input_ids"]):  # on meta, or while something is traced
        return
    repeated = {name: torch.cat([x] * RUNS) for name, x in inputs.items()}
    real = inputs["attention_mask"].flatten(0, -2).bool()
    with torch.autocast(model.device.type, enabled=False):
        runs = run(shaken_copy(model, dtype), repeated, "the model itself")
        ours = real_outputs(run(converted, inputs, f"backend {backend!r}"), real)
    plain, *shaken = (real_outputs({name: x.chunk(RUNS)[i] for name, x in runs.items()}, real) for i in range(RUNS))
    for name, x in plain.items():
        if not x.isfinite().all():
            raise ValueError(
                f"the model's own {name} is not finite for random tokens, so that no copy can be verified: repair its"
                " weights, or pass verify=False"
            )
    noise = {name: max(rms(each[name] - x) for each in shaken) for name, x in plain.items()}
    relative = max([step_of(model, dtype), *(noise[name] / max(rms(x), 1e-30) for name, x in plain.items())])
    for name, x in plain.items():
        few = 1 + 4 / sqrt(max(x.numel(), 1))  # the noise of a few numbers may be small by chance
        allowed, difference = ALLOWED[dtype] * few * max(noise[name], relative * rms(x)), ours[name] - x
        if not rms(difference) <= allowed:
            raise RuntimeError(
                f"backend {backend!r} in {dtype} does not compute this model: for random tokens {name} differs by up"
                f" to {float(difference.abs().max()):.2g} and by {rms(difference):.2g} in the mean square, of"
                f" {allowed:.2g} that rounding explains, where its own is {rms(x):.2g}; use another backend or dtype,"
                " or the model itself (verify=False leaves out this check)"
            )


def random_inputs(model: BertPreTrainedModel) -> dict[str, Tensor]:
    """Return the same random tokens for every model of a vocabulary, with padding, as the model's class takes them."""
    config, random = model.config, torch.Generator().manual_seed(0)
    lengths = torch.tensor(LENGTHS, dtype=torch.long, device="cpu").clamp(max=config.max_position_embeddings)
    shape = (len(LENGTHS), int(lengths.max()))
    inputs = {
        "input_ids": torch.randint(config.vocab_size, shape, generator=random, device="cpu"),
        "token_type_ids": torch.randint(config.type_vocab_size, shape, generator=random, device="cpu"),
        "attention_mask": (torch.arange(shape[1], device="cpu") < lengths[:, None]).long(),
    }
    if isinstance(model, MultipleChoiceBody):
        inputs = {name: x[:, None] for name, x in inputs.items()}
    if config.add_cross_attention and "encoder_hidden_states" in inspect.signature(model.forward).parameters:
        inputs["encoder_hidden_states"] = torch.randn(
            len(LENGTHS), 3, config.hidden_size, generator=random, device="cpu", dtype=torch.float32
        )
    return {name: x.to(model.device) for name, x in inputs.items()}


def run(model: BertPreTrainedModel, inputs: dict[str, Tensor], name: str) -> Outputs:
    """Return the float tensors that a model gives, of one with a head also what its last layer gives."""
    inputs = {name: x.to(model.dtype) if x.is_floating_point() else x for name, x in inputs.items()}
    has_head = model.base_model is not model
    try:
        out: Any = model(**inputs, output_hidden_states=has_head, return_dict=True)
    except Exception as error:
        error.add_note(f"{name} failed at the tokens by which a conversion is verified; verify=False leaves them out")
        raise
    found = {"last_hidden_state": out.hidden_states[-1], **out} if has_head else out
    return {name: x for name, x in found.items() if isinstance(x, Tensor) and x.is_floating_point()}


def real_outputs(out: Outputs, real: Tensor) -> Outputs:
    """Return outputs in float64, those of tokens, (B, S, …), without the padding."""
    return {name: (x[real] if x.shape[:2] == real.shape else x).double() for name, x in out.items()}


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt()) if x.numel() else 0.0


# Rounding noise


def shaken_copy(model: BertPreTrainedModel, dtype: torch.dtype) -> BertPreTrainedModel:
    """Return a copy that shares the model's tensors, in eval mode, and computes all runs but the first with noise.

    Args:
        dtype: of the noise.  int8 is that of the matrices in the layers; the rest is float32 then.
    """
    copied = copy.deepcopy(model, {id(x): x for x in (*model.parameters(), *model.buffers())}).eval()
    random = torch.Generator(model.device).manual_seed(1)
    floats = Noise(random, step_of(model, dtype))
    integers = IntegerNoise(random, 2.0**-8)  # attention may be in bfloat16
    layers = set(copied.base_model.encoder.modules())
    for part in copied.modules():
        if isinstance(part, nn.Linear):
            noise = integers if dtype == torch.int8 and part in layers else floats
            part.register_forward_pre_hook(noise.shake_input)
            part.register_forward_hook(noise.shake_output)
        elif isinstance(part, nn.LayerNorm):
            part.register_forward_hook(floats.shake_output)
    return copied


def step_of(model: BertPreTrainedModel, dtype: torch.dtype) -> float:
    """Return the step between numbers near 1: of the dtype, the model's own or that of matmuls, the largest."""
    floats = torch.float32 if dtype == torch.int8 else dtype
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # torch's newer settings, which differ by library
        precision = "medium"
    return max(torch.finfo(floats).eps, torch.finfo(model.dtype).eps, STEPS[precision])


@dataclass(frozen=True)
class Noise:
    """Noise of floats: each number is off by some steps of its dtype."""

    random: torch.Generator
    step: float

    def shake_input(self, part: nn.Linear, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (self.shake(args[0], self.input_error(args[0])), *args[1:])

    def shake_output(self, part: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        return self.shake(out, self.output_error(part, args[0], out))

    def shake(self, x: Tensor, error: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=self.random, dtype=x.dtype, device=x.device) * error
        noise[: len(x) // RUNS] = 0
        return x + noise

    def input_error(self, x: Tensor) -> Tensor:
        return self.step * x

    def output_error(self, part: nn.Module, x: Tensor, out: Tensor) -> Tensor:
        return self.step * out


class IntegerNoise(Noise):
    """Noise of 8-bit integers: off by what rounding to whole steps errs by, 1/√12 of a step in the mean square."""

    def input_error(self, x: Tensor) -> Tensor:
        if not x.numel():
            return x
        low, high = x.aminmax(dim=-1, keepdim=True)
        return (high.clamp(min=0) - low.clamp(max=0)) / 255 / sqrt(12)

    def output_error(self, part: nn.Module, x: Tensor, out: Tensor) -> Tensor:
        assert isinstance(part, nn.Linear)
        if not x.numel():
            return self.step * out
        steps = torch.linalg.vector_norm(part.weight, torch.inf, dim=1) / 127
        return (x.norm(dim=-1, keepdim=True) * steps / sqrt(12)).hypot(self.step * out)
