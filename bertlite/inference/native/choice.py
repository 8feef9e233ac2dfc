"""Decide whether the kernels can run a model, and are faster on this processor: by a record, or measured once.

One layer of a small model is measured, in milliseconds; the times are kept in a file next to the kernels.
"""

import warnings
from functools import cache, partial
from pathlib import Path

import torch

from bertlite.checkpoint.saving import dtype_name
from bertlite.config import BertConfig
from bertlite.inference.checks import ComputeDtype, missing_for_native
from bertlite.inference.native.conversion import native_copy, plain_copy
from bertlite.models.base import BertModel, BertPreTrainedModel
from bertlite.runtime.library import INSTRUCTION_SETS, NativeKernelsError, load_kernels, measured_once, processor_flags
from bertlite.runtime.self_test import shortest_seconds
from bertlite.runtime.structs import Kernels
from bertlite.support.environment import cpu_name

RECORDED = frozenset({"avx512_bf16"})  # processors with these best sets are in scripts/results/speed.json
TOKENS = 64


def require_kernels(model: BertPreTrainedModel, reproducible: bool) -> Kernels:
    """Return the kernels, or raise.

    Args:
        reproducible: as for `load_kernels`.

    Raises:
        ValueError: they cannot run this model.
        NativeKernelsError: they are not available on this machine.
    """
    missing = missing_for_native(model)
    if missing is not None:
        raise ValueError(f"the native kernels cannot run this model: {missing}; use 'auto' in float32 or bfloat16")
    return load_kernels(reproducible=reproducible)


def kernels_if_faster(model: BertPreTrainedModel, dtype: ComputeDtype) -> Kernels | None:
    """Return the kernels if they run this model faster than torch's operators; otherwise None, with one warning.

    A compiler that failed in this process is run again only with other settings.  On a GPU there is no warning.
    """
    if model.device.type != "cpu":
        return None
    reason = missing_for_native(model)
    if reason is None:
        try:
            kernels = load_kernels(retry=False)
        except NativeKernelsError as error:
            reason = str(error)
        else:
            if kernels_are_faster(kernels, dtype):
                return kernels
            reason = f"they are slower on this processor in {dtype}; backend='native' uses them nevertheless"
    warn_once(f"optimize_for_inference returns a copy of the plain model, without the native kernels: {reason}")
    return None


@cache
def warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=5)


def kernels_are_faster(kernels: Kernels, dtype: ComputeDtype) -> bool:
    """Return whether the kernels run a layer at least as fast as torch's operators do, with torch's threads."""
    best = next(name for name, each in INSTRUCTION_SETS.items() if each.needs <= processor_flags())
    if best in RECORDED and Path(kernels.path).name.startswith(f"{best}-"):
        return True
    seconds = seconds_of_layer(kernels, dtype, torch.get_num_threads())
    return seconds["native"] <= seconds["plain"]


@cache
def seconds_of_layer(kernels: Kernels, dtype: ComputeDtype, threads: int) -> dict[str, float]:
    """Return the times of one layer in the kernels and in the plain model.

    They are measured once for each processor, torch, dtype and number of threads, and for each version of the kernels.
    """
    key = {
        "kernels": Path(kernels.path).name,
        "processor": cpu_name(),
        "torch": torch.__version__,
        "dtype": dtype_name(dtype),
        "threads": threads,
    }
    return measured_once(key, ("native", "plain"), lambda: measure(kernels, dtype))


def measure(kernels: Kernels, dtype: ComputeDtype) -> dict[str, float]:
    """Return the shortest times of one layer in the kernels and in the plain model, which take turns."""
    config = BertConfig(
        vocab_size=TOKENS, hidden_size=384, num_attention_heads=6, intermediate_size=1536, num_hidden_layers=1,
        max_position_embeddings=TOKENS,
    )  # fmt: skip
    with torch.random.fork_rng([]), torch.device("cpu"):  # the caller's random numbers and device stay as they were
        model = BertModel(config, add_pooling_layer=False).eval().float()
    candidates = {"native": native_copy(model, dtype, kernels), "plain": plain_copy(model, dtype)}
    ids = torch.arange(TOKENS, device="cpu")[None]
    return shortest_seconds({name: partial(candidate, ids) for name, candidate in candidates.items()})
