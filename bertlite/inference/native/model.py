"""NativeBertModel: the BertModel of a native copy, whose plain forward is one call of the kernels.

Shapes:  B sequences · S positions · T tokens · D hidden;  … is (B, S) or, packed, (T,)
"""

import ctypes
from typing import Any, cast

import torch
from torch import Tensor, nn

from bertlite.config import POSITIONS, embeds_size
from bertlite.inference.checks import norm_fault
from bertlite.inference.native.encoder import NativeEncoder, address
from bertlite.inference.quick import Inputs, QuickBertModel, States
from bertlite.models.base import BertModel, BertPreTrainedModel
from bertlite.runtime.structs import ACTIVATIONS, NO_LIMIT, Batch, Ids, Kernels, Model
from bertlite.stack.attention import PACKING
from bertlite.stack.body import has_hooks, has_hooks_within
from bertlite.stack.embeddings import FamilyEmbeddings
from bertlite.stack.inputs import first_position, values_readable
from bertlite.stack.modules import Activation, BertEmbeddings, BertPooler

REPLACED_PARTS = (nn.Embedding, nn.LayerNorm, nn.Dropout)  # the parts of embeddings that the kernels replace


class NativeEmbeddings(FamilyEmbeddings):
    """The embeddings, computed by the kernels."""

    kernels: Kernels
    floats: torch.dtype
    width: int  # numbers in a row

    def forward(
        self,
        input_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        words = self.word_embeddings.weight if inputs_embeds is None else inputs_embeds.flatten(0, -2)
        shape = cast(Tensor, input_ids).shape if inputs_embeds is None else inputs_embeds.shape[:-1]

        # Tracing, hooks and empty inputs are for the module itself.
        if not (shape.numel() and values_readable(words) and self.is_intact()):
            return super().forward(input_ids, token_type_ids, position_ids, inputs_embeds)

        # Given embeddings stand in for the table of words: token i has row i.
        words = words.to(self.word_embeddings.weight.dtype).contiguous()
        if inputs_embeds is not None:
            input_ids = torch.arange(shape.numel(), device="cpu").view(shape)

        beside = (input_ids, token_type_ids, position_ids)
        laid = [None if ids is None else ids.expand(shape).long().contiguous() for ids in beside]
        given = self.ids(words, shape[:-1].numel(), shape[-1])
        given.ids, given.segments, given.positions = map(address, laid)
        given.skips_padding = self.skips_padding and position_ids is not None  # padding is at -1

        # A model without layers has its embeddings as output.
        out = words.new_empty(*shape, words.shape[1])
        batch = Batch(output=out.data_ptr(), is_bfloat16=out.dtype == torch.bfloat16, ids=ctypes.pointer(given))
        no_layers = Model(hidden_size=words.shape[1], epsilon=1.0 if self.LayerNorm is None else self.LayerNorm.eps)

        # The kernels refuse ids beyond a table and do not say which; the module raises the error of torch.
        if not self.kernels.run(no_layers, batch, torch.get_num_threads()):
            return super().forward(input_ids, token_type_ids, position_ids, inputs_embeds)
        return out if self.projection is None else self.projection(out)

    def ids(self, words: Tensor, rows: int, length: int) -> Ids:
        """Return a struct with the tables of embeddings; the table of words may differ from the model's."""
        segments, positions, norm = self.token_type_embeddings, self.position_embeddings, self.LayerNorm
        padded = self.padding_row is not None
        count = NO_LIMIT if positions is None else len(positions.weight) - padded
        return Ids(
            rows=rows, length=length, words=words.data_ptr(), segment_table=segments.weight.data_ptr(),
            position_table=positions.weight.data_ptr() if self.adds_positions else None,
            norm_weight=None if norm is None else norm.weight.data_ptr(),
            norm_bias=None if norm is None else norm.bias.data_ptr(), word_count=words.shape[0],
            segment_count=len(segments.weight), position_count=count, padding_has_position=padded,
        )  # fmt: skip

    def is_intact(self) -> bool:
        """Return whether the kernels can replace its modules: they are plain, and their tensors have not changed."""
        floats, width = self.floats, self.width
        for part in self._modules.values():
            if part is None or part is self.projection:
                continue
            if type(part) not in REPLACED_PARTS or has_hooks(part):
                return False
            for x in part._parameters.values():
                if x is None or x.dtype != floats or x.size(-1) != width or not (x.is_cpu and x.is_contiguous()):
                    return False
        return True


class NativeBertModel(QuickBertModel):
    """BertModel with the layers, and the rest if possible, in one call of the kernels."""

    embeddings: NativeEmbeddings
    encoder: NativeEncoder

    def is_plain(self, ids: Any, mask: Any) -> bool:
        """Return whether the kernels compute what the modules would, and no hook sees these."""
        embeddings, pooler, config, name = self.embeddings, self.pooler, self.config, self.attention_name()
        return (
            len(self.encoder.weights.shape.layers) > 0
            and (name == "auto" or name in PACKING or (name in ("sdpa", "eager") and mask is None))
            and values_readable(ids)
            and type(embeddings) is NativeEmbeddings
            and embeddings.projection is None
            and embeddings.is_intact()
            and not (has_hooks(embeddings) or has_hooks(self.encoder))
            and (pooler is None or (config.pooling == "cls" and not config.pooler_norm))
            and (pooler is None or (not has_hooks_within(pooler) and type(pooler.activation) is nn.Identity))
        )

    def run_at_once(
        self, inputs: Inputs, ends: Any, first_only: bool, encoded: bool, skips: bool | None
    ) -> States | None:
        """Return the outputs; None if inputs are wrong or rare: then BertBody runs."""
        input_ids, mask, segments, positions = inputs
        packed, shape = ends is not None, input_ids.shape

        # Only what the kernels read as it lies runs here; BertBody converts the rest, or raises for it.
        fits = all(is_laid(x, torch.int64) and x.shape == shape for x in inputs if x is not None)
        if not fits or len(shape) != (1 if packed else 2):
            return None
        kind = POSITIONS[self.config.position_embedding_type]
        if positions is not None and (self.embeddings.position_embeddings is None or kind.rotates):
            return None  # BertBody checks it

        # A family may begin to count positions above 0; the kernels count rows of the table.
        if positions is not None and (first := first_position(self.config)):
            positions = positions - first
        if packed and (mask is not None or encoded or not is_laid(ends, torch.int32) or ends.dim() != 1):
            return None

        # Addresses of the inputs, and how padding is to be treated.
        rows = len(ends) - 1 if packed else shape[0]
        given = self.embeddings.ids(self.embeddings.word_embeddings.weight, rows, shape[-1])
        laid = (input_ids, mask, segments, positions, ends)
        given.ids, given.mask, given.segments, given.positions, given.ends = map(address, laid)
        # a head of tokens takes them without padding, from BertBody
        given.takes_padding = self.skips_padding(skips) and (first_only or not encoded)
        given.keeps_order = kind.in_scores or kind.rotates
        if kind.rotates:
            given.position_count = self.config.max_position_embeddings
        if self.config.positions_skip_padding:
            pad = self.config.pad_token_id
            given.skips_padding, given.padding = True, -1 if pad is None else pad

        # Memory for the outputs, which the kernels write.
        words = self.embeddings.word_embeddings.weight
        out = words.new_empty(*([rows, 1][: 2 - packed] if first_only else shape), words.shape[1])
        batch = Batch(output=out.data_ptr(), is_bfloat16=words.dtype == torch.bfloat16, first_only=first_only)
        batch.ids = ctypes.pointer(given)

        pooled = None
        if self.pooler is not None:
            linear: Any = self.pooler.dense
            pooled = words.new_empty(rows, linear.outputs)
            batch.pooler, batch.pooled = ctypes.pointer(linear.struct), pooled.data_ptr()

        return (out, pooled) if self.encoder.run_batch(batch) else None


def is_laid(x: Any, dtype: torch.dtype) -> bool:
    """Return whether the kernels can read a tensor in place."""
    return type(x) is Tensor and x.dtype == dtype and x.is_cpu and x.is_contiguous()


def take_forward_(model: BertPreTrainedModel, kernels: Kernels, floats: torch.dtype) -> None:
    """Let the kernels compute the embeddings and the pooler too, if these are plain modules."""
    body, config, pooler = model.base_model, model.config, model.base_model.pooler
    embeddings: Any = body.embeddings

    # Subclasses, other norms and tables that renormalise would compute something else, and stay as they are.
    is_known = type(embeddings) in (BertEmbeddings, FamilyEmbeddings) and type(body) is BertModel
    width = embeds_size(config)
    norm = embeddings.LayerNorm
    fault = None if norm is None else norm_fault(norm, width, config.layer_norm_eps)
    renormed = any(getattr(part, "max_norm", None) is not None for part in embeddings.children())
    if is_known and fault is None and not (config.projected_before_norm or renormed):
        embeddings.projection = getattr(embeddings, "projection", None)
        embeddings.__class__, body.__class__ = NativeEmbeddings, NativeBertModel
        vars(embeddings).update(kernels=kernels, floats=floats, width=width)
        for parameter in embeddings.parameters():  # a table may be transposed
            parameter.data = parameter.data.contiguous()

    # An activation that the kernels have is fused into the pooler's matmul, so the module has none left to apply.
    act = "tanh" if type(getattr(pooler, "activation", None)) is nn.Tanh else config.pooler_act
    if type(pooler) is BertPooler and act in ACTIVATIONS and type(pooler.activation) in (nn.Tanh, Activation):
        dense: Any = pooler.dense
        dense.activate(act)
        pooler.activation = nn.Identity()
