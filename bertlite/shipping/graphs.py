"""Models for exporters: tensors in, a tuple of tensors out, and no empty matrices.

Shapes:  B sequences · S positions · D hidden
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from bertlite.config import kept_heads, kept_neurons
from bertlite.models.base import BertPreTrainedModel
from bertlite.models.heads import BertForMultipleChoice

INPUTS = ("input_ids", "attention_mask", "token_type_ids")
CHOICES = 3  # in a sample of multiple choice


class OnlyBias(nn.Module):
    """The attention of a layer without heads, or the output of one without neurons: a bias, then add and normalise."""

    def __init__(self, output: Any, is_attention: bool) -> None:
        super().__init__()
        self.bias, self.LayerNorm, self.is_attention = output.dense.bias, output.LayerNorm, is_attention

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:  # (B, S, D) -> (B, S, D)
        out = self.LayerNorm(hidden_states + self.bias)
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
        self.choices = isinstance(model, BertForMultipleChoice)
        self.options = {"output_attentions": False, "output_hidden_states": False}  # whatever the config says
        self.options |= {"use_cache": False} if model.config.is_decoder else {}
        layer: Any
        for number, layer in enumerate(self.model.base_model.encoder.layer):
            if not kept_heads(model.config, number):  # ONNX cannot express an empty matrix
                layer.attention = OnlyBias(layer.attention.output, is_attention=True)
            if not kept_neurons(model.config, number):
                layer.intermediate, layer.output = nn.Identity(), OnlyBias(layer.output, is_attention=False)
        with torch.inference_mode():
            self.outputs = tuple(self.model(**self.sample(2, 2), return_dict=True, **self.options))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> tuple[Tensor, ...]:
        out = self.model(input_ids, attention_mask, token_type_ids, return_dict=False, **self.options)
        return tuple(out)

    def double_copy(self) -> "Graph":
        """Return the same graph in float64."""
        return copy.deepcopy(self).double()

    @property
    def longest(self) -> int:
        """The most tokens that a sequence may have."""
        return int(self.model.config.max_position_embeddings)

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the axes of each input."""
        return ("batch", "choices", "length") if self.choices else ("batch", "length")

    def sample(self, batch: int, length: int, seed: int = 0) -> dict[str, Tensor]:
        """Return random tokens with padding: the second sequence ends halfway, the third is all padding."""
        draw = torch.Generator().manual_seed(seed)
        shape = (batch, CHOICES, length) if self.choices else (batch, length)
        config = self.model.config
        mask = torch.ones(shape, dtype=torch.long, device="cpu")
        mask[1:2, ..., (length + 1) // 2 :] = 0
        mask[2:3] = 0
        return {
            "input_ids": torch.randint(config.vocab_size, shape, generator=draw, device="cpu"),
            "attention_mask": mask,
            "token_type_ids": torch.randint(config.type_vocab_size, shape, generator=draw, device="cpu"),
        }
