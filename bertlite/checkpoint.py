"""Checkpoints, in the order in which things happen: find the files, read them, rename, check, load; and save.

Nothing in a file is ever run: pickles pass through torch's weights-only unpickler.  Nothing is guessed either:
whatever does not fit is an error that names it.  Files and tensors are named as by transformers 4.57.6 and 5.23.0.
"""

import copy
import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from pickle import UnpicklingError
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bertlite.config import BertConfig, ConfigLike, pruned_neurons
from bertlite.folders import replacing
from bertlite.model import BertModel, BertPreTrainedModel
from bertlite.modules import init_weights

Model = TypeVar("Model", bound=BertPreTrainedModel)
State = dict[str, Tensor]

log = logging.getLogger("bertlite")

CONFIGS = ("config.json", "bert_config.json")  # the second is the name of 2018
WEIGHTS = (  # the first that is there is read
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
REPLACED = re.compile(r"model(\.[\w-]+|-\d+-of-\d+)*\.safetensors(\.index(\.[\w-]+)?\.json)?")  # by a save
STORED = {  # what safetensors calls the dtypes
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

WRAPPERS = ("module.", "_orig_mod.")  # what DistributedDataParallel and torch.compile put before every name
RENAMED = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}  # TensorFlow's names, in 2018
CONSTANTS = ("embeddings.position_ids", "embeddings.token_type_ids")  # buffers that transformers once saved
WORDS, DECODER = "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"  # one matrix, if tied
BIAS, DECODER_BIAS = "cls.predictions.bias", "cls.predictions.decoder.bias"  # one vector, always

LAYER = re.compile(r"(?:bert\.)?encoder\.layer\.(\d{1,9})\.")
HEADED = {  # what shrinks with the heads of a layer's attention, and along which axis
    **{f"self.{part}.{kind}": 0 for part in ("query", "key", "value") for kind in ("weight", "bias")},
    "output.dense.weight": 1,
}
NEURAL = {"intermediate.dense.weight": 0, "intermediate.dense.bias": 0, "output.dense.weight": 1}  # with its neurons
ENDLESS = "cannot be used: what it computes would be no number, since"
HARMLESS = 2**16  # a size that costs nothing to make without memory
SHOWN = 20  # faults, or names of files


def load(
    cls: type[Model],
    source: "Source",
    *,
    options: Mapping[str, Any],
    overrides: Mapping[str, Any],
    dtype: torch.dtype | str | None,
    device: torch.device | str | None,
) -> Model:
    """`BertPreTrainedModel.from_pretrained`, which see."""
    asked = read_dtype(dtype)
    files = find(source)
    config = BertConfig.from_json_file(files.config, **overrides)
    state = read(files)
    refuse(f"{files.weights} does not fit {files.config.name}:", absurdities(state, config))
    model = skeleton(cls, config, options)
    wanted: State = model.state_dict()

    faults = rename_(state, "", model)
    if overrides.get("tie_word_embeddings"):
        state.pop(DECODER, None)
    absent = absent_from(state, wanted, config)
    own, mixed = own_dtype(state, wanted)
    faults += complete_(state, "", model) + faults_of(state, wanted, config, absent) + (mixed if asked is None else [])
    refuse(f"{files.weights} does not fit {cls.__name__} as {files.config.name} describes it:", faults)
    log.debug("%s: not used: %s", files.weights, ", ".join(sorted(state.keys() - wanted.keys())) or "nothing")

    for part in absent:
        state = {**initialised(model, part, own), **state}
    tensors = settled(state, wanted, asked, device)
    refuse(f"{files.weights} {ENDLESS}", endless({k: t for k, t in tensors.items() if part_of(k) not in absent}))
    assign_(model, tensors)
    model.tie_weights()
    if absent:
        empty = [name for name, p in model.named_parameters() if part_of(name) in absent and p.isnan().any()]
        refuse(f"nothing initialises these of {cls.__name__}; give their module a reset_parameters:", empty)
        parts = " and no ".join(sorted(absent))
        log.warning("%s has no %s: initialised at random, to be trained before use", files.weights, parts)
    return model.eval()


# Find ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """Where a checkpoint is: a folder, a weights file with its config.json beside it, or a hub id.

    `revision`, `cache_dir`, `token` and `local_files_only` are the hub's; a folder has none of them.
    """

    name: str | os.PathLike[str]
    revision: str | None = None
    subfolder: str | None = None
    variant: str | None = None
    cache_dir: str | os.PathLike[str] | None = None
    token: str | bool | None = None
    local_files_only: bool = False


@dataclass(frozen=True)
class Files:
    config: Path
    weights: Path  # or the index of several
    shards: Mapping[Path, set[str]]  # which tensors each file must hold; empty without an index


class Folder:
    """The files of a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def get(self, name: str) -> Path | None:
        path = self.path / name
        return path if os.path.isfile(path) else None  # unlike Path.is_file, of a name that no disk takes too

    def refuse(self, wanted: str) -> FileNotFoundError:
        if not self.path.is_dir():
            return FileNotFoundError(f"there is no folder {self.path}")
        held = ", ".join(sorted(entry.name for entry in self.path.iterdir())[:SHOWN]) or "nothing"
        return FileNotFoundError(f"{self.path} has no {wanted}; it holds {held}")


class Repository:
    """The files of a hub repository, from the cache or fetched into it, all from one commit."""

    def __init__(self, source: Source) -> None:
        self.source, self.id = source, str(source.name)
        self.revision, self.unreached = source.revision, False

    def get(self, name: str) -> Path | None:
        from huggingface_hub import errors, hf_hub_download

        source = self.source
        try:
            path = hf_hub_download(
                self.id,
                name,
                subfolder=source.subfolder,
                revision=self.revision,
                cache_dir=None if source.cache_dir is None else Path(source.cache_dir),
                token=source.token,
                local_files_only=source.local_files_only,
            )
        except errors.HFValidationError:
            raise FileNotFoundError(f"there is no file or folder {self.id!r}, and no hub id looks like that") from None
        except errors.GatedRepoError as error:
            page = f"https://huggingface.co/{self.id}"
            raise PermissionError(f"{self.id} is gated: ask for access at {page}, then pass token=") from error
        except errors.RepositoryNotFoundError as error:
            raise FileNotFoundError(
                f"{self.id} is neither a folder here nor a repository that the hub shows you; if private, pass token="
            ) from error
        except errors.RevisionNotFoundError as error:
            raise FileNotFoundError(f"{self.id} has no revision {self.revision!r} on the hub") from error
        except errors.LocalEntryNotFoundError:
            self.unreached = True
            return None
        except errors.EntryNotFoundError:
            return None
        except Exception as error:  # of whichever library carries the bytes
            if isinstance(error, OSError) and error.errno is not None:  # the disk's
                raise
            said = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise ConnectionError(f"{self.id}: {name} did not come whole from the hub ({said}): try again") from error
        snapshot = Path(path).parents[len(PurePosixPath(source.subfolder or "", name).parts) - 1]
        self.revision = snapshot.name  # the commit: a push between two files must not mix them
        return Path(path)

    def refuse(self, wanted: str) -> FileNotFoundError:
        where = self.id + (f"/{self.source.subfolder}" if self.source.subfolder else "")
        if not self.unreached:
            return FileNotFoundError(f"{where} has no {wanted} on the hub")
        return FileNotFoundError(
            f"there is no folder {where}, the hub's cache has no {wanted} of it, and the hub was not reached: go"
            " online once, without local_files_only and HF_HUB_OFFLINE, or name the right cache_dir or folder"
        )


def find(source: Source) -> Files:
    """The files of a checkpoint, fetched if they are the hub's.

    Raises:
        FileNotFoundError: one of them is missing.
        PermissionError: the repository is gated.
        ConnectionError: one of them did not come whole; what the cache holds under its name is whole or nothing.
        ValueError: an index that is damaged or points outside its folder.
    """
    path = Path(source.name).expanduser()
    weights: Sequence[str] = WEIGHTS
    if source.variant:
        weights = [f".{source.variant}.".join(name.rsplit(".", 1)) for name in WEIGHTS]
    if path.is_file():
        if source.variant:
            raise ValueError(f"{path} is a file: leave subfolder and variant out")
        weights = [path.name]
    place = place_of(source)
    config, found = first(place, CONFIGS), first(place, weights)
    return Files(config, found, shards_of(found, place) if found.suffix == ".json" else {})


def place_of(source: Source) -> Folder | Repository:
    """Where the files of a checkpoint are; of a single file, the folder that it is in.

    Raises:
        FileNotFoundError: there is nothing of that name, and it is no hub id.
    """
    name, path = str(source.name), Path(source.name).expanduser()
    if path.is_file():
        if source.subfolder:
            raise ValueError(f"{path} is a file: leave subfolder and variant out")
        return Folder(path.parent)
    if name and path.is_dir():
        return Folder(path / (source.subfolder or ""))
    if not isinstance(source.name, str) or path.is_absolute() or name.startswith((".", "~")):
        raise FileNotFoundError(f"there is no file or folder {path}")
    return Repository(source)


def first(place: Folder | Repository, names: Sequence[str]) -> Path:
    for name in names:
        path = place.get(name)
        if path is not None:
            return path
    raise place.refuse(" or ".join(names))


def shards_of(index: Path, place: Folder | Repository) -> dict[Path, set[str]]:
    """The files that an index names, all of them inside its folder, and the tensors that it puts there."""
    try:
        table = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards: dict[str, set[str]] = {shard: set() for shard in table.values()}
        for tensor, shard in table.items():
            shards[shard].add(tensor)
        outside = [shard for shard in shards if not shard or re.search(r"^/|\\|:|(^|/)\.\.(/|$)", shard)]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise damaged(index, error) from None
    if not shards:
        raise ValueError(f"{index} names no file: fetch it again")
    if outside:
        raise ValueError(f"{index} points outside its folder, to {outside[0]!r}: do not trust this checkpoint")
    files = {}
    for shard, tensors in shards.items():
        path = place.get(shard)
        if path is None:
            raise FileNotFoundError(f"{index} names {shard}, which is not there: fetch the whole checkpoint again")
        if not path.resolve().is_relative_to(fence(index.parent)):
            raise ValueError(f"{path} is a link out of its folder, to {path.resolve()}: put the file itself there")
        files[path] = tensors
    return files


def fence(folder: Path) -> Path:
    """What links in a folder must not leave: the folder itself or, as its files are links, the hub's cache."""
    for parent in folder.resolve().parents:
        if parent.name == "snapshots" and parent.parent.name.startswith("models--"):
            return parent.parent.parent
    return folder.resolve()


# Read ---------------------------------------------------------------------------------------------------------------


def read(files: Files) -> State:
    """The tensors of a checkpoint by the names they have there, mapped from the files where the format allows.

    Raises:
        ValueError: a file that is damaged, or holds other tensors than its index says.
    """
    if not files.shards:
        return read_file(files.weights)
    state, faults = State(), []
    for path, named in files.shards.items():
        tensors = read_file(path)
        faults += [f"{path.name} lacks {name}" for name in sorted(named - tensors.keys())]
        faults += [f"{path.name} also holds {name}" for name in sorted(tensors.keys() - named)]
        state.update(tensors)
    refuse(f"{files.weights} is not the index of the files it names:", faults)
    return state


def read_file(path: Path) -> State:
    reader = READERS.get(path.suffix)
    if reader is None:
        raise ValueError(f"{path} is no weights file: their names end in {', '.join(READERS)}")
    with path.open("rb") as file:
        start = file.read(64)
    if not start:
        raise ValueError(f"{path} is empty: fetch it again")
    if start.startswith(b"version https://git-lfs"):
        raise ValueError(f"{path} is a git-lfs pointer, not the weights: run git lfs pull")
    return reader(path, start)


def read_safetensors(path: Path, start: bytes) -> State:
    """Views of one mapping of the file; safetensors' own `get_tensor` loses some bytes of memory at every call."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt"):  # refuses a header that is wrong in itself, or that does not fit the file
            whole: Any = torch.UntypedStorage.from_file(str(path), shared=False, nbytes=path.stat().st_size)
    except SafetensorError as error:
        raise damaged(path, error) from None
    first = 8 + int.from_bytes(start[:8], "little")
    header = json.loads(torch.empty((), dtype=torch.uint8).set_(whole)[8:first].numpy().tobytes())
    header.pop("__metadata__", None)
    unknown = {name: entry["dtype"] for name, entry in header.items() if entry["dtype"] not in STORED}
    refuse(f"{path} cannot be read:", [f"{n} is {code}; known are {', '.join(STORED)}" for n, code in unknown.items()])
    return {name: view(whole, first, **entry) for name, entry in header.items()}


def view(whole: Any, first: int, dtype: str, shape: list[int], data_offsets: list[int]) -> Tensor:
    """A tensor of a safetensors file where it lies, in a storage of its own, as multiprocessing can send no other; a
    copy if that is no place for its dtype."""
    start, end = (first + offset for offset in data_offsets)
    part, kind = whole[start:end], STORED[dtype]
    return torch.empty((), dtype=kind).set_(part.clone() if start % kind.itemsize else part).view(shape)


def read_pickle(path: Path, start: bytes) -> State:
    zipped = start.startswith(b"PK")  # since torch 1.6; older files cannot be mapped
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except UnpicklingError as error:
        lines = (line for line in str(error).splitlines() if line and not line.startswith("Check the documentation"))
        *_, last = "", *lines  # above it, advice to trust the file
        reason = last.rpartition("WeightsUnpickler error: ")[2]
        raise ValueError(f"{path} is damaged or holds more than tensors; nothing in it was run: {reason}") from None
    except Exception as error:  # torch and zipfile raise a dozen kinds
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # a seek to where there is no file
            raise
        raise damaged(path, error) from None
    if not isinstance(state, Mapping):
        raise ValueError(f"{path} holds a {type(state).__name__}, not tensors by name")
    for name, value in state.items():
        if not isinstance(name, str) or not is_plain(value):
            raise ValueError(
                f"{path}: {name!r} is a {type(value).__name__}, not a plain tensor; save a state_dict alone"
            )
    return dict(state)


READERS: dict[str, Callable[[Path, bytes], State]] = {
    ".safetensors": read_safetensors,
    ".bin": read_pickle,
    ".pt": read_pickle,
    ".pth": read_pickle,
}


def is_plain(value: object) -> bool:
    strided = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_quantized
    return strided and type(value) in (Tensor, nn.Parameter)


def damaged(path: Path, error: Exception) -> ValueError:
    reason = f"{type(error).__name__}: {error}".partition("\n")[0]
    return ValueError(f"{path} is damaged or cut short ({reason}): fetch it again")


def refuse(title: str, faults: Sequence[str]) -> None:
    """Raise ValueError if there are faults, with all of them or the first of very many."""
    if faults:
        more = [f"… and {len(faults) - SHOWN} more"] if len(faults) > SHOWN else []
        raise ValueError("\n  ".join([title, *faults[:SHOWN], *more]))


# Rename -------------------------------------------------------------------------------------------------------------


def modernise_(state: MutableMapping[str, Any], prefix: str, model: BertPreTrainedModel) -> None:
    """Give the tensors under `prefix` the names that the model has for them, so that legacy state dicts load strictly.

    Raises:
        ValueError: a tensor is there under two names, or a tied decoder differs from the word embeddings.
    """
    faults = rename_(state, prefix, model) + complete_(state, prefix, model)
    refuse(f"this state dict does not fit {type(model).__name__}:", faults)


def modern(name: str, base: str) -> str | None:
    """What a tensor is called today in a model whose BertModel is under `base`; None if it is no longer called."""
    while name.startswith(WRAPPERS):
        name = name.partition(".")[2]
    for old, new in RENAMED.items():
        if name.endswith(old):
            name = name.removesuffix(old) + new
    inner = name.removeprefix("bert.")
    if inner in CONSTANTS:
        return None
    return base + inner if inner.startswith(("embeddings.", "encoder.", "pooler.")) else name


def rename_(state: MutableMapping[str, Any], prefix: str, model: BertPreTrainedModel) -> list[str]:
    """Give every tensor under `prefix` its name of today; returns the faults found."""
    base, faults = base_of(model), []
    for old in [name for name in state if name.startswith(prefix)]:
        new = modern(old.removeprefix(prefix), base)
        if new is None:
            del state[old]
        elif prefix + new != old:
            if prefix + new in state:
                faults.append(f"{new} is there twice, once as {old}")
            state[prefix + new] = state.pop(old)
    return faults


def complete_(state: MutableMapping[str, Any], prefix: str, model: BertPreTrainedModel) -> list[str]:
    """Put the tensors that a language model shares under all their names; returns the faults found."""
    if getattr(getattr(model, "cls", None), "predictions", None) is None:
        return []
    bias, decoder_bias, words, decoder = (prefix + name for name in (BIAS, DECODER_BIAS, WORDS, DECODER))
    if decoder_bias in state:
        state[bias] = state[decoder_bias]
    elif bias in state:
        state[decoder_bias] = state[bias]
    if not model.config.tie_word_embeddings or words not in state:
        return []
    own = state.get(decoder)
    state[decoder] = state[words]
    if own is None or same(own, state[words]):
        return []
    return [
        f"{DECODER} differs from the word embeddings, but the config ties them: tie_word_embeddings=False uses this"
        " decoder, tie_word_embeddings=True the embeddings"
    ]


def base_of(model: BertPreTrainedModel) -> str:
    return "" if model.base_model is model else f"{model.base_model_prefix}."


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and (a.is_meta or torch.equal(a, b))


# Check --------------------------------------------------------------------------------------------------------------


def absurdities(state: State, config: ConfigLike) -> list[str]:
    """Sizes that these tensors cannot have, where making even an empty model of that size takes time and memory."""
    longest = max([HARMLESS, *(size for tensor in state.values() for size in tensor.shape)])
    gone = max((len({*units}) for units in pruned_neurons(config).values()), default=0)
    sizes = {name: getattr(config, name) for name in ("hidden_size", "num_attention_heads", "intermediate_size")}
    faults = [
        f"{name} is {size}, but no tensor is longer than {longest}"
        for name, size in sizes.items()
        if size > longest + gone
    ]
    if config.num_hidden_layers > max(64, len(state)):
        faults.append(f"num_hidden_layers is {config.num_hidden_layers}, but there are {len(state)} tensors in all")
    return faults


def endless(state: State) -> list[str]:
    """The tensors that hold nan or infinity; each is read once and nothing of its size is made.

    A sum shows them, and is the fastest look at a tensor.  Large numbers may overflow it too: then the extremes tell.
    """
    floats = {name: t for name, t in state.items() if t.is_floating_point() and t.numel() and not t.is_meta}
    sums: dict[torch.device, list[Tensor]] = {}
    for t in floats.values():
        sums.setdefault(t.device, []).append(t.sum().double())
    if all(bool(torch.stack(each).isfinite().all()) for each in sums.values()):  # the host waits once for a device
        return []  # all are numbers
    bad = [(name, str(t.dtype)) for name, t in floats.items() if not all(end.isfinite() for end in t.aminmax())]
    return [f"{name} holds nan or inf in {dtype.removeprefix('torch.')}" for name, dtype in bad]


def faults_of(state: State, wanted: State, config: BertConfig, absent: set[str]) -> list[str]:
    """What keeps tensors from being those of a model.

    Args:
        wanted: the model's own; only their shapes are read.
        absent: the parts that may be missing.
    """
    checked = {part_of(name) for name in wanted} - absent
    missing = [name for name in wanted if name not in state and part_of(name) in checked]
    unknown = [name for name in state if name not in wanted and part_of(name) in checked]
    if not any(name in state for name in wanted if part_of(name) is None):
        return [f"it is no BERT's: its tensors are {', '.join(list(state)[:3]) or 'none'} …"]
    faults = []
    said, there = config.num_hidden_layers, {int(match[1]) for name in state if (match := LAYER.match(name))}
    if len(there) != said and there == set(range(len(there))):
        faults.append(
            f"it has {len(there)} layers, not {said} as the config says: pass num_hidden_layers={len(there)}"
        )
        both = min(len(there), said)
        missing, unknown = (
            [name for name in names if not (match := LAYER.match(name)) or int(match[1]) < both]
            for names in (missing, unknown)
        )
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
    return [
        f"{name} is {state[name].dtype}; weights are {', '.join(DTYPES)}"
        for name, made in wanted.items()
        if made.is_floating_point() and name in state and state[name].dtype not in DTYPES.values()
    ]


def absent_from(state: State, wanted: State, config: BertConfig) -> set[str]:
    """The parts of a model of which the tensors, by their names of today, hold nothing."""
    stated = {part_of(name) for name in state if not (name == DECODER and config.tie_word_embeddings)}
    return {part for name in wanted if (part := part_of(name)) and part not in stated}


def part_of(name: str) -> str | None:
    """The part of a model that a checkpoint may lack, such as "pooler" or "cls.predictions"; None is the rest."""
    start, second, *_ = [*name.removeprefix("bert.").split("."), ""]
    if start == "pooler":
        return start
    if start in ("embeddings", "encoder") or name.startswith("bert."):
        return None
    return f"cls.{second}" if start == "cls" else start


def pruning_faults(wrong: dict[str, torch.Size], wanted: State, config: BertConfig) -> list[str]:
    """One fault for every layer whose wrong shapes pruned heads or neurons explain; these leave `wrong`."""
    heads, faults = config.num_attention_heads, []
    for part, shrinking, unit, built, size, pruned in (
        ("attention.", HEADED, "head", heads, config.hidden_size // heads, config.pruned_heads),
        ("", NEURAL, "neuron", config.intermediate_size, 1, config.pruned_neurons),
    ):
        for start, layer in dict.fromkeys((match[0], int(match[1])) for name in wrong if (match := LAYER.match(name))):
            stem = start + part
            widths = {
                width(wrong.get(stem + name), wanted[stem + name].shape, axis) for name, axis in shrinking.items()
            }
            found = widths.pop()
            if widths or found is None or found % size or found > built * size:
                continue
            for name in shrinking:
                del wrong[stem + name]
            gone, have = list(pruned.get(layer, ())), found // size
            fact = f"layer {layer} has {have} of {built} {unit}s, but the config's pruned_{unit}s"
            if not gone:
                way_out = f"pruned_{unit}s={{{layer}: [the {built - have} {unit}s that are gone]}}"
                faults.append(f"{fact} does not name it: it looks pruned; pass {way_out}")
            elif have == built:  # transformers 5 writes this when it has filled a pruned layer with random numbers
                way_out = f"pass pruned_{unit}s without layer {layer} to use them all"
                faults.append(f"{fact} says that {listed(gone)} are gone; {way_out}")
            else:
                faults.append(f"{fact} says that {listed(gone)} are gone")
    return faults


def listed(units: list[int]) -> str:
    return str(units) if len(units) <= SHOWN else str(len(units))


def width(have: torch.Size | None, want: torch.Size, axis: int) -> int | None:
    """The size along an axis, if that is all that differs."""
    if have is None or len(have) != len(want) or any(have[i] != want[i] for i in range(len(want)) if i != axis):
        return None
    return have[axis]


def own_dtype(state: State, wanted: State) -> tuple[torch.dtype, list[str]]:
    """The dtype of a checkpoint, and the fault of having several.  What has a dtype of its own (xielu) may differ."""
    default, kinds = torch.get_default_dtype(), dict[torch.dtype, str]()
    for name, made in wanted.items():
        if name in state and made.dtype == default and state[name].dtype in DTYPES.values():
            kinds.setdefault(state[name].dtype, name)
    listed = ", ".join(f"{dtype} ({name})" for dtype, name in kinds.items())
    return next(iter(kinds), default), [f"it has several dtypes, {listed}: pass dtype="] if len(kinds) > 1 else []


def read_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if isinstance(dtype, str) and dtype in DTYPES:
        return DTYPES[dtype]
    if dtype is None or (isinstance(dtype, torch.dtype) and dtype in DTYPES.values()):
        return dtype
    raise ValueError(f"dtype is {dtype!r}; have: {', '.join(DTYPES)}, or None for the file's own")


# Make ---------------------------------------------------------------------------------------------------------------


class Skeleton(TorchFunctionMode):
    """Make parameters on the meta device and skip initialisers, which fill nothing there and take most of the time.

    A mode holds for one thread, unlike a patch of torch.nn.init.
    """

    skipped = frozenset(
        [getattr(nn.init, name) for name in dir(nn.init) if name.endswith("_") and not name.startswith("_")]
        + [Tensor.copy_, Tensor.fill_, Tensor.normal_, Tensor.uniform_, Tensor.zero_]
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty:
            kwargs["device"] = "meta"
        elif func in self.skipped:
            filled = args[0] if args else kwargs["tensor"]
            if filled.is_meta:
                return filled
        return func(*args, **kwargs)


def skeleton(cls: type[Model], config: BertConfig, options: Mapping[str, Any]) -> Model:
    """A model without memory: its parameters have shapes but no values."""
    with Skeleton():
        return cls(config, **options)


def initialised(model: BertPreTrainedModel, part: str, dtype: torch.dtype) -> State:
    """The tensors of one part of a skeleton, filled as a new model's are; nan where nothing fills them."""
    name = base_of(model) + part if part == "pooler" else part
    fresh = copy.deepcopy(model.get_submodule(name)).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.fill_(torch.nan)
    for module in fresh.modules():
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()
    init_weights(fresh, model.config)
    default = torch.get_default_dtype()
    return {f"{name}.{key}": t.to(dtype) if t.dtype == default else t for key, t in fresh.state_dict().items()}


def settled(state: State, wanted: State, dtype: torch.dtype | None, device: torch.device | str | None) -> State:
    """The wanted tensors, contiguous, on one device; two names share memory only if they share the tensor."""
    done: dict[int, Tensor] = {}
    places = set()
    for tensor in {id(state[name]): state[name] for name in wanted}.values():
        moved = tensor.detach().to(device, dtype if tensor.is_floating_point() else None).contiguous()
        done[id(tensor)] = moved.clone() if moved.data_ptr() in places else moved
        places.add(moved.data_ptr())
    return {name: done[id(state[name])] for name in wanted}


def assign_(model: nn.Module, state: State) -> None:
    """Give a model these very tensors, several times faster than load_state_dict does."""
    for path, module in model.named_modules():
        for name, old in [*module.named_parameters(path, recurse=False)]:
            setattr(module, name.rpartition(".")[2], nn.Parameter(state[name], old.requires_grad))
        for name, _ in [*module.named_buffers(path, recurse=False)]:
            setattr(module, name.rpartition(".")[2], state[name])


# Save ---------------------------------------------------------------------------------------------------------------


def save(model: BertPreTrainedModel, folder: str | os.PathLike[str], *, max_shard_size: int | str) -> None:
    """`BertPreTrainedModel.save_pretrained`, which see.

    Raises:
        ValueError: the model could not be loaded again, as its tensors are not plain ones with values, or not those
            that its config describes; or max_shard_size is no size.
        OSError: the folder cannot be written.
    """
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    state = writable(model)
    stand_ins = {name: torch.empty_like(t, device="meta") for name, t in state.items()}  # they share no memory
    try:
        split = split_torch_state_dict_into_shards(stand_ins, max_shard_size=max_shard_size)
        if not isinstance(max_shard_size, str) and max_shard_size < 1:
            raise ValueError(max_shard_size)
    except ValueError:
        raise ValueError(f"max_shard_size is {max_shard_size!r}; give bytes, or a size such as '500MB'") from None
    config = {**model.config.to_dict(), "architectures": [type(model).__name__], "dtype": name_of(model.dtype)}
    config.pop("torch_dtype", None)  # what transformers called it before 4.56
    with replacing(Path(folder), superseded=REPLACED) as new:
        write_json(new / "config.json", config)
        for name, keys in split.filename_to_tensors.items():
            try:
                save_file({key: state[key].cpu().contiguous() for key in keys}, new / name, metadata={"format": "pt"})
            except SafetensorError as error:
                raise OSError(f"{new / name} could not be written: {error}") from error
            shutil.copymode(new / "config.json", new / name)  # safetensors makes files that nobody else can read
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            write_json(new / "model.safetensors.index.json", index)


def writable(model: BertPreTrainedModel) -> State:
    """The model's tensors under the names that transformers keeps, shared ones once.

    An untied decoder's bias is kept under both its names: transformers 5 takes it for two, of which it adds the one
    that 4 does not know.
    """
    title = f"this {type(model).__name__} cannot be saved:"
    state: State = dict(model.state_dict())
    odd = [f"{name} is a {type(t).__name__}, not a plain tensor" for name, t in state.items() if not is_plain(t)]
    refuse(title, odd or [f"{name} is on the meta device: it has no values" for name, t in state.items() if t.is_meta])
    options = {"add_pooling_layer": model.pooler is not None} if isinstance(model, BertModel) else {}
    wanted = skeleton(type(model), model.config, options).state_dict()
    faults = complete_(state, "", model) + faults_of(state, wanted, model.config, absent=set())
    refuse(f"{title} it does not fit its own config (merge adapters first, and prune with prune_heads)", faults)
    twice = {DECODER_BIAS, DECODER} if model.config.tie_word_embeddings else set()
    return {name: t.clone() if name == DECODER_BIAS else t for name, t in state.items() if name not in twice}


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
