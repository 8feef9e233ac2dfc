"""The embeddings of the other families: of another width, or with other positions, or none.

Shapes:  D hidden · E the width of the tables;  … is (B, S) or, packed, (T,)
"""

from typing import Any

from torch import Tensor, nn

from bertlite.config import POSITIONS, BertConfig, embeds_size, own_field
from bertlite.stack.modules import BertEmbeddings


class FamilyEmbeddings(BertEmbeddings):
    """BERT's embeddings with the changes of other families, as the config says."""

    # On the class, since the native embeddings are also made of BERT's, which never ran this constructor.
    padding_row: int | None = None  # in the table of positions
    skips_padding = False  # positions are counted over tokens, and padding is at -1
    norms_last = False  # they are normalised after the projection

    def __init__(self, config: BertConfig) -> None:
        nn.Module.__init__(self)  # its tables are not BERT's
        size, positions = embeds_size(config), config.max_position_embeddings
        self.word_embeddings = nn.Embedding(config.vocab_size, size, padding_idx=config.pad_token_id)

        # In some families padding has a row of its own behind the positions.
        self.padding_row = positions if own_field(config, "padding_has_position") else None
        self.position_embeddings: Any = None
        if own_field(config, "position_biased_input"):
            rows = positions + (self.padding_row is not None)
            self.position_embeddings = nn.Embedding(rows, size, self.padding_row)

        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, size)
        self.norms_last = own_field(config, "projected_before_norm")
        width = config.hidden_size if self.norms_last else size
        wanted = own_field(config, "embeddings_norm")
        self.LayerNorm: Any = nn.LayerNorm(width, eps=config.layer_norm_eps) if wanted else None
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

        # Narrow tables are projected to the width of the layers, before or after they are normalised.
        self.projection: nn.Linear | None = None
        if size != config.hidden_size:
            self.projection = nn.Linear(size, config.hidden_size, bias=not self.norms_last)

        self.skips_padding = own_field(config, "positions_skip_padding")
        in_embeddings = POSITIONS[config.position_embedding_type].in_embeddings
        self.adds_positions = in_embeddings and self.position_embeddings is not None

    def forward(self, *inputs: Any, **named: Any) -> Tensor:  # (…) or (…, E) -> (…, D)
        x = super().forward(*inputs, **named)
        return x if self.projection is None or self.norms_last else self.projection(x)

    def add_positions(self, x: Tensor, position_ids: Tensor | None) -> Tensor:  # (…, E) -> (…, E or D)
        """Add the row of each position, to padding its own or none; project embeddings that are normalised last."""
        if self.skips_padding and position_ids is not None:
            padding = position_ids < 0
            summed = super().add_positions(x, position_ids.masked_fill(padding, self.padding_row or 0))
            x = x.where(padding[..., None], summed) if self.padding_row is None else summed
        else:
            x = super().add_positions(x, position_ids)
        return self.projection(x) if self.projection is not None and self.norms_last else x
