"""Check every conversion: on random tokens the copy and the original have equal outputs.

Large weights amplify rounding errors, so the allowed difference is measured on the model.  The original runs again,
with rounding noise of the dtype added to inputs and outputs of linear layers and to outputs of norms.  The copy may
differ by the effect of this noise, times a factor.

Shapes:  B sequences · S positions
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import lcm, sqrt
from typing import Any

import torch
from torch import Tensor, nn

from bertlite.config import BertConfig
from bertlite.inference.checks import ComputeDtype
from bertlite.inference.model import InferenceModel
from bertlite.models.base import BertPreTrainedModel
from bertlite.stack.inputs import values_readable
from bertlite.stack.outputs import EncoderOutput
from bertlite.support.contexts import own_context

LENGTHS = (72, 11)  # the sequences' lengths: one is padded, and one longer than most windows of local attention
# Outputs may differ by the noise times this.  For floats the noise is a whole step of the dtype, four times the mean
# error of rounding to it; for 8-bit integers it is this error itself.  MiniLM's tokens are off by 0.1 to 1.0 times the
# noise.  Without one of its layers they are off by 7.7 times in int8, 8.0 times in bfloat16, or more.  Tokens of
# random models, with weights of any size, are off by up to 1.4 times.
ALLOWED: dict[ComputeDtype, float] = {torch.float64: 64.0, torch.float32: 64.0}
ALLOWED |= {torch.bfloat16: 4.0, torch.float16: 4.0, torch.int8: 3.5}
STEPS = {"highest": 0.0, "high": 2.0**-10, "medium": 2.0**-7}  # {torch's setting: step of float32 in matmuls}
LARGEST = 1e30  # a head marks outputs that it leaves out with larger or infinite numbers
ENCODED = "last_hidden_state"
# transformers rounds ModernBERT's rotated queries and keys, eager's softmax and the loss of masked words to float32 in
# every dtype, and its eager attention attends evenly where a window holds no token.
ROUNDED = ("modernbert",)
Outputs = dict[str, Tensor]
Call = Callable[[Any], Any]


def verify_model(model: BertPreTrainedModel, quick: InferenceModel) -> None:
    """Verify an optimised model; see `verify`."""
    shared = copy.deepcopy(model, {id(x): x for x in model.parameters()}).eval()
    verify(shared, quick, [(shared.base_model, quick.base_model)], [quick])


@own_context()
def verify(
    original: nn.Module, converted: nn.Module, encoders: Sequence[tuple[Any, Any]], models: Sequence[InferenceModel]
) -> None:
    """Run a model, or an object with models, and its copy on random tokens; its encoders if it takes other inputs.

    Args:
        original: a copy that shares the original's parameters; it gets noise.
        encoders: each encoder in it, and its replacement in `converted`.
        models: the optimised models of these.

    Raises:
        RuntimeError: outputs, of the whole or of an encoder, differ by more than rounding.
        ValueError: the original's own outputs are not finite.
        TypeError: an encoder takes other inputs.
    """
    inputs = random_inputs([each.config for each in models], models[0].device)
    if not values_readable(inputs["input_ids"]):  # on meta, or while something is traced
        return

    # Each side's encoders are watched within its own run.
    sides = {id(original): [a for a, _ in encoders], id(converted): [b for _, b in encoders]}
    reason: Exception | None = None

    # An object's inputs are not known: the ways to call it are tried until its encoders have run.
    for call in ways_to_call(original, inputs):

        def run(each: nn.Module, call: Call = call) -> Outputs:
            return run_watched(call, each, sides[id(each)])

        try:
            plain = run(original)
        except Exception as error:  # any kind: it takes other inputs
            reason = reason or error
            continue

        # The encoders ran, so this comparison is the answer.
        if any(name.startswith(ENCODED) for name in plain):
            theirs, mask = sides[id(original)], inputs["attention_mask"]
            return check_alike(run, plain, original, converted, theirs, mask, models)

    # An encoder by itself must run on tokens; anything around encoders is left out, and they are compared one by one.
    if original is encoders[0][0]:
        name = type(original).__name__
        raise TypeError(f"{name} does not run on tokens, which verify a copy: pass verify=False") from reason
    for (theirs, ours), model in zip(encoders, models, strict=True):
        verify(theirs, ours, [(theirs, ours)], [model])


def ways_to_call(module: nn.Module, inputs: Mapping[str, Tensor]) -> Iterator[Call]:
    """Yield ways to call a module with tokens: by name, by place, and with a dict as in sentence-transformers.

    A wrong way does no harm: the original and its copy are called alike.
    """
    if type(module).__name__.endswith("ForMultipleChoice"):
        inputs = {name: x[:, None] for name, x in inputs.items()}
    takes = inspect.signature(module.forward).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in takes.values())
    if takes_any or "input_ids" in takes:
        taken = {name: x for name, x in inputs.items() if takes_any or name in takes}
        yield lambda each: each(**in_dtype_of(each, taken))
    places = sum(each.kind is each.POSITIONAL_OR_KEYWORD for each in takes.values())
    yield lambda each: each(*[inputs["input_ids"], inputs["attention_mask"]][:places])
    yield lambda each: each({**inputs})


def in_dtype_of(model: Any, inputs: Mapping[str, Tensor]) -> Outputs:
    """Return floats in the dtype of a model, and integers as they are."""
    return {name: x.to(model.dtype) if x.is_floating_point() else x for name, x in inputs.items()}


def run_watched(call: Call, module: nn.Module, encoders: Sequence[nn.Module]) -> Outputs:
    """Return the float tensors that a module returns, and the token vectors of the encoders in it."""
    found: Outputs = {}
    names = [f"{ENCODED} of encoder {i}" for i in range(len(encoders))] if len(encoders) > 1 else [ENCODED]
    before = [vars(part).get("forward") for part in encoders]
    for name, part in zip(names, encoders, strict=True):  # sentence-transformers calls no hooks
        vars(part)["forward"] = partial(keep_vectors, found, name, part.forward)
    try:
        out = call(module)
    finally:
        for part, own in zip(encoders, before, strict=True):
            vars(part).pop("forward") if own is None else vars(part).update(forward=own)
    return {**found, **dict(tensors_of(out))}


def keep_vectors(found: Outputs, name: str, forward: Call, *args: Any, **options: Any) -> Any:
    """Run the forward of an encoder, and keep its token vectors under a name."""
    out: Any = forward(*args, **options)
    x = out if isinstance(out, Tensor) else out[0]
    if x.is_floating_point():
        found[name] = out.layout.unpack(x) if isinstance(out, EncoderOutput) else x
    return out


def tensors_of(out: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the float tensors in an output, dense, by name."""
    if isinstance(out, Tensor) and out.is_floating_point():
        yield name or "output", out.to_dense() if out.is_sparse else out
    elif isinstance(out, Mapping | list | tuple):
        for key, part in out.items() if isinstance(out, Mapping) else enumerate(out):
            yield from tensors_of(part, f"{name}.{key}".lstrip("."))


def check_alike(
    run: Callable[[Any], Outputs],
    plain: Outputs,
    original: nn.Module,
    converted: nn.Module,
    encoders: Sequence[nn.Module],
    mask: Tensor,
    models: Sequence[InferenceModel],
) -> None:
    """Raise RuntimeError if outputs differ by more than rounding, ValueError if the original's are not finite.

    Args:
        run: returns the outputs of either.
        plain: the original's outputs.
        original, encoders: get noise.
        mask: 0 for padding, whose outputs count if both compute them.
        models: the optimised models in `converted`.
    """
    dtype = max((each.compute_dtype for each in models), key=[*ALLOWED].index)

    # The original runs again with noise, which shows how much rounding changes these outputs.
    step = add_noise_(original, encoders, dtype)
    noisy, ours = run(original), run(converted)

    # A head may ask for only first tokens, and tokens of two kinds are not compared.
    plain = {key: x for key, x in plain.items() if not key.startswith(ENCODED) or x.shape == ours[key].shape}

    # Padding counts only if both sides compute it.
    real = mask.flatten(0, -2).bool()
    both = [(plain[key], ours[key]) for key in plain if key.startswith(ENCODED) and plain[key].shape[:2] == real.shape]
    evenly = is_rounded(encoders) and getattr(encoders[0].config, "_attn_implementation", None) == "eager"
    computed = not evenly and any(bool(x[~real].any()) and bool(y[~real].any()) for x, y in both)
    counts = torch.ones_like(real) if computed else real
    plain, noisy, ours = (real_outputs(each, counts) for each in (plain, noisy, ours))

    # Nothing can be said of a model that gives nan itself.
    for key, x in plain.items():
        if x.isnan().any() or (key.startswith(ENCODED) and not x.isfinite().all()):
            raise ValueError(
                f"the model's own {key} is not finite for random tokens, so that no copy can be verified: repair its"
                " weights, or pass verify=False"
            )

    # Noise may miss an output by chance: relative to its size it is allowed as much as any other output.
    noise = {key: rms(error_of(noisy[key], x)) for key, x in plain.items()}
    sizes = {key: rms(x.where(x.abs() < LARGEST, 0)) for key, x in plain.items()}
    relative = max([step, *(noise[key] / max(size, 1e-30) for key, size in sizes.items())])

    for key, x in plain.items():
        few = 1 + 4 / sqrt(max(x.numel(), 1))  # the noise of a few numbers may be small by chance
        allowed, off = ALLOWED[dtype] * few * max(noise[key], relative * sizes[key]), error_of(ours[key], x)
        if not rms(off) <= allowed:
            raise RuntimeError(
                f"backend {models[0].backend!r} in {dtype} does not compute this model: for random tokens {key}"
                f" differs by up to {float(off.abs().max()):.2g}, and its root mean square {sizes[key]:.2g} by"
                f" {rms(off):.2g}, where rounding explains {allowed:.2g}; use another backend or dtype, or the model"
                " itself (verify=False leaves out this check)"
            )


def error_of(ours: Tensor, x: Tensor) -> Tensor:
    """Return the differences of outputs; numbers above LARGEST count as equal."""
    if ours.shape != x.shape:
        raise RuntimeError(
            f"the copy does not compute this model: it returns {tuple(ours.shape)}, not {tuple(x.shape)}"
        )
    return torch.where((x.abs() < LARGEST) | (ours.abs() < LARGEST) | ours.isnan(), ours - x, 0)


def random_inputs(configs: Sequence[BertConfig], device: torch.device) -> dict[str, Tensor]:
    """Return the same random tokens for every model of a vocabulary, with padding; all of the models take them."""
    words, types, positions = (
        min(getattr(config, size) for config in configs)
        for size in ("vocab_size", "type_vocab_size", "max_position_embeddings")
    )

    # Two lengths, so that one sequence is padded; both are multiples of the chunks in which layers may run.
    random, pad = torch.Generator().manual_seed(0), configs[0].pad_token_id or 0
    longest, chunk = min(LENGTHS[0], positions), lcm(*(config.chunk_size_feed_forward or 1 for config in configs))
    lengths = torch.tensor(LENGTHS, dtype=torch.long, device="cpu").clamp(max=max(longest // chunk, 1) * chunk)
    shape = (len(LENGTHS), int(lengths.max()))
    mask = torch.arange(shape[1], device="cpu") < lengths[:, None]

    ids = torch.randint(words, shape, generator=random, device="cpu")
    inputs = {
        "input_ids": ids.where(mask, pad if pad < words else 0),
        "token_type_ids": torch.randint(types, shape, generator=random, device="cpu"),
        "attention_mask": mask.long(),
    }

    # A decoder needs something to attend to.
    if configs[0].add_cross_attention:
        states = (len(LENGTHS), 3, configs[0].hidden_size)
        inputs["encoder_hidden_states"] = torch.randn(states, generator=random, device="cpu", dtype=torch.float32)
    return {name: x.to(device) for name, x in inputs.items()}


def real_outputs(out: Outputs, counts: Tensor) -> Outputs:
    """Return outputs in float64; outputs of tokens, (B, S, …), without the positions that do not count."""
    return {name: (x[counts] if x.shape[:2] == counts.shape else x).double() for name, x in out.items()}


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt()) if x.numel() else 0.0


# Rounding noise


def add_noise_(model: nn.Module, encoders: Sequence[Any], dtype: ComputeDtype) -> float:
    """Let a model compute with rounding noise of a dtype; return the step of its floats.

    Args:
        encoders: the encoders in it, also in lists.
        dtype: int8 is only for word embeddings and the matrices in their layers; the rest is then float32.
    """
    device, step = next(encoders[0].parameters()).device, step_of(encoders, dtype)
    random = torch.Generator(device).manual_seed(1)
    floats, rows = Noise(random, step), Noise(random, step, rounds_weights=True)
    integers = Noise(random, 2.0**-8, rounds_weights=True, rounds_inputs=True)  # attention may be in bfloat16

    # Rounding differs by place: integers inside the encoder's matmuls, rows in word embeddings, floats elsewhere.
    inside = {id(part) for each in encoders for part in layer_list(each).modules()}
    words = {id(each.get_input_embeddings().weight) for each in encoders if dtype == torch.int8}

    for part in {part for each in (model, *encoders) for part in each.modules()}:  # no hooks: a model may see them
        if isinstance(part, nn.Linear):
            outside = rows if id(part.weight) in words else floats  # a tied decoder multiplies by word embeddings
            noise = integers if dtype == torch.int8 and id(part) in inside else outside
            vars(part)["forward"] = partial(noise.run_linear, part, part.forward)
        elif isinstance(part, nn.LayerNorm):
            vars(part)["forward"] = partial(floats.run, part.forward)
        elif isinstance(part, nn.Embedding) and id(part.weight) in words:
            vars(part)["forward"] = partial(rows.run, part.forward)
    return step


def layer_list(body: Any) -> Any:
    """Return the layers of a base model of any family, the first list of modules in it."""
    return next(part for part in body.modules() if isinstance(part, nn.ModuleList))


def is_rounded(encoders: Sequence[Any]) -> bool:
    """Return whether an encoder is of ROUNDED."""
    return any(getattr(each.config, "model_type", None) in ROUNDED for each in encoders)


def step_of(encoders: Sequence[nn.Module], dtype: ComputeDtype) -> float:
    """Return the step between numbers near 1: the largest of the dtype's, the encoders' own and the matmuls'."""
    own = (torch.finfo(x.dtype).eps for each in encoders for x in each.parameters() if x.is_floating_point())
    floats = dtype if isinstance(dtype, torch.dtype) and dtype != torch.int8 else torch.float32
    floats = torch.float32 if floats == torch.float64 and is_rounded(encoders) else floats
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # torch's newer settings differ by library
        precision = "medium"
    return max(torch.finfo(floats).eps, *own, STEPS[precision])


@dataclass(frozen=True)
class Noise:
    """Rounding noise: floats are off by steps of their dtype, 8-bit integers by 1/√12 of a step in the mean square.

    Args:
        step: the step of floats near 1.
        rounds_weights: weights are rows of 8-bit integers.
        rounds_inputs: inputs of matmuls are 8-bit integers too.
    """

    random: torch.Generator
    step: float
    rounds_weights: bool = False
    rounds_inputs: bool = False

    def run_linear(self, part: nn.Linear, forward: Callable[[Tensor], Tensor], input: Tensor) -> Tensor:
        error = self.step * input
        if self.rounds_inputs and input.numel():
            low, high = input.aminmax(dim=-1, keepdim=True)
            error = (high.clamp(min=0) - low.clamp(max=0)) / 255 / sqrt(12)
        out = forward(self.shake(input, error))

        # The error of rounded weights grows with the inputs.
        error = self.step * out
        if self.rounds_weights and input.numel():
            steps = torch.linalg.vector_norm(part.weight, torch.inf, dim=1) / 127
            error = (input.norm(dim=-1, keepdim=True) * steps / sqrt(12)).hypot(error)
        return self.shake(out, error)

    def run(self, forward: Callable[[Tensor], Tensor], input: Tensor) -> Tensor:
        """Run a norm, or embeddings in rows of 8-bit integers, and shake the outputs."""
        out = forward(input)
        error = out.abs().amax(-1, keepdim=True) / 127 / sqrt(12) if self.rounds_weights else self.step * out
        return self.shake(out, error)

    def shake(self, x: Tensor, error: Tensor) -> Tensor:
        return x + torch.randn(x.shape, generator=self.random, dtype=x.dtype, device=x.device) * error
