"""Kinds of positions in attention: each adds a score bias for the distance from query to key.

An entry of `DISTANCES` attaches its parts to the modules, computes the bias, and names the parts for pruning and the
native kernels.  `bertlite.config.POSITIONS` has the facts that follow from a config alone.

Shapes:  B sequences · S queries · K keys · N heads · H head dim · D hidden · P positions · R rows of a table
"""

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from bertlite.config import BertConfig, own_field
from bertlite.stack.inputs import values_readable

if TYPE_CHECKING:
    from bertlite.runtime.shapes import Shape

BUCKETS = 32  # MPNet sorts distances into so many
Project = Callable[[nn.Linear], Tensor]  # returns the encoder's table, normalised and projected, (R, outputs)
ScoreBias = Callable[[Tensor, Tensor], Tensor]  # (B, N, S, H), (B, N, K, H) -> added to (B, N, S, K)
Applied = tuple[Tensor, Tensor, ScoreBias | None, Any]  # queries, keys, the bias and a layer's `LayerContext`


class DistanceTable(NamedTuple):
    """The encoder's table of distances in one forward."""

    vectors: Tensor  # (R, D), the rows that it needs, normalised
    rows: Tensor  # (2 K - 1,), the index in `vectors` for each distance from query to key, from 1 - K on


class Rotation(NamedTuple):
    """The angles of all tokens in one forward, (…, 1, H): both halves of a head have the same ones."""

    cos: Tensor
    sin: Tensor

    def __call__(self, x: Tensor) -> Tensor:  # (…, N, H) -> (…, N, H)
        """Rotate each number of a head with the one half a head further; in float32 if x has less."""
        cos, sin = (angles.to(x.device) for angles in self)
        exact = x.to(cos.dtype)
        first, second = exact.chunk(2, -1)
        return (exact * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


class Distances:
    """One kind of positions; this one is absolute, and does nothing with distances."""

    shares = False  # an encoder computes something for all of its layers
    per_head = False  # the columns of an attention's table are heads

    def table(self, config: BertConfig, heads: int) -> tuple[int, int] | None:
        """Return the shape of an attention's table, `distance_embedding`, if it has one."""
        return None

    def attach_(self, attention: Any, config: BertConfig, linear: Callable[[int, int], nn.Linear]) -> None:
        """Give an attention its parts."""
        if (shape := self.table(config, attention.num_attention_heads)) is not None:
            attention.distance_embedding = nn.Embedding(*shape)

    def attach_to_encoder_(self, encoder: Any, config: BertConfig) -> None:
        """Give an encoder the parts that its layers share, such as a table, `rel_embeddings`, if there are any."""

    def share(self, encoder: Any, x: Tensor, inputs: Any) -> Any:
        """Return what the layers share in a forward on embeddings x; `inputs` is the encoder's `LayerContext`."""
        raise NotImplementedError

    def apply(self, attention: Any, q: Tensor, k: Tensor, inputs: Any) -> Applied:  # (…, N, H) each
        """Return queries, keys, a score bias and the `LayerContext` of a layer, as attention takes them."""
        return q, k, self.score_bias(attention, q, k, inputs), inputs

    def score_bias(self, attention: Any, q: Tensor, k: Tensor, inputs: Any) -> ScoreBias:  # (…, N, H) each
        """Return the function that computes the score bias; `inputs` is the layer's `LayerContext`."""
        raise NotImplementedError

    def packed(self, attention: Any, shape: "Shape", project: Project) -> dict[str, Tensor]:
        """Return what the native kernels take, by names or kinds of `runtime.shapes`."""
        return {}


class VectorDistances(Distances):
    """A vector for each distance (Shaw et al. 2018), by which keys may be multiplied too (Huang et al. 2020)."""

    def __init__(self, with_keys: bool) -> None:
        self.with_keys = with_keys

    def table(self, config: BertConfig, heads: int) -> tuple[int, int]:
        return 2 * config.max_position_embeddings - 1, config.hidden_size // config.num_attention_heads

    def score_bias(self, attention: Any, q: Tensor, k: Tensor, inputs: Any) -> ScoreBias:
        rows = inputs.distances(q, k) + attention.distance_embedding.num_embeddings // 2
        return partial(relative_scores, table=attention.distance_embedding(rows).to(q.dtype), with_keys=self.with_keys)

    def packed(self, attention: Any, shape: "Shape", project: Project) -> dict[str, Tensor]:
        weight = attention.distance_embedding.weight
        return {"distances": pad(weight.flip(0), (0, shape.padded_head - shape.head_size))}


def relative_scores(q: Tensor, k: Tensor, table: Tensor, with_keys: bool) -> Tensor:
    """Return the scores of the distance from query to key, to add to the scaled scores, (B, N, S, K).

    Args:
        table: (S, K, H) for the longest sequence: the vector of the distance between each two tokens.
        with_keys: multiply keys by it too, not only queries.
    """
    table = table[: q.shape[-2], : k.shape[-2]]
    scores = torch.einsum("bnsh,skh->bnsk", q, table)
    if with_keys:
        scores = scores + torch.einsum("bnkh,skh->bnsk", k, table)
    return scores / math.sqrt(q.shape[-1])


class BucketedDistances(Distances):
    """A number for each head and bucket of distances, as in MPNet."""

    per_head = True

    def table(self, config: BertConfig, heads: int) -> tuple[int, int]:
        return BUCKETS, heads

    def score_bias(self, attention: Any, q: Tensor, k: Tensor, inputs: Any) -> ScoreBias:  # (…, N, H) each
        buckets = distance_buckets(inputs.distances(q, k))
        bias = attention.distance_embedding(buckets).permute(2, 0, 1)[None].to(q.dtype)
        return lambda q, k: bias[..., : q.shape[-2], : k.shape[-2]]

    def packed(self, attention: Any, shape: "Shape", project: Project) -> dict[str, Tensor]:
        distances = torch.arange(shape.max_positions - 1, -shape.max_positions, -1, device="cpu")
        bias = attention.distance_embedding.weight[distance_buckets(distances)].T  # (N, 2 P - 1)
        return {"distance_bias": bias.flatten()}


def distance_buckets(distance: Tensor) -> Tensor:
    """Return the bucket of each distance from query to key: one each up to 7, then logarithmic steps up to 127.

    Keys after the query have the second half (Raffel et al. 2020, section 2.1; transformers' MPNetEncoder).
    """
    half, exact, size = BUCKETS // 2, BUCKETS // 4, distance.abs()
    steps = torch.log(size.clamp(min=exact).float() / exact) / math.log(128 / exact) * (half - exact)
    return torch.where(size < exact, size, (exact + steps.long()).clamp(max=half - 1)) + half * (distance < 0)


class DisentangledDistances(Distances):
    """Scores between contents and distances, as in DeBERTa-v2 and v3.

    The encoder has a table with a row for each distance.  Each layer projects it to keys and to queries of distances.
    Two products are added to the score of a query and a key: the query's with the key of their distance ("c2p"), and
    the key's with the query of their distance ("p2c"); He et al. 2020 (arXiv:2006.03654), section 3.1.  The paper
    divides the sum by the root of its 1 to 3 parts; here loading a checkpoint divides the weights of queries.
    """

    projections = ("pos_key_proj", "pos_query_proj")  # more linear layers to heads that an attention may get
    shares = True

    def attach_(self, attention: Any, config: BertConfig, linear: Callable[[int, int], nn.Linear]) -> None:
        """Give an attention the projections of distances; with share_att_key it uses its projections of tokens."""
        attention.pos_att_type = own_field(config, "pos_att_type").split("|")
        attention.pos_dropout = nn.Dropout(config.hidden_dropout_prob)
        for kind, name in zip(("c2p", "p2c"), self.projections, strict=True):
            if kind in attention.pos_att_type and not own_field(config, "share_att_key"):
                setattr(attention, name, linear(config.hidden_size, attention.all_head_size))

    def attach_to_encoder_(self, encoder: Any, config: BertConfig) -> None:
        buckets, farthest = (own_field(config, name) for name in ("position_buckets", "max_relative_positions"))
        encoder.position_buckets, encoder.max_relative_positions = buckets, farthest
        encoder.rel_embeddings = nn.Embedding(2 * (buckets or farthest), config.hidden_size)
        if own_field(config, "norm_rel_ebd") == "layer_norm":
            encoder.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def share(self, encoder: Any, x: Tensor, inputs: Any) -> DistanceTable:
        """Return the table of distances of a forward on x.

        In training it is whole, so that dropout draws as in transformers.  It is also whole if a graph is made.
        """
        keys = inputs.layout.keys
        known = values_readable(x)
        distances = torch.arange(1 - keys, max(keys, 1), device="cpu" if known else x.device)  # none without keys
        rows = table_rows(distances, encoder.position_buckets, encoder.max_relative_positions)
        table = encoder.rel_embeddings.weight
        if known and keys and not encoder.training:
            rows, table = rows - rows[0], table[int(rows[0]) : int(rows[-1]) + 1]
        norm = getattr(encoder, "LayerNorm", None)
        return DistanceTable(table if norm is None else norm(table), rows.to(x.device, non_blocking=True))

    def score_bias(self, attention: Any, q: Tensor, k: Tensor, inputs: Any) -> ScoreBias:  # (…, N, H) each
        table: DistanceTable | None = inputs.shared
        if table is None:
            raise ValueError(
                "a layer with disentangled attention needs the encoder's table of distances: run the encoder"
            )

        # Queries meet the vectors of distances, and so do keys; all layers share one table of vectors.
        distances, size, device = inputs.distances(q, k), attention.attention_head_size, q.device
        row = table.rows.to(device)[distances + table.rows.shape[0] // 2]
        vectors = attention.pos_dropout(table.vectors.to(device))
        found = project_table(attention, lambda part: part(vectors))

        # Products with all rows of the table are few; each pair of tokens then picks its own.
        def scores(q: Tensor, k: Tensor) -> Tensor:
            at, parts = row[: q.shape[-2], : k.shape[-2]], []
            if "c2p" in found:
                parts.append((q @ found["c2p"]).gather(-1, at.expand(*q.shape[:2], *at.shape)))
            if "p2c" in found:
                parts.append((k @ found["p2c"]).gather(-1, at.T.expand(*k.shape[:2], *at.T.shape)).transpose(-1, -2))
            return sum(parts[1:], parts[0]) / math.sqrt(size)

        return scores

    def packed(self, attention: Any, shape: "Shape", project: Project) -> dict[str, Tensor]:
        """Return each head's projection of the encoder's table, the largest distance first, and the row of each."""
        rows = 2 * (shape.buckets or shape.reach)
        room = (0, shape.padded_head - shape.head_size, 0, shape.table_rows - rows)
        found = {kind: pad(x.flip(2).mT, room).flatten(0, 1) for kind, x in project_table(attention, project).items()}
        distances = torch.arange(shape.reach, -shape.reach - 1, -1, device="cpu")
        return {**found, "distance_rows": rows - 1 - table_rows(distances, shape.buckets, shape.reach)}


class RotaryPositions(Distances):
    """Queries and keys are rotated by their positions (Su et al. 2021, arXiv:2104.09864), so that a score depends on
    the distance; some layers attend within a window, as in ModernBERT.
    """

    shares = True

    def attach_(self, attention: Any, config: BertConfig, linear: Callable[[int, int], nn.Linear]) -> None:
        """Give an attention the base of its angles, and its window if it has one."""
        is_local = attention.layer_idx in (own_field(config, "local_layers") or ())
        attention.rotary_base = float(own_field(config, "local_rotary_base" if is_local else "rotary_base"))
        attention.window = own_field(config, "local_attention") if is_local else None

    def attach_to_encoder_(self, encoder: Any, config: BertConfig) -> None:
        encoder.rotated_size = config.hidden_size // config.num_attention_heads
        encoder.rotary_divisor = own_field(config, "rotary_divisor")

    def share(self, encoder: Any, x: Tensor, inputs: Any) -> dict[float, Rotation]:
        """Return the rotation of all tokens for each base; angles are float32, as in transformers."""
        size, dtype = encoder.rotated_size, torch.promote_types(x.dtype, torch.float32)
        places = torch.arange(x.shape[-2], device=x.device) if inputs.places is None else inputs.places
        places = places if x.dim() == 2 else places.view(-1, x.shape[-2])

        # One position rotates each pair of numbers of a head by its own step, (H / 2,).
        exponents, found = torch.arange(0, size, 2, dtype=torch.float32, device=x.device) / size, {}
        for base in sorted({layer.attention.self.rotary_base for layer in encoder.layer}):
            steps = 1.0 / base**exponents / encoder.rotary_divisor
            angles = (places[..., None, None].float() * steps).repeat(*[1] * (places.dim() + 1), 2)
            found[base] = Rotation(angles.cos().to(dtype), angles.sin().to(dtype))
        return found

    def apply(self, attention: Any, q: Tensor, k: Tensor, inputs: Any) -> Applied:  # (…, N, H) each
        if inputs.shared is None:
            raise ValueError("a layer with rotary positions needs the encoder's angles: run the encoder")
        rotation: Rotation = inputs.shared[attention.rotary_base]
        of_queries = Rotation(*map(inputs.layout.first, rotation)) if inputs.first_only else rotation
        if attention.window is not None:
            inputs = inputs.within(attention.window, q, k)
        return of_queries(q), rotation(k), None, inputs


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


def project_table(attention: Any, project: Project) -> dict[str, Tensor]:
    """Return the encoder's table as it is projected to heads, {kind of scores: (N, H, R)}."""
    own, heads = attention, (-1, attention.attention_head_size)
    projections = {"c2p": getattr(own, "pos_key_proj", own.key), "p2c": getattr(own, "pos_query_proj", own.query)}
    return {kind: project(projections[kind]).unflatten(-1, heads).permute(1, 2, 0) for kind in own.pos_att_type}


def zero_padding(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return embeddings, (B, S, D), with zeros for padding; its queries then attend to all keys alike."""
    return x if mask is None or mask.dim() != 2 else x * (mask != 0)[..., None]


DISTANCES = {  # {position_embedding_type: its part in attention}
    "absolute": Distances(),
    "relative_key": VectorDistances(with_keys=False),
    "relative_key_query": VectorDistances(with_keys=True),
    "bucketed": BucketedDistances(),
    "disentangled": DisentangledDistances(),
    **dict.fromkeys(("rotary", "rotary_local"), RotaryPositions()),
}
PROJECTIONS = ("query", "key", "value", *DisentangledDistances.projections)  # to heads
