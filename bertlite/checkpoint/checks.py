"""Compare tensors with a model's: every fault is listed, with the way out."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bertlite.checkpoint.faults import MOST_SHOWN
from bertlite.checkpoint.names import (
    HEAD_PARTS,
    LoadableModel,
    apply_current_names_,
    fill_shared_names_,
    missing_names,
    missing_parts,
    optional_part,
)
from bertlite.checkpoint.reading import State
from bertlite.config import BertConfig, pruned_neurons
from bertlite.stack.positions import PROJECTIONS

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LAYER_NAME = re.compile(r"(?:bert\.)?encoder\.layer\.(\d{1,9})\.")
HEAD_AXES = {  # the tensors that shrink with the heads of a layer, and along which axis
    **{f"self.{part}.{kind}": 0 for part in PROJECTIONS for kind in ("weight", "bias")},
    "output.dense.weight": 1,
}
NEURON_AXES = {  # the tensors that shrink with its neurons
    **{f"intermediate.{part}.{kind}": 0 for part in ("dense", "factor") for kind in ("weight", "bias")},
    "output.dense.weight": 1,
}
NONFINITE = "cannot be used: its outputs would be nan, since"
HARMLESS_SIZE = 2**16  # a size at which a skeleton model costs nothing


def implausible_sizes(state: State, config: BertConfig) -> list[str]:
    """Return faults of sizes in the config that no tensor has and that would make even a skeleton model slow."""
    longest = max([HARMLESS_SIZE, *(size for tensor in state.values() for size in tensor.shape)])
    gone = max((len({*units}) for units in pruned_neurons(config).values()), default=0)
    faults = []
    for name in ("hidden_size", "num_attention_heads", "intermediate_size"):
        if (size := getattr(config, name)) > longest + gone:
            faults.append(f"{name} is {size}, but no tensor is longer than {longest}")
    if config.num_hidden_layers > max(64, len(state)):
        faults.append(f"num_hidden_layers is {config.num_hidden_layers}, but there are {len(state)} tensors in all")
    return faults


def nonfinite_tensors(state: State) -> list[str]:
    """Return faults of tensors that hold nan or infinity; each is read once, without a copy.

    A sum is the fastest way to find them.  Large numbers may overflow it too: then the extremes decide.  A quantised
    tensor supports few operators, so its plain parts are read.
    """
    parts = dict(part for name, t in state.items() for part in plain_parts(name, t))
    floats = {name: t for name, t in parts.items() if t.is_floating_point() and t.numel() and not t.is_meta}
    sums: dict[torch.device, list[Tensor]] = {}
    for t in floats.values():
        sums.setdefault(t.device, []).append(t.sum().double())
    if all(bool(torch.stack(each).isfinite().all()) for each in sums.values()):  # one wait for the device
        return []
    bad = [(name, str(t.dtype)) for name, t in floats.items() if not all(end.isfinite() for end in t.aminmax())]
    return [f"{name} holds nan or inf in {dtype.removeprefix('torch.')}" for name, dtype in bad]


def plain_parts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Return a tensor under its name, or the parts of a tensor of another class, such as codes and scales."""
    flatten = getattr(tensor, "__tensor_flatten__", None)  # torch.compile takes it apart with this
    if flatten is None:
        yield name, tensor
    else:
        for part in flatten()[0]:
            yield from plain_parts(f"{name}.{part}", getattr(tensor, part))


@dataclass(frozen=True)
class Fit:
    """The result of comparing the tensors of a checkpoint with a model.

    Args:
        absent: the parts without any tensor, such as "pooler".
        dtype: the dtype of the checkpoint.
        faults: everything that does not fit the model, in any dtype.
        mixed_dtypes: the fault of having several dtypes, if no dtype is requested.
        unused: tensors that belong neither to the model nor to a known head.
    """

    absent: set[str]
    dtype: torch.dtype
    faults: list[str]
    mixed_dtypes: list[str]
    unused: list[str]


def fit_tensors_(state: State, wanted: State, model: LoadableModel) -> Fit:
    """Rename tensors to the model's names, in place, and compare them with the model's.

    Args:
        wanted: the model's own tensors; only their names, shapes and dtypes are read.
    """
    faults = apply_current_names_(state, "", model)
    absent = missing_parts(state, wanted, model.config)
    dtype, mixed_dtypes = stored_dtype(state, wanted)
    faults += fill_shared_names_(state, "", model) + find_mismatches(state, wanted, model.config, absent)
    unused = [name for name in state if name not in wanted and optional_part(name) not in (None, *HEAD_PARTS)]
    return Fit(absent, dtype, faults, mixed_dtypes, unused)


def find_mismatches(state: State, wanted: State, config: BertConfig, absent: set[str]) -> list[str]:
    """Return the faults of tensors that do not fit a model.

    Args:
        wanted: the model's own tensors; only their shapes are read.
        absent: the parts that may be missing.
    """
    checked = {optional_part(name) for name in wanted} - absent
    missing = missing_names(state, wanted, absent)
    unknown = [name for name in state if name not in wanted and optional_part(name) in checked]

    # A file of something else would give a line for every tensor.
    if not any(name in state for name in wanted if optional_part(name) is None):
        return [f"it is not a BERT: its tensors are {', '.join(list(state)[:3]) or 'none'} …"]

    # If the number of layers is wrong, that is one fault, and only layers that both have are compared.
    faults = []
    stated, there = config.num_hidden_layers, {int(match[1]) for name in state if (match := LAYER_NAME.match(name))}
    count = len(there)
    if count != stated and there == set(range(count)):
        faults.append(f"it has {count} layers, not {stated} as the config says: pass num_hidden_layers={count}")
        both, matches = min(count, stated), {name: LAYER_NAME.match(name) for name in (*missing, *unknown)}
        beyond = {name for name, match in matches.items() if match and int(match[1]) >= both}
        missing, unknown = ([name for name in names if name not in beyond] for names in (missing, unknown))

    # Wrong shapes that pruning explains are told for a whole layer; the rest are told one by one.
    wrong = {name: t.shape for name, t in state.items() if name in wanted and t.shape != wanted[name].shape}
    faults += pruning_faults(wrong, wanted, config)
    faults += [f"{name} is missing" for name in missing]
    faults += [f"{name} is unknown" for name in unknown]
    for name, shape in wrong.items():
        labels = name.startswith("classifier.") and wanted[name].shape[0] == config.num_labels
        way_out = f": pass num_labels={shape[0]}" if labels and shape else ""
        faults.append(f"{name} is {tuple(shape)}; by the config it is {tuple(wanted[name].shape)}{way_out}")
    return faults + dtype_faults(state, wanted)


def dtype_faults(state: State, wanted: State) -> list[str]:
    floats = [name for name, made in wanted.items() if made.is_floating_point() and name in state]
    odd = {name: state[name].dtype for name in floats if state[name].dtype not in DTYPES.values()}
    return [f"{name} is {dtype}; weights are {', '.join(DTYPES)}" for name, dtype in odd.items()]


def pruning_faults(wrong: dict[str, torch.Size], wanted: State, config: BertConfig) -> list[str]:
    """Return a fault for every layer whose wrong shapes come from pruning, and remove these shapes from `wrong`."""
    heads, faults = config.num_attention_heads, []
    for part, shrinking, unit, built, size, pruned in (
        ("attention.", HEAD_AXES, "head", heads, config.hidden_size // heads, config.pruned_heads),
        ("", NEURON_AXES, "neuron", config.intermediate_size, 1, config.pruned_neurons),
    ):
        layers = dict.fromkeys((match[0], int(match[1])) for name in wrong if (match := LAYER_NAME.match(name)))
        for start, layer in layers:
            # A layer was pruned if all of its matrices have one and the same other width, in whole units.
            axes = {start + part + name: axis for name, axis in shrinking.items()}
            there = [name for name in axes if name in wanted]
            widths = {differing_width(wrong.get(name), wanted[name].shape, axes[name]) for name in there}

            found = widths.pop()
            if widths or found is None or found % size or found > built * size:
                continue

            # The way out depends on whether the config knows of it.
            for name in there:
                del wrong[name]
            gone, have = list(pruned.get(layer, ())), found // size
            fact = f"layer {layer} has {have} of {built} {unit}s, but the config's pruned_{unit}s"
            if not gone:
                way_out = f"pruned_{unit}s={{{layer}: [the {built - have} removed {unit}s]}}"
                faults.append(f"{fact} does not name it: it looks pruned; pass {way_out}")
                continue

            # transformers 5 fills a pruned layer with random numbers, and writes a whole layer.
            way_out = f"; pass pruned_{unit}s without layer {layer} to use them all" if have == built else ""
            listed = gone if len(gone) <= MOST_SHOWN else len(gone)
            faults.append(f"{fact} says that {listed} are removed{way_out}")
    return faults


def differing_width(have: torch.Size | None, want: torch.Size, axis: int) -> int | None:
    """Return the size along an axis if only that differs."""
    if have is None or len(have) != len(want) or any(have[i] != want[i] for i in range(len(want)) if i != axis):
        return None
    return have[axis]


def stored_dtype(state: State, wanted: State) -> tuple[torch.dtype, list[str]]:
    """Return the dtype of a checkpoint, and the fault of having several."""
    default, kinds = torch.get_default_dtype(), dict[torch.dtype, str]()
    for name, made in wanted.items():
        if name in state and made.dtype == default and state[name].dtype in DTYPES.values():
            kinds.setdefault(state[name].dtype, name)
    listed = ", ".join(f"{dtype} ({name})" for dtype, name in kinds.items())
    return next(iter(kinds), default), [f"it has several dtypes, {listed}: pass dtype="] if len(kinds) > 1 else []


def parse_dtype(dtype: torch.dtype | str | None, names: Mapping[str, torch.dtype] = DTYPES) -> torch.dtype | None:
    """Return the dtype with a name; raise ValueError if there is none.  None is the file's or the model's own."""
    if dtype is not None and dtype not in [*names, *names.values()]:
        raise ValueError(f"dtype is {dtype!r}; have: {', '.join(names)}, or None for its own")
    return names[dtype] if isinstance(dtype, str) else dtype
