"""Export a checkpoint as a graph, which is compared with the model before it is kept.

A graph is kept if rms(graph - truth) <= FACTOR · rms(torch - truth) + eps · max |truth|.  Here torch is the model in
float32, truth the model in float64, and eps float32's.  Other kernels sum in another order, so their rounding errors
differ from torch's but have the same size.  The errors of a wrong graph are thousands of times larger.
"""

import copy
import re
import time
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from bertlite.checkpoint.files import Folder
from bertlite.checkpoint.folders import carry, check_output, replacing
from bertlite.checkpoint.saving import write_sorted_json
from bertlite.models.base import BertPreTrainedModel
from bertlite.opened.checkpoint import Checkpoint
from bertlite.parity.compare import distance, largest, rms_distance
from bertlite.shipping.carried import carry_modules, carry_tokenizer
from bertlite.shipping.onnx import FILE, PACKAGES, Graph, load_onnx, write_onnx
from bertlite.support.contexts import own_context
from bertlite.support.extras import import_optional
from bertlite.support.files import read_json_object, sha256_of, write_json
from bertlite.support.process import door
from bertlite.support.progress import Progress

RECORD = "export.json"
WHAT = "bertlite export"  # begins the record
GRAPH = re.compile(re.escape(FILE.stem) + r"\..*")  # files of a graph
FACTOR = 10.0  # 1.6 was found for a model of 6 layers
SHAPES = ((1, 1), (2, 11), (4, 5), (3, 128))  # sequences x tokens, if the model has so many positions


@door
@own_context()
def export(checkpoint: str | PathLike[str], folder: str | PathLike[str], *, progress: bool = False) -> dict[str, Any]:
    """Write a checkpoint as ONNX, for batches and lengths of any size, in float32.

    The folder gets onnx/model.onnx, config.json, the tokenizer, sentence-transformers' modules and export.json, so
    that optimum and sentence-transformers load it.  If the folder is the checkpoint's own, it gets only the graph and
    export.json.

    Args:
        checkpoint: a folder or a hub id.
        progress: show the current step.

    Returns:
        The record: the class, the names of inputs and outputs, and results for each shape and output.  These are the
        largest difference between graph and model, the root mean square of the error, and the allowed one.

    Raises:
        ModuleNotFoundError: a package of the extra `onnx` is not installed.
        FileExistsError: the folder holds neither this checkpoint nor an export of it.
        ValueError: the graph computes other outputs than the model, and then nothing is written; or the
            checkpoint cannot be read, or another program wrote the folder's graph.
    """
    source, out = Checkpoint.of(checkpoint), Path(folder).expanduser()
    for package in PACKAGES:
        import_optional(package, "the export", "onnx")

    # An export is written again only for the same weights, whose hash is in its record.
    files = source.files
    hashes = sha256_of(files.config, *(sorted(files.shards) or [files.weights]))
    in_place = check_target(source, out, hashes)
    model = source.load(source.model_class, dtype=torch.float32)
    graph = Graph(model)

    # Only a graph that agrees with the model is kept: an error leaves the folder as it was.
    with (
        Progress(None, "", what="export", shown=progress) as bar,
        replacing(out, superseded=re.compile(FILE.parts[0])) as new,
    ):
        target = new / FILE
        target.parent.mkdir(parents=True)
        bar.stage(f"writing {FILE}")
        started = time.perf_counter()
        write_onnx(graph, target)
        seconds = time.perf_counter() - started

        bar.stage("comparing the graph with the model")
        shapes = list(graph_differences(graph, target))
        check_differences(shapes)

        record = {
            "what": WHAT,
            "sha256": hashes,
            "class": type(model).__name__,
            "inputs": [*graph.sample(1, 1)],
            "outputs": list(graph.outputs),
            "axes": list(graph.axes),
            "bytes": sum(path.stat().st_size for path in target.parent.iterdir()),
            "seconds": round(seconds, 1),
            "shapes": shapes,
        }
        write_json(new / RECORD, record)

        # A new folder needs the files of the checkpoint, which the checkpoint's own folder has.
        if not in_place:
            write_beside(source, new, model)
        if (out / target.parent.name).is_dir():  # such as quantised graphs
            carry(out / target.parent.name, target.parent, GRAPH)
    return record


def summary_lines(record: Mapping[str, Any], out: Mapping[str, Path]) -> Iterator[str]:
    """Yield the file and the errors of the graph, in words."""
    rows = [row for shape in record["shapes"] for row in shape["outputs"].values()]
    worst = max(rows, key=lambda row: row["error"] / row["allowed"])
    largest = max(row["difference"] for row in rows)
    yield f"{out['FOLDER'] / FILE}: {record['class']}, {record['bytes'] / 1e6:.1f} MB"
    yield f"  largest difference from the model at {len(record['shapes'])} shapes: {largest:.1e}"
    yield f"  error: {worst['error']:.1e} (torch's own {worst['torch']:.1e}, allowed {worst['allowed']:.1e})"


def check_target(source: Checkpoint, folder: Path, sha256: str) -> bool:
    """Return whether a folder is the checkpoint's own.

    Raises:
        FileExistsError: it is neither empty, nor the checkpoint's, nor an export of the checkpoint.
        ValueError: another program wrote its graph, or the checkpoint is next to the graph.
    """
    place, record = source.place, folder / RECORD
    own = record.is_file() and read_json_object(record).get("what") == WHAT
    check_output(folder, re.compile(re.escape(RECORD)), own=own)
    check_output(folder / FILE.parent, GRAPH, source, own=own)
    if isinstance(place, Folder) and folder.exists() and folder.samefile(place.path):
        return True
    is_new = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    if is_new or (own and read_json_object(record).get("sha256") == sha256):
        return False
    raise FileExistsError(f"{folder} does not hold an export of this checkpoint: name another folder")


def write_beside(source: Checkpoint, folder: Path, model: BertPreTrainedModel) -> None:
    """Write the files that loaders need with a graph: config.json, the tokenizer, sentence-transformers' modules."""
    config = {**model.config.to_dict(), "architectures": [type(model).__name__], "dtype": "float32"}
    config = {name: value for name, value in config.items() if name not in ("auto_map", "torch_dtype")}
    write_sorted_json(folder / "config.json", config)
    carry_tokenizer(source.tokenizer, folder, model.config)
    carry_modules(source, folder, type(model))


def graph_differences(graph: Graph, path: Path) -> Iterator[dict[str, Any]]:
    """Run a written graph and the model on batches of several shapes, and yield the differences of each."""
    run, truth = load_onnx(path), copy.deepcopy(graph).double()
    for number, (batch, tokens) in enumerate(SHAPES):
        length = min(tokens, graph.longest)
        inputs = graph.sample(batch, length, seed=number)
        ours, theirs, exact = run(inputs), graph(**inputs), truth(**inputs)

        # The graph may be as wrong as torch in float32, times a factor: both are measured against float64.
        rows = {}
        for name, a, b, c in zip(graph.outputs, ours, theirs, exact, strict=True):
            error, torchs = rms_distance(a, c), rms_distance(b, c)
            allowed = FACTOR * torchs + torch.finfo(b.dtype).eps * largest(c)
            rows[name] = {
                "difference": distance(a, b),
                "error": error,
                "torch": torchs,
                "allowed": allowed,
                "ok": error <= allowed,  # False for nan
            }
        yield {"batch": batch, "length": length, "outputs": rows}


def check_differences(shapes: list[dict[str, Any]]) -> None:
    """Raise ValueError for a graph whose errors exceed those allowed; name outputs, shapes and figures."""
    wrong = [
        f"{name} at {shape['batch']}x{shape['length']}: error {row['error']:.1e}, allowed {row['allowed']:.1e},"
        f" largest difference {row['difference']:.1e}"
        for shape in shapes
        for name, row in shape["outputs"].items()
        if not row["ok"]
    ]
    if wrong:
        raise ValueError(f"the graph computes other outputs than the model and was not kept: {'; '.join(wrong)}")
