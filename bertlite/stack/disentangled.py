"""Disentangled attention, as in DeBERTa-v2 and v3: scores between contents and distances, as one more score bias.

The encoder has a table with a row for each distance from query to key.  Each layer projects it to keys and to queries
of distances.  Two products are added to the score of a query and a key: the query's with the key of their distance
("c2p"), and the key's with the query of their distance ("p2c"); He et al. 2020 (arXiv:2006.03654), section 3.1.  The
paper divides the sum by the root of its 1 to 3 parts; here loading a checkpoint divides the weights of queries.

Shapes:  B sequences · S queries · K keys · N heads · H head dim · D hidden · R rows of the table
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bertlite.config import BertConfig, own_field
from bertlite.stack.inputs import values_readable


@dataclass(frozen=True, eq=False)
class DistanceTable:
    """The table of distances of one forward.

    Args:
        vectors: (R, D), the rows that it needs, normalised.
        rows: (2 K - 1,), the index in `vectors` for each distance from query to key, from 1 - K on.
    """

    vectors: Tensor
    rows: Tensor


def add_table_(encoder: Any, config: BertConfig) -> None:
    """Give an encoder the table of distances."""
    buckets, farthest = (own_field(config, name) for name in ("position_buckets", "max_relative_positions"))
    encoder.position_buckets, encoder.max_relative_positions = buckets, farthest
    encoder.rel_embeddings = nn.Embedding(2 * (buckets or farthest), config.hidden_size)
    if own_field(config, "norm_rel_ebd") == "layer_norm":
        encoder.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)


def add_projections_(attention: Any, config: BertConfig, make: Callable[[int, int], nn.Linear]) -> None:
    """Give an attention the projections of distances; with share_att_key it uses its projections of tokens."""
    attention.pos_att_type = own_field(config, "pos_att_type").split("|")
    attention.pos_dropout = nn.Dropout(config.hidden_dropout_prob)
    for kind, name in (("c2p", "pos_key_proj"), ("p2c", "pos_query_proj")):
        if kind in attention.pos_att_type and not own_field(config, "share_att_key"):
            setattr(attention, name, make(config.hidden_size, attention.all_head_size))


def find_table(encoder: Any, x: Tensor, keys: int) -> DistanceTable:
    """Return the table of distances of a forward on x with `keys` keys.

    In training the table is whole, so that dropout draws as in transformers.  It is also whole if a graph is made.
    """
    known = values_readable(x)
    distances = torch.arange(1 - keys, keys, device="cpu" if known else x.device)
    rows = table_rows(distances, encoder.position_buckets, encoder.max_relative_positions)
    table = encoder.rel_embeddings.weight
    if known and keys and not encoder.training:
        rows, table = rows - rows[0], table[int(rows[0]) : int(rows[-1]) + 1]
    return DistanceTable(normalised(encoder, table), rows.to(x.device, non_blocking=True))


def normalised(encoder: Any, table: Tensor) -> Tensor:
    """Return rows of the encoder's table, normalised for the layers."""
    norm = getattr(encoder, "LayerNorm", None)
    return table if norm is None else norm(table)


def table_rows(distances: Tensor, buckets: int, farthest: int) -> Tensor:
    """Return the rows of distances from query to key; distances beyond the table have its first or last row.

    With buckets, distances up to half of them have rows of their own, and larger ones share rows in logarithmic steps
    up to the farthest (transformers' make_log_bucket_position, whose float32 rounding decides at the edges).
    """
    span = buckets or farthest
    if buckets:
        half, size = buckets // 2, distances.abs()
        longest = torch.full_like(distances, farthest - 1, dtype=torch.float32)
        steps = torch.log(size.clamp(min=half).float() / half) / torch.log(longest / half) * (half - 1)
        far = (half + steps.ceil().long()) * distances.sign()
        distances = torch.where(size <= half, distances, far)
    return (distances + span).clamp(0, 2 * span - 1)


def disentangled_bias(attention: Any, distances: Tensor, table: DistanceTable | None) -> Callable[..., Tensor]:
    """Return the function that computes the score bias of queries, (B, N, S, H), and keys, (B, N, K, H).

    Args:
        distances: (S, K), for the longest sequence.

    Raises:
        ValueError: the layer runs without the encoder, which has the table.
    """
    if table is None:
        raise ValueError("a layer with disentangled attention needs the encoder's table of distances: run the encoder")
    size, device = attention.attention_head_size, distances.device
    row = table.rows.to(device)[distances + table.rows.shape[0] // 2]
    found = project_table(attention, attention.pos_dropout(table.vectors.to(device)))

    def scores(q: Tensor, k: Tensor) -> Tensor:
        at, parts = row[: q.shape[-2], : k.shape[-2]], []
        if "c2p" in found:
            parts.append((q @ found["c2p"]).gather(-1, at.expand(*q.shape[:2], *at.shape)))
        if "p2c" in found:
            parts.append((k @ found["p2c"]).gather(-1, at.T.expand(*k.shape[:2], *at.T.shape)).transpose(-1, -2))
        return sum(parts[1:], parts[0]) / math.sqrt(size)

    return scores


def zero_padding(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return embeddings, (B, S, D), with zeros for padding; its queries then attend to all keys alike."""
    return x if mask is None or mask.dim() != 2 else x * (mask != 0)[..., None]


def project_table(attention: Any, vectors: Tensor) -> dict[str, Tensor]:
    """Project the vectors of distances, (R, D), to heads; return {kind of scores: (N, H, R)}."""
    own = attention
    projections = {"c2p": getattr(own, "pos_key_proj", own.key), "p2c": getattr(own, "pos_query_proj", own.query)}
    return {kind: own.split(projections[kind](vectors)).permute(1, 2, 0) for kind in own.pos_att_type}
