"""The engines that run a batch: each makes a checkpoint a function of input_ids and attention_mask."""

import importlib.util
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import bertlite
from bertlite.bench.exported import (
    ctranslate2_engine,
    onnxruntime_engine,
    openvino_engine,
    reason_without_ctranslate2,
)
from bertlite.bench.work import Forward
from bertlite.inference import optimize
from bertlite.inference.linear import Int8Linear, PackedLinear
from bertlite.inference.support import missing_for_onednn

FLOATS = ("float32", "bfloat16")
ALL = (*FLOATS, "int8")
OWN_BACKENDS = {"cpu": ("onednn", "native"), "cuda": ("inductor",)}  # of optimize_for_inference, by device
ALWAYS_PACKED = ("native",)  # backends that leave padding out whatever the attention
SLOW = 20  # times as long as float32 that an 8-bit matmul may take


@dataclass(frozen=True)
class Engine:
    """One way to run BERT.

    Args:
        build: (folder of the checkpoint, dtype, device) -> function that runs a batch.
        needs: packages that it imports.
        reason_without: dtype -> the reason why it cannot compute in it here, None if it can; called if all packages
            are installed.
    """

    name: str
    build: Callable[[Path, str, str], Forward]
    dtypes: tuple[str, ...]
    needs: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("cpu", "cuda")
    reason_without: Callable[[str], str | None] = lambda dtype: None

    def reason_missing(self, device: str, dtype: str) -> str | None:
        """Return the reason why it cannot run here in a dtype; None if it can."""
        absent = [name for name in self.needs if importlib.util.find_spec(name) is None]
        if absent:
            return f"not installed: {', '.join(absent)}"
        if torch.device(device).type not in self.devices:
            return f"runs on {' and '.join(self.devices)} only"
        return self.reason_without(dtype)


def bertlite_engine(attention: str, backend: str | None = None) -> Callable[[Path, str, str], Forward]:
    """Return the builder of a bertlite engine: the model itself, or optimised with a backend."""

    def build(folder: Path, dtype: str, device: str) -> Forward:
        loaded = "float32" if dtype == "int8" else dtype
        model = bertlite.BertModel.from_pretrained(
            folder, dtype=getattr(torch, loaded), device=device, attn_implementation=attention
        )
        if backend is None:
            return forward_of(model)
        return forward_of(bertlite.optimize_for_inference(model, getattr(torch, dtype), backend))

    return build


def reason_without_backend(backend: str, dtype: str) -> str | None:
    """Return the reason why `optimize_for_inference` lacks a backend here, or a dtype in it; None if it has both."""
    if backend not in optimize.BACKENDS:
        return f"this version of bertlite has no backend {backend!r}"
    if backend != "onednn":
        return None
    missing = missing_for_onednn(getattr(torch, dtype))
    if missing:
        return f"torch {torch.__version__} has no {', '.join(missing)}"
    if dtype == "int8" and slowness_of_int8() > SLOW:
        return (
            f"torch's 8-bit matmul takes {slowness_of_int8():.0f} times as long as that of float32 on this processor"
        )
    return None


@cache
def slowness_of_int8() -> float:
    """Return the time of a small 8-bit matmul over that in float32, which is far above 1 if torch has no kernel."""
    x, weight = torch.randn(2, 256, 256)
    seconds = []
    for linear in (Int8Linear(weight, None), PackedLinear(weight, None)):
        linear(x)  # compiles the kernel
        start = time.perf_counter()
        linear(x)
        seconds.append(time.perf_counter() - start)
    return seconds[0] / seconds[1]


def forward_of(model: Callable[..., Any]) -> Forward:
    """Return a function that runs a model without gradients."""

    def forward(batch: Mapping[str, Tensor]) -> Any:
        with torch.no_grad():
            return model(**batch)

    return forward


def transformers_engine(attention: str, compiled: bool = False) -> Callable[[Path, str, str], Forward]:
    """Return the builder of an engine of transformers."""

    def build(folder: Path, dtype: str, device: str) -> Forward:
        from bertlite.parity import reference

        model = reference.load(folder, "BertModel", {}, getattr(torch, dtype), attention, device)
        return forward_of(torch.compile(model) if compiled else model)

    return build


ENGINES = (
    Engine(
        "transformers sdpa", transformers_engine("sdpa"), FLOATS, ("transformers",)
    ),  # first: others are compared with it
    Engine("transformers eager", transformers_engine("eager"), ("float32",), ("transformers",)),
    Engine("transformers compiled", transformers_engine("sdpa", compiled=True), FLOATS, ("transformers",)),
    Engine(
        "transformers flash_attention_2",
        transformers_engine("flash_attention_2"),
        ("bfloat16",),
        ("transformers", "flash_attn"),
        ("cuda",),
    ),
    Engine("onnxruntime", onnxruntime_engine, ("float32", "int8"), ("transformers", "onnx", "onnxruntime"), ("cpu",)),
    Engine(
        "CTranslate2", ctranslate2_engine, ALL, ("transformers", "ctranslate2"), ("cpu",), reason_without_ctranslate2
    ),
    Engine("OpenVINO", openvino_engine, FLOATS, ("transformers", "openvino"), ("cpu",)),
    Engine("OpenVINO", openvino_engine, ("int8",), ("transformers", "openvino", "nncf"), ("cpu",)),
    Engine("bertlite sdpa", bertlite_engine("sdpa"), FLOATS),
    Engine("bertlite packed", bertlite_engine("packed"), FLOATS),
    *(
        Engine(
            f"bertlite {backend}{' packed' * (attention == 'packed')}",
            bertlite_engine(attention, backend),
            ALL if device == "cpu" else FLOATS,
            (),
            (device,),
            partial(reason_without_backend, backend),
        )
        for device, backends in OWN_BACKENDS.items()
        for backend in backends
        for attention in (("sdpa",) if backend in ALWAYS_PACKED else ("sdpa", "packed"))
    ),
)
