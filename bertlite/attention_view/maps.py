"""Compute maps of attention, and measure them.

Shapes:  S tokens, special ones included.  A map is (S, S): row i holds the weights of token i, and sums to 1.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer, pre_tokenizers
from torch import Tensor

from bertlite.config import kept_heads
from bertlite.models.base import BertPreTrainedModel
from bertlite.tokenizer import BertTokenizer

Head = tuple[int, int]  # its layer and its number there


@dataclass(frozen=True, eq=False)
class AttentionMaps:
    """The maps of one text for some layers and heads.

    Args:
        tokens: S, as in the vocabulary; a byte-level BPE's as letters, see `in_letters`.
        layers, heads: the chosen ones, numbered as in the unpruned model.
        weights: {(layer, head): (S, S)}, float32; without pruned heads.
        special: positions of [CLS], [SEP] and [PAD].
        name: the model's name in a drawing.
    """

    tokens: tuple[str, ...]
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    weights: Mapping[Head, Tensor]
    special: tuple[int, ...] = ()
    name: str = "model"


@torch.no_grad()
def attention_maps(
    model: BertPreTrainedModel,
    tokenizer: BertTokenizer,
    text: str,
    pair: str | None = None,
    *,
    layers: Iterable[int] | None = None,
    heads: Iterable[int] | None = None,
    name: str = "model",
) -> AttentionMaps:
    """Compute the attention weights of a model for a text.

    Args:
        model: in eval mode; in training mode attention has dropout.
        pair: a second text, after the first one's [SEP].
        layers, heads: numbered as in the unpruned model; by default all.
        name: the model's name in a drawing.

    Raises:
        ValueError: there is no such layer or head; a text has no words, or more tokens than the model has positions;
            or the weights are nan, as in a damaged checkpoint.
    """
    config = model.config
    layers = select_numbers("layer", layers, config.num_hidden_layers)
    heads = select_numbers("head", heads, config.num_attention_heads)
    for given in (text, pair):
        if given is not None and not tokenizer.tokenize(given):
            raise ValueError(f"the text {given!r} has no words, so there is no attention to draw: give a sentence")

    # Nothing is truncated: the map of half a text would mislead.
    encoded = tokenizer(text, pair, return_tensors="pt")
    tokens = tuple(encoded.encodings[0].tokens)
    if len(tokens) > config.max_position_embeddings:
        raise ValueError(
            f"the text has {len(tokens)} tokens, and this model takes {config.max_position_embeddings}: shorten it"
        )

    # Heads are called by their numbers in the unpruned model; the outputs hold only those that are left.
    indices = {  # {kept head: its index in the model's outputs}
        (layer, head): i for layer in layers for i, head in enumerate(kept_heads(config, layer)) if head in heads
    }
    frame = {tokenizer.cls_token, tokenizer.sep_token, tokenizer.pad_token}  # [UNK] and [MASK] are words
    special = tuple(i for i, token in enumerate(tokens) if token in frame)

    attentions: Any = model.base_model(**encoded.to(model.device), output_attentions=True, return_dict=True).attentions
    weights = {(layer, head): attentions[layer][0, i].to("cpu", torch.float32) for (layer, head), i in indices.items()}

    for (layer, head), each in weights.items():
        if each.isnan().any():
            raise ValueError(f"the attention of layer {layer}, head {head} is nan: is the checkpoint damaged?")
    return AttentionMaps(in_letters(tokens, tokenizer.backend_tokenizer), layers, heads, weights, special, name)


def in_letters(tokens: Sequence[str], backend: Tokenizer) -> tuple[str, ...]:
    """Return the tokens of a byte-level BPE as the text of their bytes, with Ġ for a space; other tokens as given.

    Tokens that share a letter all get that letter, and are numbered: "你 1/2", "你 2/2".
    """
    if not any(part and b"ByteLevel" in part.__getstate__() for part in (backend.pre_tokenizer, backend.normalizer)):
        return tuple(tokens)

    # Each letter of the byte-level alphabet stands for one byte.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())  # printable bytes as themselves, then the other bytes
    byte_of = {letter: ord(letter) for letter in alphabet if ord(letter) < 256}
    byte_of |= dict(zip(alphabet[len(byte_of) :], [b for b in range(256) if b not in byte_of.values()], strict=True))
    added = {str(token) for token in backend.get_added_tokens_decoder().values()}

    # A character may be spread over several tokens: they are shown when its last byte has come.
    shown: list[str] = []
    parts, content = 0, b""
    for token in tokens:
        own = token not in added and byte_of.keys() >= {*token}
        parts, content = parts + 1, content + (bytes(byte_of[letter] for letter in token) if own else token.encode())
        try:
            text = content.decode().replace(" ", "Ġ") if own else content.decode()
        except UnicodeDecodeError:
            continue
        shown += [text] if parts == 1 else [f"{text} {i}/{parts}" for i in range(1, parts + 1)]
        parts, content = 0, b""
    return (*shown, *tokens[len(shown) :])


def select_numbers(unit: str, numbers: Iterable[int] | None, count: int) -> tuple[int, ...]:
    """Return the chosen layers or heads, sorted and unique; by default all.

    Raises:
        ValueError: the model was not built with one of them, or none was chosen.
    """
    if numbers is None:
        return tuple(range(count))
    if not isinstance(numbers, Iterable):
        raise ValueError(f"{unit}s are given as a list of their numbers, such as [0]; not as {numbers!r}")
    asked = tuple(sorted(set(numbers)))
    for number in asked:
        if not 0 <= number < count:
            raise ValueError(f"there is no {unit} {number}: this model was built with {count}, 0 to {count - 1}")
    if not asked:
        raise ValueError(f"no {unit} was chosen; leave the choice out to have all {count}")
    return asked


def check_comparable(maps: AttentionMaps, against: AttentionMaps) -> None:
    """Check that two models can be compared head by head and token by token.

    Raises:
        ValueError: their tokens, layers or heads differ.
    """
    for what in ("tokens", "layers", "heads"):
        one, other = getattr(maps, what), getattr(against, what)
        if one != other:
            i = next((i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), -1)
            raise ValueError(
                f"{maps.name} and {against.name} have different {what}, such as {one[i]!r} and {other[i]!r}: compare"
                " checkpoints of one model, with one tokenizer"
            )


def make_record(maps: AttentionMaps, against: AttentionMaps | None = None) -> dict[str, Any]:
    """Return the maps JSON-ready: weights[layer][head] is S lists of S numbers, or None for a pruned head."""

    def nested(source: AttentionMaps) -> dict[str, Any]:
        rows = {head: weights.tolist() for head, weights in source.weights.items()}
        return {str(layer): {str(head): rows.get((layer, head)) for head in maps.heads} for layer in maps.layers}

    record = {"what": "bertlite attention", "tokens": list(maps.tokens), "weights": nested(maps)}
    if against is not None:
        record |= {"model": maps.name, "against": {"model": against.name, "weights": nested(against)}}
    return record


# Measurements --------------------------------------------------------------------------------------------------------

TARGETS = ("itself", "the token before", "the token after", "special tokens", "other words")


def target_shares(maps: AttentionMaps, head: Head) -> list[float]:
    """Return the share of a head's attention that goes to each of TARGETS, averaged over all tokens; they sum to 1.

    So the share of special tokens is the sum of the weights that the page shows next to each of them.
    """
    weights = maps.weights[head]
    size = len(maps.tokens)
    positions = torch.arange(size, device="cpu")
    offsets = positions - positions[:, None]  # from the attending token to the attended one
    special = torch.isin(positions, torch.tensor(maps.special, dtype=torch.long, device="cpu")).expand(size, size)

    # Each weight belongs to one kind of target: a special token is one also next to the attending token.
    near = [(offsets == offset) & ~special for offset in (0, -1, 1)]
    kinds = [*near, special, ~torch.stack([*near, special]).any(0)]
    return [(weights * kind).sum(1).mean().item() for kind in kinds]


def clarity(maps: AttentionMaps, head: Head) -> Tensor:
    """Return how clearly each word attends to a particular other word, (words,).

    It is the largest weight minus the average weight that the attended word receives.  Neighbours and special tokens
    are excluded.  It is small for a head whose words attend to [SEP], to the word before, or all to the same word.
    """
    weights, words = maps.weights[head], word_positions(maps)
    positions = torch.tensor(words, dtype=torch.long, device="cpu")
    beyond = (weights - weights[words].mean(0))[words][:, words]
    far = (positions - positions[:, None]).abs() > 1
    return (beyond * far).amax(1).clamp(min=0)


def word_positions(maps: AttentionMaps) -> list[int]:
    """Return the positions of the tokens that are not special, or all if every token is."""
    words = [i for i in range(len(maps.tokens)) if i not in maps.special]
    return words or list(range(len(maps.tokens)))


def moved_share(maps: AttentionMaps, against: AttentionMaps, head: Head) -> float:
    """Return the share of a head's attention that goes to other tokens in `against`, averaged over the tokens."""
    return (maps.weights[head] - against.weights[head]).abs().sum(1).mean().item() / 2
