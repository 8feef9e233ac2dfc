"""The parts of BertModel that are the same in every version of transformers, as subclasses of transformers'.

A part is built from a config and is a real subclass of transformers' class of that name: theirs are no abstract base
classes, so nothing can be registered with them.  bertlite's class comes first and does the work.  `WithoutStock`
between the two ends the chain of constructors: transformers' own would make every matrix a second time.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.bert import modeling_bert as stock

from bertlite.hf.compat import complete_config_
from bertlite.stack import embeddings, modules

__all__ = ["BertEmbeddings", "BertIntermediate", "BertOutput", "BertPooler", "BertSelfOutput"]


class WithoutStock(nn.Module):
    """Ends a chain of constructors before transformers' class."""

    def __init__(self) -> None:
        nn.Module.__init__(self)


class BertEmbeddings(modules.BertEmbeddings, WithoutStock, stock.BertEmbeddings):
    """Word, position and segment embeddings; `position_ids` and `token_type_ids` are the defaults."""

    position_ids: Tensor  # (1, max_position_embeddings)
    token_type_ids: Tensor

    def __init__(self, config: Any) -> None:
        complete_config_(config)
        super().__init__(config)
        self.position_embedding_type = config.position_embedding_type
        positions = torch.arange(config.max_position_embeddings)[None]
        self.register_buffer("position_ids", positions, persistent=False)
        self.register_buffer("token_type_ids", torch.zeros_like(positions), persistent=False)

    def forward(
        self,
        input_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values_length: int = 0,
        cache_length: int = 0,  # its name since 5.24
    ) -> Tensor:
        tokens = inputs_embeds if input_ids is None else input_ids
        if position_ids is None and tokens is not None:
            first = past_key_values_length or cache_length
            end = first + tokens.shape[1]
            if first or end <= self.position_ids.shape[1]:  # otherwise the table is longer
                position_ids = self.position_ids[:, first:end]
        parent: Any = super(BertEmbeddings, self)  # noqa: UP008  # its source may run again outside this class
        return parent.forward(input_ids, token_type_ids, position_ids, inputs_embeds)


class FamilyEmbeddings(BertEmbeddings, embeddings.FamilyEmbeddings):
    """The embeddings of a checkpoint that another family's became."""


class BertSelfOutput(modules.BertSelfOutput, WithoutStock, stock.BertSelfOutput):
    def __init__(self, config: Any, width: int | None = None) -> None:
        super().__init__(config, config.hidden_size if width is None else width)


class BertIntermediate(modules.BertIntermediate, WithoutStock, stock.BertIntermediate):
    pass


class BertOutput(modules.BertOutput, WithoutStock, stock.BertOutput):
    pass


class BertPooler(modules.BertPooler, WithoutStock, stock.BertPooler):
    pass
