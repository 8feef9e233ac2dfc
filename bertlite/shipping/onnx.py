"""The ONNX file of a graph: write it, and run it.  The extra `onnx` installs what this needs."""

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from bertlite.shipping.graphs import INPUTS, Graph
from bertlite.support.extras import install_hint

Forward: TypeAlias = Callable[[Mapping[str, Tensor]], list[Tensor]]  # inputs by name -> outputs in order
FILE = Path("onnx", "model.onnx")  # in a folder, where sentence-transformers and optimum look for it
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
PROTOBUF_LIMIT = 2**31  # bytes that one ONNX file may have
HEADROOM = 2**26  # bytes kept for the graph itself


def require_packages() -> None:
    """Raise ModuleNotFoundError if a package is not installed."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(f"the export needs {', '.join(missing)}: {install_hint('onnx')}")


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
    """Return the function that runs the file on the CPU with onnxruntime."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(inputs: Mapping[str, Tensor]) -> list[Tensor]:
        return [torch.from_numpy(x) for x in session.run(None, {name: x.numpy() for name, x in inputs.items()})]

    return run
