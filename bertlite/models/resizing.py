"""Resize the embeddings of tokens and positions."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bertlite.config import POSITIONS, BertConfig, set_config
from bertlite.models.structure import check_linear, check_plain, layers_of, resize_, set_table_


class Resizable:
    """The part of a model class that resizes its embeddings."""

    def resize_token_embeddings(
        self: Any, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None
    ) -> nn.Embedding:
        """Resize the embeddings of tokens, such as after `tokenizer.add_tokens`.

        New rows, and new elements of a decoder's bias, are the mean of the old ones.  Until trained, a new token is as
        likely as the average one.  A decoder, tied or not, gets the same rows.  Fewer tokens drop the last rows.
        Parameters are replaced: make the optimizer afterwards.

        Args:
            new_num_tokens: such as len(tokenizer); by default the number does not change.
            pad_to_multiple_of: round up to a multiple of this, such as 64 for the matrix units of a GPU.

        Returns:
            The word embeddings.

        Raises:
            ValueError: a number is below 1, or the padding token would be dropped.
            TypeError: the embeddings or the decoder are quantised or wrapped by an adapter.
        """
        size: int = self.config.vocab_size if new_num_tokens is None else positive("new_num_tokens", new_num_tokens)
        if pad_to_multiple_of is not None:
            size += -size % positive("pad_to_multiple_of", pad_to_multiple_of)
        return change_tokens_(self, replace(self.config, vocab_size=size), lambda table: with_mean_rows(table, size))

    def resize_position_embeddings(self: Any, new_num_position_embeddings: int) -> None:
        """Resize the embeddings of positions, for longer or shorter texts.

        Old positions keep their embeddings, so that outputs for texts that fitted before do not change.  New ones
        repeat them from the first on, as in Longformer (Beltagy et al. 2020, arXiv:2004.05150, section 5).  With
        relative positions a new distance starts as a copy of the largest old one.  Train them before use.
        Rotary positions have no embeddings: only the limit changes.  Disentangled positions do not change: they have
        their own limit, `max_relative_positions`.
        Parameters are replaced: make the optimizer afterwards.

        A tokenizer truncates at its own `model_max_length`: set it too, and save the tokenizer.

        Args:
            new_num_position_embeddings: the longest text, in tokens.

        Raises:
            ValueError: a number below 1.
            TypeError: the embeddings are quantised or wrapped by an adapter.
        """
        size = positive("new_num_position_embeddings", new_num_position_embeddings)
        config, old = replace(self.config, max_position_embeddings=size), self.config.max_position_embeddings

        # Everything that has a row for each position, or for each distance.
        embeddings = self.base_model.embeddings
        positions, kind = embeddings.position_embeddings, POSITIONS[config.position_embedding_type]
        has_distances = kind.in_scores and not kind.in_embeddings
        relative = [layer.attention.self for layer in layers_of(self) if has_distances]  # refuses an optimised model

        # All tables are checked before the first one changes.
        if positions is not None:
            check_embedding("position_embeddings", positions)
        for attention in relative:
            check_embedding("distance_embedding", attention.distance_embedding)

        # New positions repeat the old ones from the first on.
        rows = torch.arange(size, device="cpu") % old
        if config.padding_has_position:  # padding's row stays the last
            rows = torch.cat([rows, torch.tensor([old], dtype=torch.long, device="cpu")])
            embeddings.padding_row = positions.padding_idx = size
        if positions is not None:
            set_table_(positions, positions.weight[rows])

        # A distance beyond the old ones is like the largest of them.
        distances = torch.arange(1 - size, size, device="cpu").clamp(1 - old, old - 1)
        for attention in relative:
            set_table_(attention.distance_embedding, attention.distance_embedding.weight[distances + old - 1])
            attention.max_position_embeddings = size
        set_config(self, config)


def change_tokens_(model: Any, config: BertConfig, rows: Callable[[Tensor], Tensor]) -> nn.Embedding:
    """Change the rows of the word embeddings, and of a decoder and its bias; return the word embeddings.

    Args:
        config: the model's new config.
        rows: makes the new table from the old one, (tokens, …).

    Raises:
        TypeError: the embeddings or the decoder are quantised or wrapped by an adapter.
    """
    words, decoder = model.get_input_embeddings(), getattr(model, "get_output_embeddings", lambda: None)()
    check_embedding("word_embeddings", words)
    if decoder is not None:
        check_linear("cls.predictions.decoder", decoder)
        resize_(decoder, rows(decoder.weight), rows(decoder.bias))
    set_table_(words, rows(words.weight))
    words.padding_idx = config.pad_token_id
    set_config(model, config)
    model.tie_weights()
    return words


def positive(name: str, value: int) -> int:
    """Return a number; raise ValueError if it is below 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} is {value!r}; it must be an integer, 1 or more")
    return value


def check_embedding(name: str, part: nn.Module) -> None:
    """Raise TypeError unless a module is a plain nn.Embedding."""
    check_plain(name, part, nn.Embedding, "resize before you add adapters or quantise weights")


def with_mean_rows(table: Tensor, size: int) -> Tensor:
    """Return the first `size` rows of a table; missing rows are the mean of all."""
    mean = table.mean(0, dtype=torch.promote_types(table.dtype, torch.float32)).to(table.dtype)
    return torch.cat([table[:size], mean.expand(max(0, size - len(table)), *mean.shape)])
