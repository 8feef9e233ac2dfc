"""Inspect a checkpoint: list its contents, and predict whether bertlite and transformers load it.

The statements about transformers hold for 4.57.6 and 5.24.0.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from bertlite.checkpoint.families import BERT, Origin
from bertlite.checkpoint.names import (
    DECODER,
    DECODER_BIAS,
    HEAD_BIAS,
    WRAPPER_PREFIXES,
    body_prefix,
    current_name,
    decoder_differs,
    legacy_part,
    missing_names,
    missing_parts,
)
from bertlite.checkpoint.reading import State, read_tensors
from bertlite.checkpoint.saving import dtype_name
from bertlite.checkpoint.skeleton import make_skeleton
from bertlite.config import POSITIONS, BertConfig, differs_from_bert, kept_heads, kept_neurons
from bertlite.models.base import BertPreTrainedModel
from bertlite.models.body import LanguageModelBody
from bertlite.opened.checkpoint import Checkpoint, class_of
from bertlite.runtime.packed import FILE, read_packed
from bertlite.runtime.tasks import ABOUT, is_packed, read_runtime_json
from bertlite.support.activations import ONLY_HERE
from bertlite.support.kinds import checked
from bertlite.support.progress import count_of

SAME, DIFFERS, FAILS = "same", "differs", "fails"  # outcomes, from good to bad
ONLY_5 = ("hardswish", "sqrtsoftplus")  # activations that transformers 4 does not know
NO_PRUNING = (
    "does not support pruned heads: it fails on smaller matrices, initialises them at random with"
    " ignore_mismatched_sizes=True, and uses every head of full-size ones.  bertlite.pruning.densify makes a"
    " checkpoint for it, and bertlite.hf.export_remote_code one for trust_remote_code=True"
)
MOST_SHOWN = 3


@checked
def inspect(checkpoint: str | PathLike[str]) -> dict[str, Any]:
    """Return the contents of a checkpoint and the outcomes of loading it, JSON-ready.

    Args:
        checkpoint: a folder, a weights file in a folder with its config.json, or a hub id; or a packed folder.

    Returns:
        "num_hidden_layers"; "heads" and "neurons", each as built and as kept by layer; "dtypes" and "parameters" as
        stored; "legacy_names", and more.  "bertlite", "transformers 4" and "transformers 5" each have an "outcome"
        with its reasons as "notes".  "same": the checkpoint loads and computes the right result.  "differs": it loads
        and computes a wrong result.  "fails": it does not load or does not run.  A packed folder has its "kind",
        "dtype" and "reproducible", and as "made" the checkpoint, bertlite's version, and the share of results kept.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        ValueError: a file is damaged, or the config is not a BERT's.
    """
    source = Checkpoint.of(checkpoint)
    if is_packed(source):
        return inspect_packed(Path(source).expanduser())

    # Everything is read from the files themselves; no model is loaded.
    files, origin, cls = source.files, source.origin, class_of(source.config)
    stored = read_tensors(files)
    _, config = origin.build(cls, {}, {}, stored)
    fit = source.fit(cls, stored)

    # Each transformers loads a BERT as such, and another family by its own class.
    outcomes = {}
    for version, findings in ((4, in_transformers_4), (5, in_transformers_5)):
        found = findings(cls, config, stored) if origin.family is BERT else [as_its_family(origin, version)]
        outcomes[f"transformers {version}"] = combine_findings(found)

    names = ("num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings", "position_embedding_type")
    layers = range(config.num_hidden_layers)
    weights = sorted(files.shards) or [files.weights]
    return {
        "what": "bertlite inspect",
        "checkpoint": str(checkpoint),
        "class": cls.__name__,
        "model_type": origin.kind,
        "becomes": origin.family.becomes,
        # The files that loading it would read.
        "files": [path.name for path in (files.config, files.weights, *sorted(files.shards))],
        "bytes": sum(path.stat().st_size for path in weights),
        **{name: getattr(config, name) for name in names},
        # The units that are left, and the tensors that are too many or missing.
        "heads": {"built": config.num_attention_heads, "kept": [list(kept_heads(config, layer)) for layer in layers]},
        "neurons": {"built": config.intermediate_size, "kept": [len(kept_neurons(config, layer)) for layer in layers]},
        "parameters": sum(t.numel() for t in stored.values() if t.is_floating_point()),
        "dtypes": dict(Counter(dtype_name(t.dtype) for t in stored.values() if t.is_floating_point()).most_common()),
        "absent": sorted(fit.absent),
        "unused": fit.unused,
        "legacy_names": dict(Counter(part for name in stored if (part := legacy_part(name)))),
        # The outcome of loading it here, and in each transformers.
        "bertlite": {"outcome": FAILS if fit.faults else SAME, "notes": fit.faults},
        **outcomes,
    }


def inspect_packed(folder: Path) -> dict[str, Any]:
    """Return the contents of a packed folder, whose checksums are compared."""
    about, file = read_runtime_json(folder / ABOUT), read_packed(folder / FILE, words_later=True)
    shape, files = file.about["shape"], sorted(path for path in folder.iterdir() if path.is_file())
    elsewhere = {"outcome": FAILS, "notes": ["it is for bertlite.runtime: name the checkpoint that it was made from"]}

    return {
        "what": "bertlite inspect",
        "checkpoint": str(folder),
        "class": file.about["class"],
        "kind": about.kind,
        "dtype": file.dtype,
        "reproducible": file.about.get("reproducible") is True,
        "made": about.made,
        # Its sizes, its labels and its files.
        "num_hidden_layers": len(shape["layers"]),
        "max_length": about.max_length,
        "labels": about.labels,
        "files": [path.name for path in files],
        "bytes": sum(path.stat().st_size for path in files),
        "bertlite": {"outcome": SAME, "notes": ["runs in bertlite.runtime, `bertlite embed` and `bertlite evaluate`"]},
        **{f"transformers {version}": elsewhere for version in (4, 5)},
    }


# transformers -------------------------------------------------------------------------------------------------------

Finding = tuple[str, str]  # an outcome and a note


def combine_findings(findings: Iterable[Finding]) -> dict[str, Any]:
    """Return the worst of the outcomes, and all notes."""
    found = list(findings)
    worst = max((outcome for outcome, _ in found), key=[*OUTCOMES].index, default=SAME)
    return {"outcome": worst, "notes": [note for _, note in found]}


def as_its_family(origin: Origin, version: int) -> Finding:
    """Return whether a transformers has a checkpoint's own class."""
    if origin.family.since is not None and origin.family.since <= version:
        return SAME, f"as a {origin.kind!r} model"
    return FAILS, f"does not know {origin.kind!r} models; `bertlite convert` makes one for trust_remote_code=True"


def in_any_transformers(config: BertConfig) -> Iterator[Finding]:
    if differs_from_bert(config):
        yield FAILS, f"refuses hidden_act {ONLY_HERE + config.hidden_act!r}: it would compute something else"
    elif config.positions_skip_padding:
        yield SAME, "but gives the tokens of left-padded rows other positions"


def in_transformers_4(cls: type[BertPreTrainedModel], config: BertConfig, stored: State) -> Iterator[Finding]:
    yield from in_any_transformers(config)
    yield from tensors_in(cls, replace(config, pruned_neurons={}), stored)
    headless = [layer for layer in range(config.num_hidden_layers) if not kept_heads(config, layer)]
    if headless:
        yield FAILS, f"fails when it runs layers without heads ({format_some(headless)})"
    if config.hidden_act in ONLY_5:
        yield FAILS, f"does not support hidden_act {config.hidden_act!r}"
    if DECODER_BIAS in stored and HEAD_BIAS not in stored and issubclass(cls, LanguageModelBody):
        yield FAILS, f"does not load {HEAD_BIAS} from {DECODER_BIAS}"
    if decoder_differs(config, stored):
        yield DIFFERS, f"ignores {DECODER}, which differs from the word embeddings, and uses the embeddings"
    if any(t.is_floating_point() and t.element_size() < 4 for t in stored.values()):
        yield SAME, "converts the weights to float32, unless dtype= is passed"


def in_transformers_5(cls: type[BertPreTrainedModel], config: BertConfig, stored: State) -> Iterator[Finding]:
    yield from in_any_transformers(config)
    whole = replace(config, pruned_heads={}, pruned_neurons={}, position_embedding_type="absolute")
    yield from tensors_in(cls, whole, stored)
    if config.pruned_heads:
        yield DIFFERS, NO_PRUNING
    if (kind := POSITIONS[config.position_embedding_type]).in_bert and kind.in_scores:
        yield DIFFERS, f"computes absolute positions instead of {config.position_embedding_type}"
    untied = not config.tie_word_embeddings and issubclass(cls, LanguageModelBody)
    if untied and HEAD_BIAS in stored and DECODER_BIAS not in stored:
        yield DIFFERS, f"initialises {DECODER_BIAS}, which it does not tie to {HEAD_BIAS}"
    if decoder_differs(config, stored):
        yield SAME, f"uses {DECODER}, which differs from the word embeddings, although the config ties them"


def tensors_in(cls: type[BertPreTrainedModel], config: BertConfig, stored: State) -> Iterator[Finding]:
    """Yield the findings from names and shapes, for a transformers that reads this config."""
    model = make_skeleton(cls, config, {})
    wanted: State = model.state_dict()
    base = body_prefix(model)

    # The tensors as this transformers renames them, and as its model wants them.
    names = {name: name if name.startswith(WRAPPER_PREFIXES) else current_name(name, base) for name in stored}
    state = {new: stored[name] for name, new in names.items() if new}  # transformers keeps a wrapper's prefix

    # Shared tensors are made from others, so a file need not hold them.
    for shared in (HEAD_BIAS, DECODER_BIAS, *([DECODER] if config.tie_word_embeddings else [])):
        wanted.pop(shared, None)

    absent = missing_parts(state, wanted, config)
    lost = missing_names(state, wanted, absent)
    wrong = [name for name, t in state.items() if name in wanted and t.shape != wanted[name].shape]
    ignored = [name for name in state if re.match(r"(bert\.)?(embeddings|encoder)\.", name) and name not in wanted]

    # The worst first: an error, then wrong numbers, then mere warnings.
    if wrong:
        yield FAILS, f"fails on the sizes of {len(wrong)} tensors: {format_some(wrong)}"
    if lost:
        yield DIFFERS, f"initialises {len(lost)} tensors at random, with a warning: {format_some(lost)}"
    elif absent:
        yield SAME, f"initialises the absent parts, with a warning: {', '.join(sorted(absent))}"
    if ignored:
        yield DIFFERS, f"ignores {len(ignored)} tensors: {format_some(ignored)}"


# Printing -----------------------------------------------------------------------------------------------------------


def format_some(values: Sequence[str | int]) -> str:
    """Return the first few values, and the number of the rest."""
    more = f" and {len(values) - MOST_SHOWN} more" if len(values) > MOST_SHOWN else ""
    return ", ".join(map(str, values[:MOST_SHOWN])) + more


def format_report(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines that `bertlite inspect` prints."""
    yield from format_packed(found) if "made" in found else format_contents(found)
    for library in ("bertlite", "transformers 4", "transformers 5"):
        yield f"{library}: {OUTCOMES[found[library]['outcome']]}"
        yield from (f"  {note}" for note in found[library]["notes"])


def format_packed(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines about a packed folder."""
    made = found["made"]
    dtype = f"{found['dtype']}, the same bits on every processor" if found["reproducible"] else found["dtype"]
    yield f"{found['checkpoint']}: a packed {found['kind']}, {dtype}"
    yield f"  made from {made['checkpoint']} by bertlite {made['bertlite']}" if made else "  no note of its checkpoint"
    kept = made["kept"] if made else {}
    yield from (f"  {name}: {share:.4f}" for name, share in kept.items() if share is not None)
    yield f"  {count_of(found['num_hidden_layers'], 'layer')}, texts of at most {found['max_length']} tokens"
    yield from [f"  labels: {format_some(found['labels'])}"] if found["labels"] else []
    yield f"  {', '.join(found['files'])}: {found['bytes'] / 1e6:,.1f} MB"


def format_contents(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines about a checkpoint."""
    layers, built, neurons = found["num_hidden_layers"], found["heads"]["built"], found["neurons"]["built"]
    dtypes = ", ".join(found["dtypes"])

    # The same lines for every checkpoint: its class, its sizes and its files.
    yield f"{found['checkpoint']}: {found['class']}, {found['parameters']:,} parameters, {dtypes}"
    yield f"  {count_of(layers, 'layer')} of {found['hidden_size']:,}, {built} heads and {neurons:,} neurons each"
    kind = found["position_embedding_type"]
    yield f"  {found['vocab_size']:,} words, {found['max_position_embeddings']:,} positions ({kind})"
    yield f"  {', '.join(found['files'])}: {found['bytes'] / 1e6:,.1f} MB"

    # And a line for each unusual thing: another family, pruned layers, old or missing tensors.
    if found["model_type"] != "bert":
        yield f"  {found['model_type']}, which becomes a BERT: {found['becomes'] or 'other names'}"
    for layer, (kept, wide) in enumerate(zip(found["heads"]["kept"], found["neurons"]["kept"], strict=True)):
        if len(kept) < built or wide < neurons:
            heads = f"{count_of(len(kept), 'head')} ({', '.join(map(str, kept)) or 'none'})"
            yield f"  layer {layer} keeps {heads}, {wide} neurons"
    for part, count in found["legacy_names"].items():
        yield f"  {count_of(count, 'legacy name')} with {part}"
    if found["absent"]:
        yield f"  absent: {', '.join(found['absent'])}"
    if found["unused"]:
        yield f"  not used, as no BERT has them: {format_some(found['unused'])}"


OUTCOMES = {
    SAME: "loads it",
    DIFFERS: "loads it, and computes a wrong result",
    FAILS: "does not load it, or does not run it",
}
