"""The folder of a model to share: weights, tokenizer, names of the labels, card and record.

write_model("smaller", model, "runs/dense/model", figures=[Figure("accuracy", 0.96, 0.95, 0.97, dense=0.97)])
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from bertlite.checkpoint.folders import check_output, replacing
from bertlite.checkpoint.saving import CODE_MODULE, OPTIMISED, SUPERSEDED, write_sorted_json
from bertlite.config import BertConfig, default_labels, kept_heads, kept_neurons
from bertlite.models.base import BertPreTrainedModel
from bertlite.models.remote import export_remote_code
from bertlite.opened.checkpoint import CARD, Checkpoint, is_hub_id
from bertlite.shipping.card import Facts, Figure, make_card, needs_code
from bertlite.shipping.carried import carry_modules, carry_tokenizer, put_map
from bertlite.shipping.vectors import VectorHead
from bertlite.support.files import read_json_object, write_json
from bertlite.support.kinds import checked
from bertlite.tokenizer import BertTokenizer

REPORT = "report.json"
WRITTEN = re.compile(  # files that a new model replaces in a folder
    rf"config\.json|{SUPERSEDED.pattern}|{OPTIMISED.pattern}|{CODE_MODULE}\.py|modules\.json|\d+_\w+|sentence_[\w-]+_config\.json|config_sentence_transformers"
    rf"\.json|{REPORT}|{CARD}|tokenizer(_config)?\.json|vocab\.txt|special_tokens_map\.json"
    r"|added_tokens\.json|onnx|openvino|export\.json"
)


@checked
def write_model(
    folder: str | PathLike[str],
    model: BertPreTrainedModel,
    source: str | PathLike[str],
    *,
    class_names: Sequence[str] = (),
    figures: Sequence[Figure] = (),
    how: Sequence[str] = (),
    report: Mapping[str, Any] | None = None,
    base_model: str | None = None,
    pruned: BertConfig | None = None,
    tokenizer: BertTokenizer | None = None,
    mapped: VectorHead | None = None,
) -> Path:
    """Write a model with all files needed to run it, in one step, and return the folder.

    It holds config.json with the names of the labels, the weights, the tokenizer without truncation or padding,
    sentence-transformers' modules if the source has them for such a model, the card README.md and
    report.json.  If transformers' own BERT cannot load the model, as with a pruned one, code for that is added.
    Other files in the folder are kept.

    Args:
        source: the checkpoint that the model was made from; its tokenizer, modules and license are copied.
        class_names: names of the labels 0, 1, … in the data; they replace only LABEL_0, LABEL_1, ….
        figures: measurements, for card and report.
        how: sentences on how the model was made; plain text.
        report: more entries for report.json, such as an environment and settings; JSON-ready.
        base_model: hub id of the model that this one comes from; by default the source's, or the one in its card.
        pruned: the config with the removed heads and neurons, if the model has them again with zero weights; by
            default the model's own.
        tokenizer: the model's tokenizer, if it is not the source's.
        mapped: how an encoder makes vectors, if a map is the first module after its pooling.

    Raises:
        FileNotFoundError: the source has no tokenizer.
        ValueError: there are more or fewer class names than labels, base_model is not a hub id, a file of the
            source is damaged, or the folder is the source's or holds something else.
    """
    # A wrong argument is an error before a file is written.
    source = Checkpoint.of(source)
    check_model_folder(folder, source)
    config, origin = with_class_names(model.config, class_names), dict(source.card)
    if base_model is not None:
        if not is_hub_id(base_model):
            raise ValueError(f"base_model is {base_model!r}; give the name of a repository on the hub, as me/bert")
        origin["base_model"] = base_model

    folder = Path(folder).expanduser()
    with replacing(folder, superseded=WRITTEN) as new:
        # The model keeps its own names of labels; only the folder gets the data's.
        model.save_pretrained(new)
        saved = {**read_json_object(new / "config.json"), "id2label": config.id2label, "label2id": config.label2id}
        write_sorted_json(new / "config.json", saved)

        # With these, other libraries make the same tokens and the same vectors.
        carry_tokenizer(tokenizer or source.tokenizer, new, config)
        sentences = carry_modules(source, new, type(model)) and type(model).__name__ == "BertModel"
        if mapped is not None:
            put_map(new, mapped)
            sentences = True
        if needs_code(config):
            export_remote_code(new)

        # The card tells people how the model was made and measured; report.json tells programs the same.
        left = config if pruned is None else pruned
        facts = Facts(type(model).__name__, origin, left, sentences, figures, how)
        (new / CARD).write_text(make_card(config, facts), encoding="utf-8")
        write_json(new / REPORT, {**report_of(model, facts), **(report or {})})
    return folder


def report_of(model: BertPreTrainedModel, facts: Facts) -> dict[str, Any]:
    """Return the entries of report.json that every model has."""
    layers = range(facts.left.num_hidden_layers)
    return {
        "what": "bertlite model",
        "class": facts.cls,
        **{name: facts.origin[name] for name in ("base_model",) if name in facts.origin},
        "parameters": model.num_parameters(),
        "heads_kept": [len(kept_heads(facts.left, layer)) for layer in layers],
        "neurons_kept": [len(kept_neurons(facts.left, layer)) for layer in layers],
        "how": list(facts.how),
        "figures": [figure.to_dict() for figure in facts.figures],
    }


def check_model_folder(folder: str | PathLike[str], source: Checkpoint) -> None:
    """Raise ValueError if `write_model` would replace its source, or files that it did not write."""
    report = Path(folder).expanduser() / REPORT
    own = report.is_file() and str(read_json_object(report).get("what")).startswith("bertlite")
    check_output(folder, WRITTEN, source, Path(source.origin.path).parent, own=own)


def with_class_names(config: BertConfig, names: Sequence[str]) -> BertConfig:
    """Return a config with these names of labels, unless it has names of its own.

    Raises:
        ValueError: there are more or fewer names than labels, or two are equal.
    """
    if not names or config.id2label != default_labels(config.num_labels):
        return config
    if len(set(names)) < len(names):
        raise ValueError(f"the class names {', '.join(names)} are not all different")
    if len(names) != config.num_labels:
        raise ValueError(f"there are {len(names)} class names, and the head has {config.num_labels} outputs")
    return replace(config, id2label=dict(enumerate(names)), label2id={name: i for i, name in enumerate(names)})
