"""ONNX and OpenVINO IR: write a graph, and run it.

Both libraries are optional: the extras `onnx` and `openvino` install them.
"""

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from bertlite.extras import install_hint
from bertlite.shipping.graphs import INPUTS, Graph

Forward: TypeAlias = Callable[[Mapping[str, Tensor]], list[Tensor]]  # inputs by name -> outputs in order
PROTOBUF_LIMIT = 2**31  # bytes that one ONNX file may have
HEADROOM = 2**26  # bytes kept for the graph itself


@dataclass(frozen=True)
class Format:
    """A file format of graphs.

    Args:
        file: path of the graph in a folder, where sentence-transformers and optimum look for it.
        extra: of bertlite, which installs the packages.
        packages: modules that it needs.
        write: (graph, path) writes the file.
        load: path -> the function that runs it on the CPU.
    """

    name: str
    file: str
    packages: tuple[str, ...]
    write: Callable[[Graph, Path], None]
    load: Callable[[Path], Forward]

    def require(self) -> None:
        """Raise ModuleNotFoundError if a package is not installed."""
        missing = [name for name in self.packages if find_spec(name) is None]
        if missing:
            raise ModuleNotFoundError(f"--format {self.name} needs {', '.join(missing)}: {install_hint(self.name)}")


@contextmanager
def quiet() -> Iterator[None]:
    """Silence exporters' warnings of values that are read while tracing; the comparison finds real faults."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def write_onnx(graph: Graph, path: Path) -> None:
    """Write an ONNX file by torch.export; graphs of the older exporter (dynamo=False) compute wrong outputs."""
    sizes = {"length": torch.export.Dim("length", min=1, max=graph.longest)}
    axes = {i: sizes.get(name) or torch.export.Dim(name, min=1) for i, name in enumerate(graph.axes)}
    with quiet(), torch.no_grad():
        program = torch.onnx.export(
            graph,
            (),
            kwargs=graph.sample(2, min(7, graph.longest)),
            input_names=list(INPUTS),
            output_names=list(graph.outputs),
            dynamic_shapes=dict.fromkeys(INPUTS, axes),
            dynamo=True,
            verbose=False,
        )
        assert program is not None
        drop_traces_(program.model)
        size = sum(x.nbytes for x in graph.state_dict().values())
        program.save(path, external_data=size > PROTOBUF_LIMIT - HEADROOM)


def drop_traces_(model: Any) -> None:
    """Remove from an onnx_ir model the lines of code that each node comes from, which name folders of this machine."""
    for part in (model.graph, *model.functions.values()):
        part.metadata_props.clear()
        for node in part.all_nodes():
            node.metadata_props.clear()
            node.doc_string = None
            for value in node.outputs:
                value.metadata_props.clear()
    model.metadata_props.clear()


def load_onnx(path: Path) -> Forward:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(inputs: Mapping[str, Tensor]) -> list[Tensor]:
        return [torch.from_numpy(x) for x in session.run(None, {name: x.numpy() for name, x in inputs.items()})]

    return run


def write_openvino(graph: Graph, path: Path) -> None:
    """Write OpenVINO IR, an .xml file with its .bin."""
    import openvino

    with quiet(), torch.no_grad():
        model = openvino.convert_model(graph, example_input=graph.sample(2, min(7, graph.longest)))
    for given, name in zip(model.inputs, INPUTS, strict=True):
        given.get_tensor().set_names({name})
    for out, name in zip(model.outputs, graph.outputs, strict=True):
        out.get_tensor().set_names({name})
    openvino.save_model(model, path, compress_to_fp16=False)


def load_openvino(path: Path) -> Forward:
    import openvino

    settings = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "INFERENCE_PRECISION_HINT": "f32"}
    model = openvino.Core().compile_model(path, "CPU", settings)
    names = [out.get_any_name() for out in model.outputs]

    def run(inputs: Mapping[str, Tensor]) -> list[Tensor]:
        found = model({name: x.numpy() for name, x in inputs.items()})
        return [torch.from_numpy(found[name].copy()) for name in names]

    return run


FORMATS = {
    each.name: each
    for each in (
        Format("onnx", "onnx/model.onnx", ("onnx", "onnxscript", "onnxruntime"), write_onnx, load_onnx),
        Format("openvino", "openvino/openvino_model.xml", ("openvino",), write_openvino, load_openvino),
    )
}


def find_format(name: str) -> Format:
    """Return the format of this name; raise ValueError if there is none."""
    if name not in FORMATS:
        raise ValueError(f"there is no format {name!r}; have: {', '.join(FORMATS)}")
    return FORMATS[name]
