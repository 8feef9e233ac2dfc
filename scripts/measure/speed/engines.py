"""The engines that run a batch: each makes a checkpoint a function of input_ids and attention_mask.

Peers that run files have them exported once from transformers' model, and kept next to the checkpoint.  Each engine
takes the number of threads that torch has when it is built.
"""

import importlib.util
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import bertlite
from bertlite.opened.checkpoint import Checkpoint
from bertlite.parity import reference
from scripts.measure.speed.accuracy import Forward

FLOATS = ("float32", "bfloat16")
ALL = (*FLOATS, "int8")
SHAPES = 64  # the most that torch.compile keeps of a model
LLAMA_TOKENS = 512  # of a call of llama.cpp at most: its default, and its fastest with texts of every length


@dataclass(frozen=True)
class Engine:
    """One way to run BERT.

    Args:
        build: (folder of the checkpoint, dtype, device) -> function that runs a batch.
        needs: packages that it imports.
    """

    name: str
    build: Callable[[Path, str, str], Forward]
    dtypes: tuple[str, ...]
    needs: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("cpu", "cuda")

    def reason_missing(self, device: str) -> str | None:
        """Return the reason why it cannot run on a device here; None if it can be built."""
        absent = [name for name in self.needs if importlib.util.find_spec(name) is None]
        if absent:
            return f"not installed: {', '.join(absent)}"
        if torch.device(device).type not in self.devices:
            return f"runs on {' and '.join(self.devices)} only"
        return None


def bertlite_engine(attention: str, backend: str | None = None) -> Callable[[Path, str, str], Forward]:
    """Return the builder of a bertlite engine: the model itself, or optimised with a backend."""

    def build(folder: Path, dtype: str, device: str) -> Forward:
        loaded = "float32" if dtype == "int8" else dtype
        model = bertlite.BertModel.from_pretrained(
            folder, dtype=getattr(torch, loaded), device=device, attn_implementation=attention
        )
        if backend is None:
            return forward_of(model)
        return forward_of(bertlite.optimize_for_inference(model, dtype=getattr(torch, dtype), backend=backend))

    return build


def forward_of(model: Callable[..., Any]) -> Forward:
    """Return a function that runs a model without gradients."""

    def forward(batch: Mapping[str, Tensor]) -> Any:
        with torch.no_grad():
            return model(**batch)

    return forward


def transformers_engine(
    attention: str, compiled: bool = False, mode: str | None = None
) -> Callable[[Path, str, str], Forward]:
    """Return the builder of an engine of transformers; `mode` is of torch.compile.

    With a mode it is compiled for each shape, which is faster than for all.
    """

    def build(folder: Path, dtype: str, device: str) -> Forward:
        model = reference.load(folder, "BertModel", {}, getattr(torch, dtype), attention, device)
        torch._dynamo.config.recompile_limit = SHAPES  # beyond it torch.compile runs the model as it is
        return forward_of(
            torch.compile(model, mode=mode, dynamic=None if mode is None else False) if compiled else model
        )

    return build


def autotuned_engine(folder: Path, dtype: str, device: str) -> Forward:
    """Build transformers' model by torch.compile's longest search, for each shape of a batch, with frozen weights.

    int8 is torchao's, dynamic.
    """
    loaded = torch.float32 if dtype == "int8" else getattr(torch, dtype)
    model = reference.load(folder, "BertModel", {}, loaded, "sdpa", device)
    if dtype == "int8":
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

        quantize_(model, Int8DynamicActivationInt8WeightConfig())
    torch._dynamo.config.recompile_limit = SHAPES
    return forward_of(torch.compile(model, dynamic=False, options={"max_autotune": True, "freezing": True}))


class Flat(torch.nn.Module):
    """transformers' model with the signature that exporters need: tensors in, tensors out."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        out = self.model(input_ids=input_ids, attention_mask=attention_mask, return_dict=False)
        return tuple(x for x in out[:2] if isinstance(x, Tensor))


def export_once(folder: Path, name: str, write: Callable[[Path], Any]) -> Path:
    """Write a file or a folder next to the checkpoint unless it is there, and return its path."""
    path = folder / name
    if not path.exists():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            write(path.with_name(f"new-{name}"))
        for part in folder.glob(f"new-{path.stem}*"):  # OpenVINO writes two files
            part.rename(part.with_name(part.name.removeprefix("new-")))
    return path


def sample_inputs() -> dict[str, Tensor]:
    """Return a small batch of random words, to trace or calibrate a model with."""
    ids = torch.randint(1, 1000, (2, 24), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def onnxruntime_engine(folder: Path, dtype: str, device: str) -> Forward:
    """Build onnxruntime with its optimizer of BERT graphs; int8 is its dynamic quantisation, a scale per channel."""
    import onnxruntime as ort
    from onnxruntime.quantization import quantize_dynamic
    from onnxruntime.transformers import optimizer

    def write(path: Path) -> None:
        model = Flat(reference.load(folder, "BertModel", {}, torch.float32, "eager", "cpu"))
        axes = {name: {0: "batch", 1: "length"} for name in sample_inputs()}
        outputs = ["last_hidden_state", "pooler_output"]
        torch.onnx.export(
            model, tuple(sample_inputs().values()), path, input_names=list(axes), output_names=outputs,
            dynamic_axes=axes, opset_version=17, dynamo=False,
        )  # fmt: skip  # the optimizer knows the patterns of this exporter

    def optimise(path: Path) -> None:
        plain = export_once(folder, "plain.onnx", write)
        config = Checkpoint.of(folder).config
        graph = optimizer.optimize_model(
            str(plain), "bert", num_heads=config.num_attention_heads, hidden_size=config.hidden_size, opt_level=0
        )
        if not graph.get_fused_operator_statistics()["Attention"]:
            raise RuntimeError("onnxruntime's optimizer found no attention to fuse; its time would be meaningless")
        graph.save_model_to_file(str(path))

    def quantise(path: Path) -> None:
        source = export_once(folder, "optimised.onnx", optimise)
        floats = {"DefaultTensorType": 1}  # onnx.TensorProto.FLOAT; not inferred after its own fused operators
        quantize_dynamic(source, path, per_channel=True, extra_options=floats)

    path = export_once(folder, *(("int8.onnx", quantise) if dtype == "int8" else ("optimised.onnx", optimise)))
    options = ort.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    kinds = {each.name: "int32" if "int32" in each.type else "int64" for each in session.get_inputs()}
    return lambda batch: session.run(None, {name: batch[name].numpy().astype(kind) for name, kind in kinds.items()})


def openvino_engine(folder: Path, dtype: str, device: str) -> Forward:
    """Build OpenVINO; int8 is nncf's quantisation with fixed scales, calibrated on random words."""
    import openvino as ov

    def write(path: Path) -> None:
        relative = Checkpoint.of(folder).config.position_embedding_type == "disentangled"  # for which there is no sdpa
        model = reference.load(folder, "BertModel", {}, torch.float32, "eager" if relative else "sdpa", "cpu")
        ov.save_model(ov.convert_model(model, example_input=sample_inputs()), path, compress_to_fp16=False)

    def quantise(path: Path) -> None:
        import nncf

        data = [{name: x.numpy() for name, x in sample_inputs().items()}]
        model = ov.Core().read_model(export_once(folder, "openvino.xml", write))
        kind = nncf.ModelType.TRANSFORMER
        ov.save_model(nncf.quantize(model, nncf.Dataset(data), model_type=kind, subset_size=1), path)

    path = export_once(folder, *(("openvino8.xml", quantise) if dtype == "int8" else ("openvino.xml", write)))
    request = ov.Core().compile_model(path, "CPU", openvino_settings(dtype)).create_infer_request()
    return lambda batch: request.infer({name: x.numpy() for name, x in batch.items()}, share_inputs=True)


def openvino_settings(dtype: str) -> Mapping[str, Any]:
    """Return the settings of OpenVINO: torch's number of threads, and float32 computed in float32.

    On a processor with bfloat16, OpenVINO computes float32 in it unless told otherwise.  With AVX2 alone, everything
    except 8-bit products is float32 too.
    """
    wide = torch.backends.cpu.get_cpu_capability() != "AVX2"
    return {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "INFERENCE_PRECISION_HINT": "bf16" if dtype == "bfloat16" or (dtype == "int8" and wide) else "f32",
    }


def llama_engine(folder: Path, dtype: str, device: str) -> Forward:
    """Build llama.cpp, which gets texts without padding, several in a call; int8 is its q8_0.

    Its float32 is no engine, since it looks GELU up in a table of half precision: the error is 1.4e-4, with q8_0 6e-3.
    """
    import llama_cpp as llama

    logging.getLogger("llama-cpp-python").setLevel(logging.CRITICAL)
    path = export_once(folder, f"llama-{dtype}.gguf", partial(write_gguf, folder, dtype))
    model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
    settings = llama.llama_context_default_params()
    settings.n_threads = settings.n_threads_batch = torch.get_num_threads()
    settings.n_batch = settings.n_ubatch = LLAMA_TOKENS
    settings.n_seq_max = LLAMA_TOKENS // 2  # texts have [CLS] and [SEP]
    settings.embeddings, settings.pooling_type = True, llama.LLAMA_POOLING_TYPE_NONE
    context = llama.llama_init_from_model(model, settings)
    if not context:
        raise RuntimeError(f"llama.cpp does not load {path}")
    width, call = llama.llama_model_n_embd(model), llama.llama_batch_init(LLAMA_TOKENS, 0, 1)

    def run(ids: Any, real: Any, states: Any) -> None:
        texts, positions = real.nonzero()
        call.n_tokens = len(texts)
        rows = enumerate(zip(ids[real].tolist(), positions.tolist(), texts.tolist(), strict=True))
        for i, (call.token[i], call.pos[i], call.seq_id[i][0]) in rows:
            call.n_seq_id[i] = call.logits[i] = 1
        if status := llama.llama_encode(context, call):
            raise RuntimeError(f"llama_encode returned {status}")
        states[real] = np.ctypeslib.as_array(llama.llama_get_embeddings(context), (len(texts), width))

    def forward(batch: Mapping[str, Tensor]) -> tuple[Any]:
        ids, real = batch["input_ids"].numpy(), batch["attention_mask"].bool().numpy()
        states = np.zeros((*ids.shape, width), np.float32)
        for texts in slices_of(real.sum(1), LLAMA_TOKENS):
            run(ids[texts], real[texts], states[texts])
        return (states,)

    return forward


def slices_of(lengths: Sequence[int], most: int) -> Iterator[slice]:
    """Yield slices of texts that have at most so many tokens together."""
    first = total = 0
    for i, length in enumerate(lengths):
        if total and total + length > most:
            yield slice(first, i)
            first, total = i, 0
        total += length
    yield slice(first, len(lengths))


def write_gguf(folder: Path, dtype: str, path: Path) -> None:
    """Write a BERT as llama.cpp reads it, its matrices in a dtype, without a tokenizer.

    Raises:
        ValueError: it has positions that llama.cpp's BERT does not have.
    """
    import gguf

    config = Checkpoint.of(folder).config
    if config.position_embedding_type != "absolute" or config.positions_skip_padding:
        raise ValueError("llama.cpp's BERT has absolute positions only, counted over all tokens")
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(config.vocab_size)
    writer.add_token_type_count(config.type_vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_causal_attention(False)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, config.num_hidden_layers)
    kinds = gguf.GGMLQuantizationType
    weights = reference.load(folder, "BertModel", {}, torch.float32, "sdpa", "cpu").state_dict()
    for name, weight in weights.items():
        if name.startswith("pooler"):
            continue
        added = weight.ndim == 1 or "position" in name or "token_type" in name  # to states, which are in float32
        kind = kinds.F32 if added else {"bfloat16": kinds.BF16, "int8": kinds.Q8_0}[dtype]
        data = gguf.quantize(weight.numpy(), kind)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


ENGINES = (
    Engine("transformers sdpa", transformers_engine("sdpa"), FLOATS, ("transformers",)),  # the baseline
    Engine("transformers eager", transformers_engine("eager"), ("float32",), ("transformers",)),
    Engine("transformers compiled", transformers_engine("sdpa", compiled=True), FLOATS, ("transformers",)),
    Engine("transformers compiled max-autotune", autotuned_engine, FLOATS, ("transformers",), ("cpu",)),
    Engine("torchao compiled", autotuned_engine, ("int8",), ("transformers", "torchao"), ("cpu",)),
    Engine(
        "transformers reduce-overhead",
        transformers_engine("sdpa", compiled=True, mode="reduce-overhead"),
        FLOATS,
        ("transformers",),
        ("cuda",),
    ),
    Engine("onnxruntime", onnxruntime_engine, ("float32", "int8"), ("transformers", "onnx", "onnxruntime"), ("cpu",)),
    Engine("llama.cpp", llama_engine, ("bfloat16", "int8"), ("transformers", "gguf", "llama_cpp"), ("cpu",)),
    Engine("OpenVINO", openvino_engine, FLOATS, ("transformers", "openvino"), ("cpu",)),
    Engine("OpenVINO", openvino_engine, ("int8",), ("transformers", "openvino", "nncf"), ("cpu",)),
    Engine("bertlite sdpa", bertlite_engine("sdpa"), FLOATS),
    Engine("bertlite packed", bertlite_engine("packed"), FLOATS),
    Engine("bertlite native", bertlite_engine("auto", "native"), ALL, devices=("cpu",)),
    Engine("bertlite graphs", bertlite_engine("auto", "graphs"), FLOATS, devices=("cuda",)),
)
