"""sentence-transformers' files of a checkpoint: its modules, and how it turns texts into ids.

They are read as sentence-transformers 6.2 reads them; without a modules.json there are no such settings.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from bertlite.checkpoint.files import Folder, Repository
from bertlite.config import read_json_object

Place = Folder | Repository
MODULES, POOLING = "modules.json", "Pooling"
SENTENCE_CONFIG = "config_sentence_transformers.json"
LEGACY_ENCODERS = ("BERT", "RoBERTa", "DistilBERT", "XLMRoBERTa", "CamemBERT", "ALBERT", "XLNet")  # in version 0
ENCODERS = ("bert", "roberta", "distilbert", "camembert", "xlm-roberta")
TRANSFORMER_CONFIGS = tuple(f"sentence_{name}_config.json" for name in ENCODERS)  # before 2021 each class had its own
LEGACY_POOLINGS = {  # keys of 1_Pooling/config.json in sentence-transformers before it had one `pooling_mode`
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


@dataclass(frozen=True)
class SentenceSettings:
    """The changes that sentence-transformers makes to texts before its tokenizer; plain data.

    Args:
        prompts: {name: the string put before a text}.
        default_prompt_name: the name of the prompt that texts get unless another is asked for; None for none.
        max_seq_length: in tokens, the length to truncate to; None for a checkpoint without these files.
        do_lower_case: lower-case texts, whatever the tokenizer does.
    """

    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    max_seq_length: int | None = None
    do_lower_case: bool = False

    @property
    def prompt(self) -> str:
        """The default prompt; empty if there is none."""
        return self.prompts.get(self.default_prompt_name or "", "")


def read_sentences(place: Place, longest: int) -> SentenceSettings:
    """Read the settings of a checkpoint.

    Args:
        longest: in tokens, the length to truncate to if sentence-transformers' files state none.
    """
    modules = read_modules(place)
    if not modules:
        return SentenceSettings()
    inner = PurePosixPath(modules[0]["path"])
    whole, own = read_object(place, SENTENCE_CONFIG), (read_object(place, str(inner / n)) for n in TRANSFORMER_CONFIGS)
    stated = next(filter(None, own), {})
    return SentenceSettings(
        {name: text for name, text in (whole.get("prompts") or {}).items() if text is not None},
        whole.get("default_prompt_name"),
        stated.get("max_seq_length") or longest,
        bool(stated.get("do_lower_case")),
    )


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


def read_object(place: Place, name: str) -> dict[str, Any]:
    """Return the values of a JSON file of a checkpoint; none if it has no such file."""
    path = place.get(name)
    return {} if path is None else read_json_object(path)


def read_pooling(place: Place) -> tuple[list[str], bool]:
    """Return how a checkpoint of sentence-transformers pools, such as ["mean"], and whether tokens of a prompt count.

    The list is empty if it does not pool.
    """
    folders = [module["path"] for module in read_modules(place) if last_name(module["type"]) == POOLING]
    if not folders:
        return [], True
    values = read_object(place, str(PurePosixPath(folders[0]) / "config.json"))
    modes = values.get("pooling_mode") or [name for key, name in LEGACY_POOLINGS.items() if values.get(key)] or "mean"
    return [modes] if isinstance(modes, str) else list(modes), bool(values.get("include_prompt", True))


def is_encoder(kind: str) -> bool:
    """Return whether a module of this type holds the model: Transformer, MLMTransformer, or BERT in version 0."""
    return last_name(kind).endswith("Transformer") or last_name(kind) in LEGACY_ENCODERS


def last_name(name: str) -> str:
    return name.rpartition(".")[2]
