"""The dtype "mixed": weights of 8-bit integers, and of floats in the layers whose rounding errs most.

Shapes:  B texts · S tokens of one · T tokens of all of them · D hidden · L layers
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from operator import index
from typing import Any, TypeAlias

import torch
from torch import Tensor

from bertlite.inference.native.weights import NativeWeights, aligned_tensor, ask_for_huge_pages
from bertlite.models.base import BertModel
from bertlite.runtime.shapes import ALIGNMENT, round_up
from bertlite.runtime.structs import Batch, Kernels, Layer

KEPT = 4  # one layer in so many is in floats, rounded up
WORDS = "The lighthouse keeper wrote down the weather every evening, in a book that no one has read since."
TEXTS = (  # from an empty text to the longest
    *("", " ", "a", "Time flies like an arrow.", "[SEP] İstanbul [MASK] ΑΣ"),
    *(" Où est la gare ? 駅はどこですか。\n", WORDS, f"{WORDS} " * 4, f"{WORDS} " * 60),
)
LONGEST = 256  # tokens of a text on which errors are measured
RANDOM = (8, 64)  # (B, S) of random tokens
Sample: TypeAlias = Sequence[Sequence[int]]


def sample_from(tokenizer: Any) -> Sample | None:
    """Return the token ids of the built-in texts; None if there is no tokenizer."""
    if not callable(tokenizer):
        return None
    found: Sample = tokenizer([*TEXTS], truncation=True, max_length=LONGEST)["input_ids"]
    return found


def mix(
    model: BertModel, integers: NativeWeights, floats: NativeWeights, kernels: Kernels, sample: Sample | None
) -> NativeWeights:
    """Return the weights of a stack with those layers in floats whose rounding changes the output most.

    Args:
        sample: token ids of texts, by default random ones.
    """
    errors = rounding_errors(*embedded(model, sample), integers, floats, kernels)
    worst = sorted(range(len(errors)), key=lambda i: -errors[i])
    kept = tuple(sorted(worst[: -(-len(errors) // KEPT)]))
    shape = replace(integers.shape, kept=kept, floats=floats.shape.numbers)
    data = aligned_tensor(shape.size())
    ask_for_huge_pages(data.data_ptr(), data.numel())
    for place, (start, count) in shape.offsets.items():
        source, size = floats if place[0] in kept else integers, round_up(count, ALIGNMENT)
        first = source.at[place][0]
        data[start : start + size] = source.data[first : first + size]
    return NativeWeights(shape, data)


def embedded(model: BertModel, sample: Sample | None) -> tuple[Tensor, list[int]]:
    """Return the embeddings of texts, (T, D), float32, and the lengths of the texts.

    Ids beyond the vocabulary, which some tokenizers have, count as its last.

    Raises:
        ValueError: the sample has no tokens, or something else than ids from 0 on.
    """
    config, random = model.config, torch.Generator().manual_seed(0)
    if sample is None:
        sample = torch.randint(config.vocab_size, RANDOM, generator=random, device="cpu").tolist()
    try:
        texts = [[index(token) for token in ids[: config.max_position_embeddings]] for ids in sample if len(ids)]
        least = min(map(min, texts), default=None)
        fault = "is empty" if least is None else f"has token id {least}" if least < 0 else ""
    except TypeError:
        fault = f"is {sample!r:.80}"
    if fault:
        raise ValueError(f"sample {fault}; give token ids of texts, from 0 to {config.vocab_size - 1}")
    inputs = [torch.tensor([ids], dtype=torch.long, device="cpu").clamp(max=config.vocab_size - 1) for ids in texts]
    return torch.cat([model.embeddings(ids)[0] for ids in inputs]).float(), [*map(len, texts)]


def rounding_errors(
    x: Tensor, lengths: Sequence[int], integers: NativeWeights, floats: NativeWeights, kernels: Kernels
) -> list[float]:
    """Return the squared error of the mean output of each text, if one layer, each in turn, is of 8-bit integers.

    Args:
        x: the input of the first layer, (T, D).
    """
    exact, rounded = (each.model.layers[: each.model.layer_count] for each in (floats, integers))
    states = x.new_empty(len(exact), *x.shape)
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.long, device="cpu")

    def means(layers: Sequence[Layer], x: Tensor, states: Tensor | None = None) -> Tensor:
        model, out = floats.shape.describe(floats.data.data_ptr()), torch.empty_like(x)
        model.layers, model.layer_count = (Layer * len(layers))(*layers), len(layers)
        batch = Batch(tokens=len(x), sequences=len(lengths), starts=starts.data_ptr(), hidden=x.data_ptr())
        batch.output, batch.states = out.data_ptr(), None if states is None else states.data_ptr()
        kernels.run(model, batch, torch.get_num_threads())
        return torch.stack([text.mean(0) for text in out.split(list(lengths))])

    wanted = means(exact, x, states)  # and the inputs of all layers
    found = (means([layer, *exact[i + 1 :]], states[i]) for i, layer in enumerate(rounded))
    return [float((each - wanted).square().sum()) for each in found]
