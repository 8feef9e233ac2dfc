"""What runs a batch: each engine, from a checkpoint to a function of input_ids and attention_mask.

Ours and transformers' run here; onnxruntime and OpenVINO run what is exported once and kept beside the checkpoint.
"""

import importlib.util
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import bertlite

Run = Callable[[Mapping[str, Tensor]], Any]
FLOATS = ("float32", "bfloat16")


@dataclass(frozen=True)
class Engine:
    """One way to run BERT.

    Args:
        build: (folder of the checkpoint, dtype, device) -> what runs a batch.
        needs: the packages without which it cannot be built.
    """

    name: str
    build: Callable[[Path, str, str], Run]
    dtypes: tuple[str, ...]
    needs: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("cpu", "cuda")

    def missing(self, device: str) -> str | None:
        """Why it cannot run here; None if it can."""
        absent = [name for name in self.needs if importlib.util.find_spec(name) is None]
        if absent:
            return f"not installed: {', '.join(absent)}"
        if torch.device(device).type not in self.devices:
            return f"runs on {' and '.join(self.devices)} only"
        return None


def ours(attention: str, optimised: bool = False) -> Callable[[Path, str, str], Run]:
    def build(folder: Path, dtype: str, device: str) -> Run:
        held = "float32" if dtype == "int8" else dtype
        model = bertlite.BertModel.from_pretrained(
            folder, dtype=getattr(torch, held), device=device, attn_implementation=attention
        )
        return run(bertlite.optimize_for_inference(model, getattr(torch, dtype)) if optimised else model)

    return build


def run(model: Callable[..., Any]) -> Run:
    def forward(batch: Mapping[str, Tensor]) -> Any:
        with torch.no_grad():
            return model(**batch)

    return forward


def states(out: Any) -> Tensor:
    """The last hidden states, (B, S, D), in float32 on the CPU, of what any of the engines returns."""
    found = out.last_hidden_state if hasattr(out, "last_hidden_state") else torch.as_tensor(out[0])
    return found.float().cpu()


def transformers(attention: str, compiled: bool = False) -> Callable[[Path, str, str], Run]:
    def build(folder: Path, dtype: str, device: str) -> Run:
        from bertlite.parity import reference

        model = reference.load(folder, "BertModel", {}, getattr(torch, dtype), attention, device)
        return run(torch.compile(model) if compiled else model)

    return build


class Flat(torch.nn.Module):
    """transformers' model as exporters want it: tensors in, tensors out."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        out = self.model(input_ids=input_ids, attention_mask=attention_mask)
        return out.last_hidden_state, out.pooler_output


def exported(folder: Path, name: str, write: Callable[[Path], Any]) -> Path:
    """A file beside the checkpoint, written once."""
    path = folder / name
    if not path.exists():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            write(path.with_name(f"new-{name}"))
        for part in folder.glob(f"new-{path.stem}.*"):  # OpenVINO writes two
            part.rename(part.with_name(part.name.removeprefix("new-")))
    return path


def sample() -> dict[str, Tensor]:
    ids = torch.randint(1, 1000, (2, 24), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def onnxruntime(folder: Path, dtype: str, device: str) -> Run:
    """With its own optimizer of BERT graphs, and for int8 its dynamic quantisation, a scale per channel."""
    import onnxruntime as ort
    from onnxruntime.quantization import quantize_dynamic
    from onnxruntime.transformers import optimizer

    from bertlite.parity import reference

    def write(path: Path) -> None:
        model = Flat(reference.load(folder, "BertModel", {}, torch.float32, "eager", "cpu"))
        axes = {name: {0: "batch", 1: "length"} for name in sample()}
        outputs = ["last_hidden_state", "pooler_output"]
        torch.onnx.export(
            model, tuple(sample().values()), path, input_names=list(axes), output_names=outputs,
            dynamic_axes=axes, opset_version=17, dynamo=False,
        )  # fmt: skip  # the optimizer knows the patterns of this exporter

    def optimise(path: Path) -> None:
        plain = exported(folder, "plain.onnx", write)
        config = bertlite.BertConfig.from_json_file(folder / "config.json")
        graph = optimizer.optimize_model(
            str(plain), "bert", num_heads=config.num_attention_heads, hidden_size=config.hidden_size, opt_level=0
        )
        if not graph.get_fused_operator_statistics()["Attention"]:
            raise RuntimeError("onnxruntime's optimizer found no attention to fuse; its time would mean nothing")
        graph.save_model_to_file(str(path))

    def quantise(path: Path) -> None:
        source = exported(folder, "optimised.onnx", optimise)
        floats = {"DefaultTensorType": 1}  # onnx.TensorProto.FLOAT; it cannot tell behind its own fused operators
        quantize_dynamic(source, path, per_channel=True, extra_options=floats)

    path = exported(folder, *(("int8.onnx", quantise) if dtype == "int8" else ("optimised.onnx", optimise)))
    options = ort.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    kinds = {each.name: "int32" if "int32" in each.type else "int64" for each in session.get_inputs()}
    return lambda batch: session.run(None, {name: batch[name].numpy().astype(kind) for name, kind in kinds.items()})


def openvino(folder: Path, dtype: str, device: str) -> Run:
    """For int8 with nncf's quantisation of transformers, calibrated on random words; its scales are fixed."""
    import openvino as ov

    from bertlite.parity import reference

    def write(path: Path) -> None:
        model = reference.load(folder, "BertModel", {}, torch.float32, "sdpa", "cpu")
        ov.save_model(ov.convert_model(model, example_input=sample()), path, compress_to_fp16=False)

    def quantise(path: Path) -> None:
        import nncf

        data = [{name: x.numpy() for name, x in sample().items()}]
        model = ov.Core().read_model(exported(folder, "openvino.xml", write))
        kind = nncf.ModelType.TRANSFORMER
        ov.save_model(nncf.quantize(model, nncf.Dataset(data), model_type=kind, subset_size=1), path)

    path = exported(folder, *(("openvino8.xml", quantise) if dtype == "int8" else ("openvino.xml", write)))
    precision = "f32" if dtype == "float32" else "bf16"
    settings = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "INFERENCE_PRECISION_HINT": precision,
    }
    request = ov.Core().compile_model(path, "CPU", settings).create_infer_request()
    return lambda batch: request.infer({name: x.numpy() for name, x in batch.items()}, share_inputs=True)


ENGINES = (
    Engine("transformers sdpa", transformers("sdpa"), FLOATS, ("transformers",)),  # first: others are compared with it
    Engine("transformers eager", transformers("eager"), ("float32",), ("transformers",)),
    Engine("transformers compiled", transformers("sdpa", compiled=True), FLOATS, ("transformers",)),
    Engine(
        "transformers flash_attention_2",
        transformers("flash_attention_2"),
        ("bfloat16",),
        ("transformers", "flash_attn"),
        ("cuda",),
    ),
    Engine("onnxruntime", onnxruntime, ("float32", "int8"), ("transformers", "onnx", "onnxruntime"), ("cpu",)),
    Engine("OpenVINO", openvino, FLOATS, ("transformers", "openvino"), ("cpu",)),
    Engine("OpenVINO", openvino, ("int8",), ("transformers", "openvino", "nncf"), ("cpu",)),
    Engine("bertlite sdpa", ours("sdpa"), FLOATS),
    Engine("bertlite packed", ours("packed"), FLOATS),
    Engine("bertlite optimised", ours("sdpa", optimised=True), (*FLOATS, "int8")),
    Engine("bertlite optimised packed", ours("packed", optimised=True), (*FLOATS, "int8")),
)
