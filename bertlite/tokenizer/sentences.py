"""sentence-transformers' files of a checkpoint: its modules, and how it turns texts into ids.

They are read as sentence-transformers 6.2 reads them; without a modules.json there are no such settings.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from bertlite.checkpoint.files import Place
from bertlite.runtime.processing import Processing

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


def read_sentences(place: Place, longest: int, positions: int | None = None) -> Processing:
    """Read the steps before a checkpoint's token ids, which have no entries without sentence-transformers' files.

    Args:
        longest: in tokens, the length to truncate to if sentence-transformers' files state none.
        positions: the most tokens that the model takes.
    """
    modules = read_modules(place)
    if not modules:
        return Processing()
    whole, (values, path) = place.values(SENTENCE_CONFIG), read_transformer(place, modules[0]["path"])
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
    length, side = min(stated, positions or stated), arguments.get("truncation_side")
    lower = bool(values.get("do_lower_case"))
    return Processing(
        prompts=prompts, default_prompt=default, max_length=length, lower_case=lower, truncation_side=side, fault=fault
    )


def read_transformer(place: Place, inner: str) -> tuple[dict[str, Any], Path | None]:
    """Return the settings of the module that holds the model, by their names in version 6, and their file."""
    for name in TRANSFORMER_CONFIGS:
        named = str(PurePosixPath(inner) / name)
        if values := place.values(named):
            older = {RENAMED[name]: values.pop(name) for name in RENAMED if name in values}
            return {**values, **older}, place.get(named)
    return {}, None


def unobeyed(place: Place, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield those settings of `read_transformer` that change results, and that bertlite does not obey."""
    usual = OUTPUTS.get(values.get("transformer_task", "feature-extraction"), ())
    for group, given in values.items():
        parts = (given or {}) if group in GROUPS else {"": given}
        there = place.values(GROUPS[group]) if parts and GROUPS.get(group) else {}
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
        modules: list[dict[str, Any]] = json.loads(place.read(path))
        folders = [PurePosixPath(module["path"]) for module in modules if module["type"].strip()]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__}: {error}): fetch it again") from None
    if outside := [inner for inner in folders if inner.is_absolute() or ".." in inner.parts]:
        raise ValueError(f"{path} points outside its folder, to {str(outside[0])!r}: do not trust this checkpoint")
    return list({module.get("name", i): module for i, module in enumerate(modules)}.values())  # the last of a name


def read_pooling(place: Place) -> dict[str, Any]:
    """Return how a checkpoint pools: its "modes", none if it does not, and "include_prompt"; {} for the defaults."""
    modules = read_modules(place)
    folders = [module["path"] for module in modules if last_name(module["type"]) == POOLING]
    if not folders:
        return {"modes": ()} if modules else {}
    values = place.values(str(PurePosixPath(folders[0]) / "config.json"))
    modes = values.get("pooling_mode") or [name for key, name in LEGACY_POOLINGS.items() if values.get(key)] or "mean"
    modes = (modes,) if isinstance(modes, str) else tuple(modes)
    return {"modes": modes, "include_prompt": bool(values.get("include_prompt", True))}


def is_encoder(kind: str) -> bool:
    """Return whether a module of this type holds the model: Transformer, MLMTransformer, or BERT in version 0."""
    return last_name(kind).endswith("Transformer") or last_name(kind) in LEGACY_ENCODERS


def last_name(name: str) -> str:
    return name.rpartition(".")[2]
