"""The layers on top of BERT in the task heads.  Attribute names are checkpoint keys.

Shapes:  B sequences · S positions · D hidden;  … is (B, S) or, packed, (T,)
"""

from torch import Tensor, nn

from bertlite.config import BertConfig, embeds_size, own_field
from bertlite.stack.modules import activation


class BertPredictionHeadTransform(nn.Module):
    def __init__(self, config: BertConfig, act: str | None = None) -> None:
        super().__init__()
        size = embeds_size(config)
        self.dense = nn.Linear(config.hidden_size, size)
        self.transform_act_fn = activation(config.hidden_act if act is None else act)
        self.LayerNorm = nn.LayerNorm(size, eps=config.layer_norm_eps)

    def forward(self, hidden_states: Tensor) -> Tensor:  # (…, D) -> (…, D or the embedding size)
        return self.LayerNorm(self.transform_act_fn(self.dense(hidden_states)))


def head_of_tokens(config: BertConfig) -> BertPredictionHeadTransform | None:
    """Make the layer that a head has at each token before its last one, if `pooler_norm` says that there is one."""
    act = own_field(config, "pooler_act")
    return BertPredictionHeadTransform(config, act) if own_field(config, "pooler_norm") else None


class BertLMPredictionHead(nn.Module):
    """Score every word of the vocabulary at every position."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.transform = BertPredictionHeadTransform(config)
        self.decoder = nn.Linear(embeds_size(config), config.vocab_size)
        self.bias = self.decoder.bias  # one vector, under both names in checkpoints

    def forward(self, hidden_states: Tensor) -> Tensor:  # (…, D) -> (…, vocabulary)
        return self.decoder(self.transform(hidden_states))


class BertOnlyMLMHead(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.predictions = BertLMPredictionHead(config)

    def forward(self, sequence_output: Tensor) -> Tensor:  # (…, D) -> (…, vocabulary)
        return self.predictions(sequence_output)


class BertOnlyNSPHead(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.seq_relationship = nn.Linear(config.hidden_size, 2)

    def forward(self, pooled_output: Tensor) -> Tensor:  # (B, D) -> (B, 2)
        return self.seq_relationship(pooled_output)


class BertPreTrainingHeads(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.predictions = BertLMPredictionHead(config)
        self.seq_relationship = nn.Linear(config.hidden_size, 2)

    def forward(self, sequence_output: Tensor, pooled_output: Tensor) -> tuple[Tensor, Tensor]:
        return self.predictions(sequence_output), self.seq_relationship(pooled_output)
