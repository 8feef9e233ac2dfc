"""What a checkpoint holds, and what bertlite and transformers make of it.  Weights are mapped and not read.

What transformers does is that of 4.57.6 and of 5.23.0.
"""

import argparse
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bertlite.checkpoint.checks import find_mismatches, stored_dtype
from bertlite.checkpoint.files import Source, find_checkpoint
from bertlite.checkpoint.names import (
    DECODER,
    DECODER_BIAS,
    FORMER_BUFFERS,
    HEAD_BIAS,
    LEGACY_SUFFIXES,
    WORD_EMBEDDINGS,
    WRAPPER_PREFIXES,
    apply_current_names_,
    body_prefix,
    current_name,
    equal_tensors,
    fill_shared_names_,
    missing_parts,
    optional_part,
)
from bertlite.checkpoint.reading import State, read_tensors
from bertlite.checkpoint.saving import dtype_name
from bertlite.checkpoint.skeleton import make_skeleton
from bertlite.config import BertConfig, kept_heads, kept_neurons
from bertlite.heads import models as heads
from bertlite.model import BertModel, BertPreTrainedModel
from bertlite.records import write_json

SAME, DIFFERS, FAILS = "same", "differs", "fails"  # what becomes of a checkpoint, from good to bad
ONLY_5 = ("hardswish", "sqrtsoftplus")  # activations that transformers 4 does not know
NO_PRUNING = (
    "knows no pruned heads: it refuses smaller matrices, fills them at random with ignore_mismatched_sizes=True, and"
    " uses every head of full-size ones.  bertlite.densify makes a checkpoint for it, and"
    " bertlite.hf.export_remote_code one with code for it to trust"
)
MOST_SHOWN = 3


def main(args: argparse.Namespace) -> int:
    found = inspect(args.checkpoint, revision=args.revision)
    if args.json:
        write_json(args.json, found)
    print("\n".join(told(found)))
    return int(found["bertlite"]["outcome"] != SAME)


def inspect(checkpoint: str | Path, *, revision: str | None = None) -> dict[str, Any]:
    """What a checkpoint holds; JSON-ready.

    Args:
        checkpoint: a folder, a weights file with its config.json beside it, or a hub id.

    Returns:
        Among others "layers"; "heads" and "neurons", each as built and as kept by layer; "dtypes" and "parameters" as
        stored; "legacy_names"; and under "bertlite", "transformers 4" and "transformers 5" an "outcome": "same", it
        loads and computes what it should; "differs", it loads and computes something else; "fails", it does not load
        or does not run.  "notes" say why.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        ValueError: a file is damaged, or the config is not a BERT's.
    """
    files = find_checkpoint(Source(checkpoint, revision))
    config = BertConfig.from_json_file(files.config)
    stored = read_tensors(files)
    cls = class_of(config)
    absent, faults = fitted(cls, config, stored)
    names = ("num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings", "position_embedding_type")
    layers = range(config.num_hidden_layers)
    weights = sorted(files.shards) or [files.weights]
    return {
        "what": "bertlite inspect",
        "checkpoint": str(checkpoint),
        "class": cls.__name__,
        "files": [
            files.config.name,
            *([files.weights.name] if files.shards else []),
            *(path.name for path in weights),
        ],
        "bytes": sum(path.stat().st_size for path in weights),
        **{name: getattr(config, name) for name in names},
        "heads": {"built": config.num_attention_heads, "kept": [list(kept_heads(config, layer)) for layer in layers]},
        "neurons": {"built": config.intermediate_size, "kept": [len(kept_neurons(config, layer)) for layer in layers]},
        "parameters": sum(t.numel() for t in stored.values() if t.is_floating_point()),
        "dtypes": dict(Counter(dtype_name(t.dtype) for t in stored.values() if t.is_floating_point()).most_common()),
        "absent": sorted(absent),
        "legacy_names": dict(Counter(kind for name in stored if (kind := legacy(name)))),
        "bertlite": {"outcome": FAILS if faults else SAME, "notes": faults},
        "transformers 4": verdict(in_transformers_4(cls, config, stored)),
        "transformers 5": verdict(in_transformers_5(cls, config, stored)),
    }


def class_of(config: BertConfig) -> type[BertPreTrainedModel]:
    """The class that the config names, if it is one of bertlite's; else BertModel."""
    named = [name for name in config.extra.get("architectures") or () if isinstance(name, str)]
    classes = {cls.__name__: cls for cls in vars(heads).values() if isinstance(cls, type)}
    found = classes.get(named[0], BertModel) if named else BertModel
    return found if issubclass(found, BertPreTrainedModel) else BertModel


def fitted(cls: type[BertPreTrainedModel], config: BertConfig, stored: State) -> tuple[set[str], list[str]]:
    """The parts that `cls.from_pretrained` would initialise, and the faults it would find."""
    model, state = make_skeleton(cls, config, {}), dict(stored)
    wanted: State = model.state_dict()
    faults = apply_current_names_(state, "", model)
    absent = missing_parts(state, wanted, config)
    _, mixed = stored_dtype(state, wanted)
    return absent, faults + fill_shared_names_(state, "", model) + find_mismatches(
        state, wanted, config, absent
    ) + mixed


def legacy(name: str) -> str | None:
    """What of a tensor's name is of the past."""
    for wrapper in WRAPPER_PREFIXES:
        if name.startswith(wrapper):
            return wrapper
    old = next((old for old in LEGACY_SUFFIXES if name.endswith(old)), None)
    return old or next((constant for constant in FORMER_BUFFERS if name.endswith(constant)), None)


# What transformers does ---------------------------------------------------------------------------------------------

Fact = tuple[str, str]  # an outcome and its note


def verdict(facts: Iterator[Fact]) -> dict[str, Any]:
    """The worst of the outcomes, and all notes."""
    found = list(facts)
    outcomes = [outcome for outcome, _ in found]
    worst = next((outcome for outcome in (FAILS, DIFFERS) if outcome in outcomes), SAME)
    return {"outcome": worst, "notes": [note for _, note in found]}


def in_transformers_4(cls: type[BertPreTrainedModel], config: BertConfig, stored: State) -> Iterator[Fact]:
    yield from tensors_in(cls, replace(config, pruned_neurons={}), stored)
    headless = [layer for layer in range(config.num_hidden_layers) if not kept_heads(config, layer)]
    if headless:
        yield FAILS, f"loads layers without heads ({format_units(headless)}), and stops when it runs them"
    if config.hidden_act in ONLY_5:
        yield FAILS, f"does not know hidden_act {config.hidden_act!r}"
    if DECODER_BIAS in stored and HEAD_BIAS not in stored and predicts(cls):
        yield FAILS, f"does not find {HEAD_BIAS} under its name {DECODER_BIAS}"
    if decoder_differs(config, stored):
        yield DIFFERS, f"drops {DECODER}, which differs from the word embeddings, and uses these"
    if any(t.is_floating_point() and t.element_size() < 4 for t in stored.values()):
        yield SAME, "makes the weights float32, unless dtype= says otherwise"


def in_transformers_5(cls: type[BertPreTrainedModel], config: BertConfig, stored: State) -> Iterator[Fact]:
    whole = replace(config, pruned_heads={}, pruned_neurons={}, position_embedding_type="absolute")
    yield from tensors_in(cls, whole, stored)
    if config.pruned_heads:
        yield DIFFERS, NO_PRUNING
    if config.position_embedding_type != "absolute":
        yield DIFFERS, f"takes {config.position_embedding_type} positions for absolute ones"
    if not config.tie_word_embeddings and HEAD_BIAS in stored and DECODER_BIAS not in stored and predicts(cls):
        yield DIFFERS, f"makes {DECODER_BIAS} anew, which it takes for another than {HEAD_BIAS}"
    if decoder_differs(config, stored):
        yield SAME, f"uses {DECODER}, which differs from the word embeddings, in spite of tie_word_embeddings"


def tensors_in(cls: type[BertPreTrainedModel], config: BertConfig, stored: State) -> Iterator[Fact]:
    """What follows from names and shapes, in a transformers for which the config means this."""
    model = make_skeleton(cls, config, {})
    wanted: State = model.state_dict()
    base = body_prefix(model)
    state = {new: t for name, t in stored.items() if (new := theirs(name, base))}
    for shared in (HEAD_BIAS, DECODER_BIAS, *([DECODER] if config.tie_word_embeddings else [])):
        wanted.pop(shared, None)
    absent = missing_parts(state, wanted, config)
    missing = [name for name in wanted if name not in state]
    lost = [name for name in missing if optional_part(name) not in absent]
    wrong = [name for name, t in state.items() if name in wanted and t.shape != wanted[name].shape]
    left = [name for name in state if re.match(r"(bert\.)?(embeddings|encoder)\.", name) and name not in wanted]
    if wrong:
        yield FAILS, f"refuses {len(wrong)} tensors for their sizes: {format_units(wrong)}"
    if lost:
        yield DIFFERS, f"fills {len(lost)} tensors at random, with a warning: {format_units(lost)}"
    elif missing:
        yield SAME, f"initialises what is absent, with a warning: {', '.join(sorted(absent))}"
    if left:
        yield DIFFERS, f"leaves out {len(left)} tensors: {format_units(left)}"


def theirs(name: str, base: str) -> str | None:
    """What transformers makes of a tensor's name: as bertlite does, but for wrappers."""
    return name if name.startswith(WRAPPER_PREFIXES) else current_name(name, base)


def predicts(cls: type[BertPreTrainedModel]) -> bool:
    return cls in (heads.BertForMaskedLM, heads.BertForPreTraining, heads.BertLMHeadModel)


def decoder_differs(config: BertConfig, stored: State) -> bool:
    """Whether a decoder that the config ties is another matrix: the one question for which weights are read."""
    if not (config.tie_word_embeddings and DECODER in stored):
        return False
    words = stored.get(WORD_EMBEDDINGS, stored.get(WORD_EMBEDDINGS.removeprefix("bert.")))
    return words is not None and not equal_tensors(stored[DECODER], words)


# Telling ------------------------------------------------------------------------------------------------------------


def format_units(things: list[Any]) -> str:
    more = f" and {len(things) - MOST_SHOWN} more" if len(things) > MOST_SHOWN else ""
    return ", ".join(map(str, things[:MOST_SHOWN])) + more


def told(found: Mapping[str, Any]) -> Iterator[str]:
    layers, built, neurons = found["num_hidden_layers"], found["heads"]["built"], found["neurons"]["built"]
    kinds = ", ".join(found["dtypes"])
    yield f"{found['checkpoint']}: {found['class']}, {found['parameters']:,} parameters, {kinds}"
    yield f"  {layers} layers of {found['hidden_size']}, {built} heads and {neurons} neurons each"
    yield (
        f"  {found['vocab_size']} words, {found['max_position_embeddings']} positions"
        f" ({found['position_embedding_type']})"
    )
    yield f"  {', '.join(found['files'])}: {found['bytes'] / 1e6:,.1f} MB"
    for layer, (kept, wide) in enumerate(zip(found["heads"]["kept"], found["neurons"]["kept"], strict=True)):
        if len(kept) < built or wide < neurons:
            yield f"  layer {layer} keeps {len(kept)} heads ({', '.join(map(str, kept)) or 'none'}), {wide} neurons"
    for kind, count in found["legacy_names"].items():
        yield f"  {count} names of the past, with {kind}"
    if found["absent"]:
        yield f"  absent: {', '.join(found['absent'])}"
    for who in ("bertlite", "transformers 4", "transformers 5"):
        yield f"{who}: {WORDING[found[who]['outcome']]}"
        yield from (f"  {note}" for note in found[who]["notes"])


WORDING = {
    SAME: "loads it",
    DIFFERS: "loads it, and computes something else",
    FAILS: "does not load it, or does not run it",
}
