"""sentence-transformers' files of a checkpoint: its modules, and how it turns texts into ids.

They are read as sentence-transformers 6.2 reads them; without a modules.json there are no such settings.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from bertlite.checkpoint.files import Folder, Repository
from bertlite.config import read_json_object

Place = Folder | Repository
MODULES, POOLING = "modules.json", "Pooling"
SENTENCE_CONFIG = "config_sentence_transformers.json"
LEGACY_ENCODERS = ("BERT", "RoBERTa", "DistilBERT", "XLMRoBERTa", "CamemBERT", "ALBERT", "XLNet")  # in version 0
ENCODERS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")  # the first counts
TRANSFORMER_CONFIGS = tuple(f"sentence_{name}_config.json" for name in ENCODERS)  # before 2021 each class had its own
LEGACY_POOLINGS = {  # keys of 1_Pooling/config.json in sentence-transformers before it had one `pooling_mode`
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
RENAMED = {"model_args": "model_kwargs", "tokenizer_args": "processor_kwargs", "config_args": "config_kwargs"}
GROUPS = {"model_kwargs": "", "processor_kwargs": "tokenizer_config.json", "config_kwargs": "config.json"}
GROUPS |= {"processing_kwargs": ""}  # groups of TRANSFORMER_CONFIGS: {name: the file whose entries they replace}
OBEYED = ("max_seq_length", "do_lower_case", "processor_kwargs.model_max_length", "processor_kwargs.truncation_side")
NO_EFFECT = (  # entries that change neither token ids nor the float32 states of a text by itself
    *("unpad_inputs", "query_length", "document_length", "query_expansion"),  # for `encode_query` and its like
    *("torch_dtype", "dtype", "attn_implementation", "add_pooling_layer", "device_map", "low_cpu_mem_usage"),
    *("use_fast", "padding_side", "clean_up_tokenization_spaces", "trust_remote_code", "use_safetensors"),
    *("token", "local_files_only", "output_hidden_states", "output_attentions", "use_cache"),
)
OUTPUTS = {  # {task of a Transformer: the usual method, output and name for it}
    task: (task, {"text": {"method": "forward", "method_output_name": output}}, name)
    for task, output, name in (
        ("feature-extraction", "last_hidden_state", "token_embeddings"),
        ("sequence-classification", "logits", "scores"),
    )
}


@dataclass(frozen=True)
class SentenceSettings:
    """The changes that sentence-transformers makes to texts before its tokenizer; plain data.

    Args:
        prompts: {name: the string put before a text}.
        default_prompt_name: the name of the prompt that texts get unless another is asked for; None for none.
        max_seq_length: in tokens, the length to truncate to; None for a checkpoint without these files.
        do_lower_case: lower-case texts, whatever the tokenizer does.
        truncation_side: "right" or "left"; None for the tokenizer's.
        fault: the reason why texts cannot be encoded as sentence-transformers does; empty if they can.
    """

    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    max_seq_length: int | None = None
    do_lower_case: bool = False
    truncation_side: str | None = None
    fault: str = ""

    def check(self) -> None:
        """Raise ValueError if there is a fault."""
        if self.fault:
            raise ValueError(self.fault)

    @property
    def prompt(self) -> str:
        """The default prompt; empty if there is none."""
        return self.prompts.get(self.default_prompt_name or "", "")


def read_sentences(place: Place, longest: int, positions: int | None = None) -> SentenceSettings:
    """Read the settings of a checkpoint.

    Args:
        longest: in tokens, the length to truncate to if sentence-transformers' files state none.
        positions: the most tokens that the model takes.
    """
    modules = read_modules(place)
    if not modules:
        return SentenceSettings()
    whole, (values, path) = read_object(place, SENTENCE_CONFIG), read_transformer(place, modules[0]["path"])
    prompts: dict[str, str] = {name: text for name, text in (whole.get("prompts") or {}).items() if text is not None}
    default, arguments, fault = whole.get("default_prompt_name"), values.get("processor_kwargs") or {}, ""

    # A fault is told when texts are encoded for results: a tokenizer may be loaded for something else.
    if unknown := [f"{name}={value!r}" for name, value in unobeyed(place, values)]:
        fault = f"{path} has {', '.join(unknown)}, which only sentence-transformers obeys: use it, or leave that out"
    elif wrong := [text for text in prompts.values() if not isinstance(text, str)]:
        fault = f"{place.get(SENTENCE_CONFIG)} has the prompt {wrong[0]!r}; prompts must be strings"
    elif default not in (None, "query", "document", *prompts):  # every model has these two
        fault = f"{place.get(SENTENCE_CONFIG)} names the default prompt {default!r}, which is none of its prompts"

    # The shortest limit holds: a longer text would not fit into the model.
    stated = arguments.get("model_max_length") or values.get("max_seq_length") or longest
    lower, side = bool(values.get("do_lower_case")), arguments.get("truncation_side")
    return SentenceSettings(prompts, default, min(stated, positions or stated), lower, side, fault)


def read_transformer(place: Place, inner: str) -> tuple[dict[str, Any], Path | None]:
    """Return the settings of the module that holds the model, by their names in version 6, and their file."""
    for name in TRANSFORMER_CONFIGS:
        path = place.get(str(PurePosixPath(inner) / name))
        if path is not None and (values := read_json_object(path)):
            older = {RENAMED[name]: values.pop(name) for name in RENAMED if name in values}
            return {**values, **older}, path
    return {}, None


def unobeyed(place: Place, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield those settings of `read_transformer` that change results, and that bertlite does not obey."""
    usual = OUTPUTS.get(values.get("transformer_task", "feature-extraction"), ())
    for group, given in values.items():
        parts = (given or {}) if group in GROUPS else {"": given}
        there = read_object(place, GROUPS[group]) if parts and GROUPS.get(group) else {}
        for name, value in parts.items():
            entry = f"{group}.{name}".rstrip(".")
            changes = value not in (None, {}, there.get(name), *usual)
            if changes and entry not in OBEYED and (name or group) not in NO_EFFECT:
                yield entry, value


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
    return list({module.get("name", i): module for i, module in enumerate(modules)}.values())  # the last of a name


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
