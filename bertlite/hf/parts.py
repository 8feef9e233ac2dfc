"""The parts of BERT that are the same in every version of transformers: bertlite's modules as subclasses of theirs.

A part is built from a config and is a real subclass of transformers' class of that name, as theirs are not abstract
base classes that accept registration.  bertlite's class comes first and does the work.  `WithoutStock` between the two
ends the chain of constructors: transformers' own would make every matrix a second time.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.bert import modeling_bert as stock

from bertlite.heads import layers
from bertlite.hf.compat import V5
from bertlite.hf.config import complete_config_
from bertlite.stack import modules
from bertlite.stack.inputs import embeds_size


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
    ) -> Tensor:
        tokens = inputs_embeds if input_ids is None else input_ids
        if position_ids is None and tokens is not None:
            length = tokens.shape[1]
            position_ids = self.position_ids[:, past_key_values_length : past_key_values_length + length]
            if hasattr(self.position_embeddings.weight, "grad_sample"):  # of Opacus, which needs (B, S)
                position_ids = position_ids.expand(tokens.shape[:2])
        return modules.BertEmbeddings.forward(self, input_ids, token_type_ids, position_ids, inputs_embeds)


class BertSelfOutput(modules.BertSelfOutput, WithoutStock, stock.BertSelfOutput):
    def __init__(self, config: Any, width: int | None = None) -> None:
        super().__init__(config, config.hidden_size if width is None else width)


class BertIntermediate(modules.BertIntermediate, WithoutStock, stock.BertIntermediate):
    pass


class BertOutput(modules.BertOutput, WithoutStock, stock.BertOutput):
    pass


class BertPooler(modules.BertPooler, WithoutStock, stock.BertPooler):
    pass


class BertPredictionHeadTransform(layers.BertPredictionHeadTransform, WithoutStock, stock.BertPredictionHeadTransform):
    pass


class BertLMPredictionHead(layers.BertLMPredictionHead, WithoutStock, stock.BertLMPredictionHead):
    """Scores of the vocabulary.  In 4.57 both names of the bias are one vector; in 5 the model ties them."""

    def __init__(self, config: Any) -> None:
        nn.Module.__init__(self)
        self.transform = BertPredictionHeadTransform(config)
        self.decoder = nn.Linear(embeds_size(config), config.vocab_size)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size)) if V5 else self.decoder.bias

    def _tie_weights(self) -> None:  # called only by 4.57
        self.decoder.bias = self.bias


class BertOnlyMLMHead(layers.BertOnlyMLMHead, WithoutStock, stock.BertOnlyMLMHead):
    def __init__(self, config: Any) -> None:
        nn.Module.__init__(self)
        self.predictions = BertLMPredictionHead(config)


class BertOnlyNSPHead(layers.BertOnlyNSPHead, WithoutStock, stock.BertOnlyNSPHead):
    pass


class BertPreTrainingHeads(layers.BertPreTrainingHeads, WithoutStock, stock.BertPreTrainingHeads):
    def __init__(self, config: Any) -> None:
        nn.Module.__init__(self)
        self.predictions = BertLMPredictionHead(config)
        self.seq_relationship = nn.Linear(config.hidden_size, 2)
