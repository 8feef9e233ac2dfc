"""Write a model as an ONNX file, and run the file.  The extra `onnx` installs what this needs.

Shapes:  B sequences · S positions · D hidden
"""

import copy
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from bertlite.config import kept_heads, kept_neurons
from bertlite.models.base import BertPreTrainedModel
from bertlite.models.heads import BertForMultipleChoice

Forward: TypeAlias = Callable[[Mapping[str, Tensor]], list[Tensor]]  # inputs by name -> outputs in order
FILE = Path("onnx", "model.onnx")  # sentence-transformers and optimum look for it there
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
PROTOBUF_LIMIT = 2**31  # the most bytes of one ONNX file
HEADROOM = 2**26  # bytes kept for the graph itself
INPUTS = ("input_ids", "attention_mask", "token_type_ids")
CHOICES = 3  # choices in a sample of multiple choice


class OnlyBias(nn.Module):
    """The attention of a layer without heads, or the output of one without neurons: a bias, then add and normalise."""

    def __init__(self, output: Any, attention: Any = None) -> None:
        super().__init__()
        self.bias, self.LayerNorm, self.is_attention = output.dense.bias, output.LayerNorm, attention is not None
        vars(self).update(self=attention)  # no child, whose matrices are empty: an encoder reads its angles

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:  # (B, S, D) -> (B, S, D)
        out = hidden_states + self.bias
        out = out if self.LayerNorm is None else self.LayerNorm(out)
        return (out, None) if self.is_attention else out


class Graph(nn.Module):
    """A model in float32 and eval mode whose forward takes INPUTS and returns its outputs in order.

    Args:
        model: one of bertlite's; it is copied.

    Raises:
        ValueError: the model has cross-attention, which needs more inputs.
    """

    def __init__(self, model: BertPreTrainedModel) -> None:
        super().__init__()
        if model.config.add_cross_attention:
            raise ValueError("a model with cross-attention cannot be exported: it needs an encoder's output as input")
        self.model: Any = copy.deepcopy(model).float().eval()
        self.longest = int(model.config.max_position_embeddings)  # the most tokens that a sequence may have
        choices = ("choices",) if isinstance(model, BertForMultipleChoice) else ()
        self.axes = ("batch", *choices, "length")  # the axes of each input

        self.options = {"output_attentions": False, "output_hidden_states": False}  # whatever the config says
        self.options |= {"use_cache": False} if model.config.is_decoder else {}
        layer: Any
        for number, layer in enumerate(self.model.base_model.encoder.layer):
            if not kept_heads(model.config, number):  # ONNX cannot express an empty matrix
                layer.attention = OnlyBias(layer.attention.output, layer.attention.self)
            if not kept_neurons(model.config, number):
                layer.intermediate, layer.output = nn.Identity(), OnlyBias(layer.output)
        self.outputs = tuple(self.model(**self.sample(2, 2), return_dict=True, **self.options))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.model(input_ids, attention_mask, token_type_ids, return_dict=False, **self.options))

    def sample(self, batch: int, length: int, seed: int = 0) -> dict[str, Tensor]:
        """Return random tokens with padding: the second sequence ends halfway, the third is all padding."""
        draw = torch.Generator().manual_seed(seed)
        sizes, config = {"batch": batch, "choices": CHOICES, "length": length}, self.model.config
        shape = [sizes[axis] for axis in self.axes]
        mask = torch.ones(shape, dtype=torch.long, device="cpu")
        mask[1:2, ..., (length + 1) // 2 :] = 0
        mask[2:3] = 0
        return {
            "input_ids": torch.randint(config.vocab_size, shape, generator=draw, device="cpu"),
            "attention_mask": mask,
            "token_type_ids": torch.randint(config.type_vocab_size, shape, generator=draw, device="cpu"),
        }


@contextmanager
def quiet() -> Iterator[None]:
    """Silence exporters' warnings about values that are read while tracing; the comparison finds real faults."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        log.setLevel(level)


def write_onnx(graph: Graph, path: Path) -> None:
    """Write an ONNX file by torch.export; graphs of the older exporter (dynamo=False) compute wrong outputs."""
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass

    sizes = {"length": torch.export.Dim("length", min=1, max=graph.longest)}
    axes = {i: sizes.get(name) or torch.export.Dim(name, min=1) for i, name in enumerate(graph.axes)}

    with quiet():
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

        # The code location of each node names folders of this machine.
        assert program is not None
        ClearMetadataAndDocStringPass()(program.model)

        # One file holds up to 2 GB; larger weights lie next to it.
        size = sum(x.nbytes for x in graph.state_dict().values())
        program.save(path, external_data=size > PROTOBUF_LIMIT - HEADROOM)


def load_onnx(path: Path) -> Forward:
    """Return the function that runs the file on the CPU with onnxruntime."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(inputs: Mapping[str, Tensor]) -> list[Tensor]:
        return [torch.from_numpy(x) for x in session.run(None, {name: x.numpy() for name, x in inputs.items()})]

    return run
