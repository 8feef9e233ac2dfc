"""The inputs of the parity cases: real sentences if the checkpoint has a tokenizer, else seeded numbers."""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from bertlite.config import BertConfig
from bertlite.models.body import HeadBody
from bertlite.opened.checkpoint import Checkpoint
from bertlite.parity.cases import DECODER, Case

CaseInputs: TypeAlias = Mapping[str, Tensor | bool]  # keyword arguments of forward

SENTENCES = (  # pairs, of unequal lengths
    ("The lighthouse keeper wrote down the weather every evening.", "He never missed a day."),
    ("Bread rises because yeast turns sugar into gas.", "Salt slows it down; warm water speeds it up, up to a point."),
    ("Who moved my coffee?", "Nobody."),
    ("In 1977 two probes left for the outer planets, and both still answer when they are called.", "Slowly."),
)
TOKENIZER = "tokenizer.json"
LENGTH = 24  # tokens of the longest sequence, or fewer if the position table is shorter


def case_inputs(case: Case, model: Any, checkpoint: Checkpoint, device: str) -> dict[str, Tensor | bool]:
    """Return the keyword arguments of both models' forward for one case, by ours."""
    config: BertConfig = model.config
    ids, types, mask = tokens(case, config, checkpoint)  # each (B, S)
    (batch, length), width = ids.shape, config.hidden_size
    dtype: torch.dtype = getattr(torch, case.dtype)
    draw = torch.Generator().manual_seed(2)

    # Each feature adds its inputs; all are drawn from one generator, so that a case is always the same.
    inputs = masked_tokens(case, ids, types, mask, draw, dtype)
    if case.batch == "embeds":
        del inputs["input_ids"]
        embeds = torch.randn(batch, length, width, generator=draw, dtype=torch.float32, device="cpu")
        inputs["inputs_embeds"] = embeds.to(dtype)

    if case.feature == "head_mask":
        layers, heads = config.num_hidden_layers, config.num_attention_heads
        gate = torch.rand(layers, heads, generator=draw, dtype=torch.float32, device="cpu")
        inputs["head_mask"] = gate.where(gate > 0.3, 0.0)

    if case.feature == "crossed":
        states = torch.randn(batch, length // 2, width, generator=draw, dtype=torch.float32, device="cpu")
        inputs["encoder_hidden_states"] = states.to(dtype)
        inputs["encoder_attention_mask"] = mask[:, : length // 2]

    inputs.update(labels_of(case, model, ids, mask, draw))
    if getattr(model, "takes_choices", False):
        for name in ("input_ids", "token_type_ids", "attention_mask"):
            inputs[name] = inputs[name].unflatten(0, (-1, 2))

    # A decoder would return a cache, which is no tensor to compare.
    moved: dict[str, Tensor | bool] = {name: x.to(device) for name, x in inputs.items()}
    return {**moved, "use_cache": False} if case.model == DECODER else moved


def masked_tokens(
    case: Case, ids: Tensor, types: Tensor, mask: Tensor, draw: torch.Generator, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return the tokens with the mask of the case's batch."""
    batch, length = ids.shape
    plain = {"input_ids": ids, "token_type_ids": types}
    if case.batch == "full":
        return plain

    # Padding moves to the front, and positions still count from the first token.
    if case.batch == "left":
        order = mask.argsort(stable=True)  # first the padding, then the tokens in their order
        ids, types, mask = (x.gather(-1, order) for x in (ids, types, mask))
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        return {"input_ids": ids, "token_type_ids": types, "attention_mask": mask, "position_ids": positions}

    # Other masks forbid single pairs, add to the scores, or leave one row without a token.
    if case.batch in ("mask3d", "mask4d"):
        drawn = torch.rand(batch, length, length, generator=draw, dtype=torch.float32, device="cpu")
        allowed = (drawn < 0.7) & mask[:, None].bool()
        allowed |= torch.eye(length, dtype=torch.bool, device="cpu")
        mask = allowed.long() if case.batch == "mask3d" else allowed[:, None]
    elif case.batch == "additive":
        bias = torch.randn(batch, 1, length, length, generator=draw, dtype=torch.float32, device="cpu")
        mask = bias.to(dtype).masked_fill(mask[:, None, None] == 0, torch.finfo(dtype).min)
    elif case.batch == "emptyrow":
        mask = torch.cat([mask[:-1], torch.zeros_like(mask[-1:])])
    return {**plain, "attention_mask": mask}


def labels_of(case: Case, model: Any, ids: Tensor, mask: Tensor, draw: torch.Generator) -> Mapping[str, Tensor]:
    """Return the labels that the case's model takes."""
    batch, length = ids.shape
    some = (torch.rand(batch, length, generator=draw, dtype=torch.float32, device="cpu") < 0.4) & mask.bool()

    if case.model == DECODER:  # transformers sums this loss in float32, always
        return {} if case.dtype == "float64" else {"labels": ids.where(mask.bool(), -100)}
    if not isinstance(model, HeadBody):
        return {}

    # Labels follow from the ids, so that they are the same for both sides, and some are left out.
    found, shape = {}, (batch // 2, 2, length) if model.takes_choices else (batch, length)
    for name, (*rows, classes) in model.label_shapes(shape).items():
        if len(rows) > 1:
            found[name] = (ids % classes).where(some, -100)
        elif model.label_kind == "class":
            found[name] = torch.arange(*rows, device="cpu") % classes
        else:
            flags = torch.arange(math.prod([*rows, classes]), device="cpu") % 2
            found[name] = flags.view(*rows, classes).squeeze(-1).float()

    if "end_positions" in found:
        found["end_positions"] += length - 2  # some are past the end, and do not count
    return found


def tokens(case: Case, config: BertConfig, checkpoint: Checkpoint) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, token types and mask, each (4, S), padded on the right.

    The tokens come from real sentences if the checkpoint has a tokenizer.
    """
    longest = config.max_position_embeddings if case.batch == "long" else min(LENGTH, config.max_position_embeddings)
    encoded = encoded_sentences(checkpoint, config.vocab_size, config.type_vocab_size)
    sequences = encoded or random_tokens(config, longest)

    # Each kind of batch takes another part of the sequences: all, equally much, or up to the last position.
    lengths = [min(len(ids), longest) for ids, _ in sequences]
    if case.batch == "full":
        lengths = [min(lengths)] * len(sequences)
    elif case.batch == "long":  # the same words again and again
        lengths = [longest, longest - longest // 3, longest // 2, longest // 5]
        sequences = [(ids * (longest // len(ids) + 1), types * (longest // len(ids) + 1)) for ids, types in sequences]

    ids, types, mask = (torch.zeros(len(sequences), max(lengths), dtype=torch.long, device="cpu") for _ in range(3))
    for i, ((words, segments), n) in enumerate(zip(sequences, lengths, strict=True)):
        given = torch.tensor([words[:n], segments[:n]], dtype=torch.long, device="cpu")
        ids[i, :n], types[i, :n], mask[i, :n] = *given, 1
    return ids, types, mask


@lru_cache(maxsize=1)
def encoded_sentences(checkpoint: Checkpoint, vocab_size: int, segments: int) -> list[tuple[list[int], list[int]]]:
    """Return token ids and types of SENTENCES; an empty list if no tokenizer for this vocabulary can be loaded.

    Types are 0 if the tokenizer makes none, and at most the last of the model's segments.
    """
    if checkpoint.place.get(TOKENIZER) is None:
        return []
    try:
        tokenizer = checkpoint.tokenizer
    except ValueError:  # the tokenizer needs Python code
        return []
    if len(tokenizer) > vocab_size:
        return []
    encoded, last = tokenizer.encode_texts(SENTENCES), segments - 1
    types = encoded.get("token_type_ids") or [[0] * len(ids) for ids in encoded["input_ids"]]
    return [(ids, [min(each, last) for each in row]) for ids, row in zip(encoded["input_ids"], types, strict=True)]


def random_tokens(config: BertConfig, longest: int) -> list[tuple[list[int], list[int]]]:
    """Return seeded token ids and types of four sequences."""
    draw = torch.Generator().manual_seed(3)
    lengths = [longest, max(2, longest // 3), max(2, longest // 2), max(2, longest - 3)]
    ids = [torch.randint(1, config.vocab_size, (n,), generator=draw, device="cpu").tolist() for n in lengths]
    types = [[int(i > n // 2) % config.type_vocab_size for i in range(n)] for n in lengths]
    return [*zip(ids, types, strict=True)]
