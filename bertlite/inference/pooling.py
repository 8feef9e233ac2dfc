"""What a sentence encoder's checkpoint says of its vectors, and pooling, from vectors of tokens to one of the text.

Shapes:  B sequences · T tokens, of all sequences together · D hidden
"""

import json
from collections.abc import Sequence
from typing import TypedDict

import torch
from torch import Tensor

from bertlite.checkpoint.files import Source, locate
from bertlite.tokenizer.files import read_json

POOLINGS = ("cls", "mean", "max")
LEGACY_POOLINGS = {  # keys of 1_Pooling/config.json in sentence-transformers before it had one `pooling_mode`
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


class CheckpointSettings(TypedDict, total=False):
    """The settings that a checkpoint states: pooling, normalising and its longest text."""

    pooling: str
    normalize: bool
    max_length: int | None


def pool(states: Tensor, lengths: Sequence[int], pooling: str) -> Tensor:
    """Return one vector for each sequence: that of its first token, or the mean or the maximum over its tokens.

    Args:
        states: (T, D), the tokens of one sequence after another.
        lengths: of the sequences, in tokens.
        pooling: a name of POOLINGS.

    Returns:
        (B, D), in float32 where the states are in half precision.

    Raises:
        ValueError: another name.
    """
    states = states.float() if states.dtype in (torch.float16, torch.bfloat16) else states
    counts = torch.tensor(lengths, device=states.device)
    if pooling == "cls":
        return states[counts.cumsum(0) - counts]
    if pooling not in POOLINGS:
        raise ValueError(f"pooling {pooling!r} is unknown; have: {', '.join(POOLINGS)}")
    return torch.segment_reduce(states, pooling, lengths=counts)


def read_settings(source: Source) -> CheckpointSettings:
    """Read a checkpoint's pooling, normalising and longest text, as sentence-transformers writes them.

    Raises:
        ValueError: the checkpoint has other modules, or a file is damaged.
    """
    place = locate(source)
    path = place.get("modules.json")
    if path is None:
        return {}
    try:
        modules = [
            (module["type"].rpartition(".")[2], module["path"]) for module in json.loads(path.read_text("utf-8"))
        ]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__}: {error}): fetch it again") from None
    kinds = [kind for kind, _ in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ValueError(f"{path}: the model is {' + '.join(kinds)}; bertlite does Transformer + Pooling + Normalize")
    folders = dict(modules)
    found: CheckpointSettings = {"normalize": "Normalize" in folders}
    pooling = place.get(f"{folders['Pooling']}/config.json")
    if pooling is not None:
        values = read_json(pooling)
        modes = values.get("pooling_mode") or [name for key, name in LEGACY_POOLINGS.items() if values.get(key)]
        found["pooling"] = modes if isinstance(modes, str) else "+".join(modes)
    limits = place.get("/".join(filter(None, [folders["Transformer"], "sentence_bert_config.json"])))
    if limits is not None:
        found["max_length"] = read_json(limits).get("max_seq_length")
    return found
