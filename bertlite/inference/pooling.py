"""The settings of a sentence encoder's checkpoint, and pooling, which makes one vector of those of the tokens.

Shapes:  B sequences · T tokens, of all sequences together · D hidden
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import torch
from torch import Tensor

from bertlite.checkpoint.files import Folder, Repository, Source, locate
from bertlite.config import read_json_object

Place = Folder | Repository
MODULES, POOLING = "modules.json", "Pooling"
POOLINGS = ("cls", "mean", "max", "lasttoken")
LEGACY_POOLINGS = {  # keys of 1_Pooling/config.json in sentence-transformers before it had one `pooling_mode`
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


# Settings of sentence-transformers' modules that change a vector, and the one value that bertlite supports.
VECTORS = {"module_input_name": "sentence_embedding", "module_output_name": "sentence_embedding"}
TRANSFORMER = {
    "transformer_task": "feature-extraction",
    "module_output_name": "token_embeddings",
    **dict.fromkeys(("processing_kwargs", "query_length", "document_length", "query_expansion")),
    **dict.fromkeys(
        ("model_args", "model_kwargs", "tokenizer_args", "processor_kwargs", "config_args", "config_kwargs")
    ),
    "tokenizer_name_or_path": None,
}
SENTENCES = {"model_type": "SentenceTransformer"}


def pool(states: Tensor, lengths: Sequence[int], pooling: str) -> Tensor:
    """Return one vector for each sequence: its first or last token's, or the mean or maximum over its tokens.

    Args:
        states: (T, D), the tokens of one sequence after another.
        lengths: of the sequences, in tokens.
        pooling: a name of POOLINGS.

    Returns:
        (B, D); float32 if the states are in half precision.

    Raises:
        ValueError: another name.
    """
    states = states.float() if states.dtype in (torch.float16, torch.bfloat16) else states
    counts = torch.tensor(lengths, dtype=torch.long, device=states.device)
    if pooling == "cls":
        return states[counts.cumsum(0) - counts]
    if pooling == "lasttoken":
        return states[counts.cumsum(0) - 1]
    if pooling not in POOLINGS:
        raise ValueError(f"pooling {pooling!r} is unknown; have: {', '.join(POOLINGS)}")
    return torch.segment_reduce(states, pooling, lengths=counts)


def read_settings(source: Source) -> dict[str, Any]:
    """Read the settings of a checkpoint's vectors in the format of sentence-transformers 6.2: those that it states.

    Raises:
        ValueError: the checkpoint has other modules or unsupported settings of them, or a file is damaged.
    """
    place = locate(source)
    found: dict[str, Any] = {"max_length": read_limit(place)}
    modules = [(kind_of(module["type"]), module["path"]) for module in read_modules(place)]
    if not modules:
        return found
    path, kinds = place.get(MODULES), [kind for kind, _ in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ValueError(f"{path}: the model is {' + '.join(kinds)}; bertlite reads Transformer + Pooling + Normalize")
    folders = dict(modules)
    found["normalize"] = "Normalize" in folders
    if found["normalize"]:
        read_module(place, folders["Normalize"], "config.json", VECTORS)
    found["pooling"] = read_pooling(place)
    found["include_prompt"] = bool(read_module(place, folders["Pooling"], "config.json").get("include_prompt", True))
    transformer = read_module(place, folders["Transformer"], "sentence_bert_config.json", TRANSFORMER)
    found["max_length"] = transformer.get("max_seq_length") or found["max_length"]
    found["do_lower_case"] = bool(transformer.get("do_lower_case"))
    stated = read_module(place, "", "config_sentence_transformers.json", SENTENCES)
    found["prompts"] = {name: text or "" for name, text in (stated.get("prompts") or {}).items()}
    found["default_prompt_name"], found["truncate_dim"] = stated.get("default_prompt_name"), stated.get("truncate_dim")
    return found


def read_modules(place: Place) -> list[dict[str, Any]]:
    """Read the modules of sentence-transformers, each with its "type" and "path"; none without a modules.json.

    Raises:
        ValueError: modules.json is damaged, or names a folder outside the checkpoint.
    """
    path = place.get(MODULES)
    if path is None:
        return []
    try:
        modules: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
        folders = [PurePosixPath(module["path"]) for module in modules if module["type"].strip()]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__}: {error}): fetch it again") from None
    if outside := [inner for inner in folders if inner.is_absolute() or ".." in inner.parts]:
        raise ValueError(f"{path} points outside its folder, to {str(outside[0])!r}: do not trust this checkpoint")
    return modules


def read_pooling(place: Place) -> str | None:
    """Return how a checkpoint of sentence-transformers pools, such as "mean" or "cls+max"; None if it does not."""
    folders = [module["path"] for module in read_modules(place) if last_name(module["type"]) == POOLING]
    if not folders:
        return None
    pooling = read_module(place, folders[0], "config.json")
    modes = pooling.get("pooling_mode") or [name for key, name in LEGACY_POOLINGS.items() if pooling.get(key)]
    return modes if isinstance(modes, str) else "+".join(modes)


def last_name(name: str) -> str:
    return name.rpartition(".")[2]


def kind_of(name: str) -> str:
    """Return the class name of a module of sentence-transformers, or the full name of a foreign one."""
    return last_name(name) if name.startswith("sentence_transformers.") else name


def read_limit(place: Place) -> int | None:
    """Return the `model_max_length` of a checkpoint's tokenizer."""
    path = place.get("tokenizer_config.json")
    values = {} if path is None else read_json_object(path)
    return values.get("model_max_length", values.get("max_len"))


def read_module(place: Place, folder: str, name: str, fixed: Mapping[str, object] | None = None) -> dict[str, Any]:
    """Read the config of a module, if it has one.

    Raises:
        ValueError: a setting has another value than `fixed`, the one that bertlite supports.
    """
    path = place.get(f"{folder}/{name}".lstrip("/"))
    values = {} if path is None else read_json_object(path)
    for key, done in (fixed or {}).items():
        if values.get(key) not in (None, {}, done):
            raise ValueError(f"{path} has {key} {values[key]!r}; bertlite's embedder supports only {done!r}")
    return values
