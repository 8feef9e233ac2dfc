"""A corpus of checkpoints that must not load: damaged, lying or malicious; CASES has the words of each error.

If they were run, the pickles among them would make a folder named "canary" next to the checkpoint.
"""

import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save, save_file
from torch import Tensor

from bertlite import BertConfig, BertModel
from scripts.make.golden import SIZES

Q0, WORDS = "encoder.layer.0.attention.self.query.weight", "embeddings.word_embeddings.weight"
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 440449768\n"
DEEP = "[" * 200_000  # more than Python's JSON reader can descend

State = dict[str, Tensor]
Write = Callable[[Path], None]


def state() -> State:
    """Return the tensors of a small model, the same at every call."""
    torch.manual_seed(0)
    return {name: tensor.clone() for name, tensor in BertModel(BertConfig(**SIZES)).state_dict().items()}  # type: ignore[arg-type]


def config_of(**changes: Any) -> Write:
    """Make a writer of a checkpoint that is sound except for these fields of its config."""

    def write(folder: Path) -> None:
        save_file(state(), folder / "model.safetensors", {"format": "pt"})
        config = json.dumps({**SIZES, "model_type": "bert", **changes})
        (folder / "config.json").write_text(config.replace('"1e400"', "1e400"))

    return write


def edited(change: Callable[[bytes], bytes], file: str = "model.safetensors", base: Write | None = None) -> Write:
    """Make a writer of a sound checkpoint, or of what `base` writes, one file of which is changed."""

    def write(folder: Path) -> None:
        (base or config_of())(folder)
        (folder / file).write_bytes(change((folder / file).read_bytes()))

    return write


def tensors(change: Callable[[State], Any], **config: Any) -> Write:
    """Make a writer of a checkpoint whose tensors are changed, in place or by returning others."""

    def rewrite(_: bytes) -> bytes:
        changed = state()
        changed = change(changed) or changed
        return save({name: t.contiguous() for name, t in changed.items()})

    return edited(rewrite, base=config_of(**config))


def text(content: str, file: str = "config.json", base: Write | None = None) -> Write:
    return edited(lambda _: content.encode(), file, base)


def header(change: Callable[[dict[str, Any]], Any]) -> Write:
    """Make a writer of a checkpoint whose weights file has another header before the same bytes."""

    def rewrite(whole: bytes) -> bytes:
        (size,) = struct.unpack("<Q", whole[:8])
        entries = json.loads(whole[8 : 8 + size])
        changed = json.dumps(change(entries) or entries).encode()
        return struct.pack("<Q", len(changed)) + changed + whole[8 + size :]

    return edited(rewrite)


def entry(**fields: Any) -> Write:
    """Make a writer of a header with other facts about one tensor."""
    return header(lambda entries: entries[Q0].update(fields))


def shards(
    one: Callable[[State], State] = dict, two: Callable[[State], State] = dict, mapped: Mapping[str, str] | None = None
) -> Write:
    """Make a writer of a checkpoint in two files, each of which may be changed; `mapped` is added to the index."""

    def write(folder: Path) -> None:
        config_of()(folder)
        (folder / "model.safetensors").unlink()
        names, whole = sorted(state()), state()
        parts = {ONE: names[: len(names) // 2], TWO: names[len(names) // 2 :]}
        table = {name: file for file, part in parts.items() for name in part} | dict(mapped or {})
        for change, (file, part) in zip((one, two), parts.items(), strict=True):
            save_file(change({name: whole[name] for name in part}), folder / file)
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": table}))

    return write


def without_a_shard(folder: Path) -> None:
    shards()(folder)
    (folder / TWO).unlink()


def linked_shard(folder: Path) -> None:
    shards()(folder)
    outside = folder.with_name(f"{folder.name}.outside")
    (folder / TWO).rename(outside)
    (folder / TWO).symlink_to(outside)


class Malice:
    """An object whose pickle makes a folder when it is loaded."""

    def __init__(self, canary: Path) -> None:
        self.canary = str(canary)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.canary,)


def pickled(dump: Callable[[Any, Path], None], file: str = "pytorch_model.bin") -> Write:
    def write(folder: Path) -> None:
        config_of()(folder)
        (folder / "model.safetensors").unlink()
        dump({**state(), "x": Malice(folder.with_name("canary"))}, folder / file)

    return write


def raw_pickle(held: Any, path: Path) -> None:
    path.write_bytes(pickle.dumps(held["x"], protocol=2))


def old_pickle(held: Any, path: Path) -> None:
    torch.save(held, path, _use_new_zipfile_serialization=False)


def lying_pickle(held: Any, path: Path) -> None:
    """Write a tensor of more numbers than its storage holds."""
    torch.save({name: t for name, t in held.items() if name != "x"}, path)
    with zipfile.ZipFile(path) as source:
        parts = {name: source.read(name) for name in source.namelist()}
    [name] = [each for each in parts if each.endswith("data.pkl")]
    parts[name] = parts[name].replace(b"K\x61K\x30\x86", b"J\x00\x00\x00\x7fK\x30\x86")  # (97, 48) -> (2130706432, 48)
    with zipfile.ZipFile(path, "w") as target:
        for each, data in parts.items():
            target.writestr(each, data)


def complex_pickle(held: Any, path: Path) -> None:
    torch.save({**{name: t for name, t in held.items() if name != "x"}, Q0: held[Q0].to(torch.complex64)}, path)


def number_in(name: str, value: float) -> Write:
    return tensors(lambda held: held[name].view(-1)[7:8].fill_(value) and None)


def tensor_as(change: Callable[[Tensor], Tensor]) -> Write:
    return tensors(lambda held: held.update({Q0: change(held[Q0])}))


def pruned_without_saying(held: State) -> State:
    """Remove head 1 of layer 0 from the tensors, and leave the config alone."""
    stay = [row for row in range(48) if row // 12 != 1]
    start = "encoder.layer.0.attention."
    for part in ("query", "key", "value"):
        for kind in ("weight", "bias"):
            held[f"{start}self.{part}.{kind}"] = held[f"{start}self.{part}.{kind}"][stay]
    held[f"{start}output.dense.weight"] = held[f"{start}output.dense.weight"][:, stay]
    return held


def fewer_neurons(held: State) -> State:
    """Remove neurons 0 to 4 of layer 1 from the tensors, and leave the config alone."""
    for name, axis in (("intermediate.dense.weight", 0), ("intermediate.dense.bias", 0), ("output.dense.weight", 1)):
        name = f"encoder.layer.1.{name}"
        held[name] = held[name][5:] if axis == 0 else held[name][:, 5:]
    return held


ABSURD = 10**12
DAMAGED = "is damaged or cut short"
CASES: dict[str, tuple[Callable[[Path], Any], str]] = {  # what is written, and what the error says
    # weights files
    "empty": (edited(lambda whole: b""), "is empty: fetch it again"),
    "git-lfs pointer": (edited(lambda whole: POINTER), "is a git-lfs pointer, not the weights: run git lfs pull"),
    "web page": (edited(lambda whole: b"<!DOCTYPE html><html>" * 9), DAMAGED),
    "cut in half": (edited(lambda whole: whole[: len(whole) // 2]), DAMAGED),
    "header of 2**64 bytes": (edited(lambda whole: b"\xff" * 8 + whole[8:]), DAMAGED),
    "header that is no text": (edited(lambda whole: whole[:8] + b"\xff" * 99 + whole[107:]), DAMAGED),
    "header that is too deep": (edited(lambda whole: struct.pack("<Q", len(DEEP)) + DEEP.encode()), DAMAGED),
    "unknown dtype": (entry(dtype="F13"), DAMAGED),
    "shape of 2**64 numbers": (entry(shape=[2**32, 2**32]), DAMAGED),
    "overlapping tensors": (
        header(lambda entries: entries[Q0].update(data_offsets=entries[Q0.replace("query", "key")]["data_offsets"])),
        DAMAGED,
    ),
    # tensors
    "nan": (number_in(Q0, float("nan")), f"{Q0} holds nan or inf"),
    "infinity": (number_in(WORDS, float("inf")), f"{WORDS} holds nan or inf"),
    "integers": (tensor_as(lambda held: held.to(torch.int8)), f"{Q0} is torch.int8"),
    "eighths of a number": (tensor_as(lambda held: held.to(torch.float8_e4m3fn)), f"{Q0} is F8_E4M3"),
    "complex numbers": (pickled(complex_pickle), f"{Q0} is torch.complex64"),  # the oldest safetensors has none
    "no tensors": (tensors(lambda held: {"x": torch.ones(1)}), "it is not a BERT"),
    "a tensor of no numbers": (tensor_as(lambda held: torch.zeros(0, 48)), f"{Q0} is (0, 48)"),
    "a scalar": (tensor_as(lambda held: torch.zeros(())), f"{Q0} is ()"),
    "another shape": (tensor_as(lambda held: held[:, 1:]), f"{Q0} is (48, 47)"),
    "a missing tensor": (tensors(lambda held: held.pop(Q0) is None or None), f"{Q0} is missing"),
    "a layer with no end": (
        tensors(lambda held: held.update({f"encoder.layer.{'9' * 5000}.x": torch.ones(1)})),
        "is unknown",
    ),
    "the same tensor twice": (
        tensors(lambda held: held.update({f"bert.{Q0}": torch.ones(48, 48)})),
        f"{Q0} is there twice",
    ),
    # configs
    "config without fields": (text("{}"), "does not state vocab_size"),
    "config that is too deep": (text(DEEP), "config.json is not JSON"),
    "config with an endless number": (text(f'{{"hidden_size": {"9" * 5000}}}'), "config.json is not JSON"),
    "config that is a pointer": (text(POINTER.decode()), "config.json is not JSON"),
    "config of another model": (config_of(model_type="esm"), "describes a 'esm' model"),
    "infinite eps": (config_of(layer_norm_eps="1e400"), "layer_norm_eps is inf"),
    **{f"absurd {name}": (config_of(**{name: ABSURD}), "it must be") for name in (*SIZES, "num_labels")},
    "absurd num_attention_heads": (config_of(num_attention_heads=ABSURD, hidden_size=ABSURD), "it must be"),
    **{f"large {name}": (config_of(**{name: 2**27}), str(2**27)) for name in (*SIZES, "num_labels")},
    "more layers than tensors": (config_of(num_hidden_layers=4000), "num_hidden_layers is 4000, but there are 55"),
    # pruning
    "pruned without saying": (
        tensors(pruned_without_saying),
        "layer 0 has 3 of 4 heads, but the config's pruned_heads does not name it: it looks pruned; pass pruned_heads",
    ),
    "other heads pruned": (
        tensors(pruned_without_saying, pruned_heads={"0": [0, 1]}),
        "layer 0 has 3 of 4 heads, but the config's pruned_heads says that [0, 1] are removed",
    ),
    "said to be pruned": (
        config_of(pruned_heads={"2": [1]}),
        "layer 2 has 4 of 4 heads, but the config's pruned_heads says that [1] are removed",
    ),
    "a head that never was": (config_of(pruned_heads={"2": [4]}), "layer 2 has no head 4"),
    "a layer that never was": (config_of(pruned_heads={"3": [0]}), "there is no layer 3"),
    "heads that are no numbers": (config_of(pruned_heads={"0": "13"}), "heads are given as {layer: [heads]}"),
    "neurons pruned without saying": (
        tensors(fewer_neurons),
        "layer 1 has 32 of 37 neurons, but the config's pruned_neurons does not name it",
    ),
    "said to have lost neurons": (
        config_of(pruned_neurons={"1": [3]}),
        "layer 1 has 37 of 37 neurons, but the config's pruned_neurons says that [3] are removed",
    ),
    # shards
    "shard missing": (without_a_shard, f"names {TWO}, which is not there"),
    "shard above the folder": (shards(mapped={Q0: "../shard.safetensors"}), "points outside its folder"),
    "shard at the root": (shards(mapped={Q0: "/etc/passwd"}), "points outside its folder"),
    "shard on a drive": (shards(mapped={Q0: "C:\\shard"}), "points outside its folder"),
    "shard without a name": (shards(mapped={Q0: ""}), "points outside its folder"),
    "shard whose name is too long": (shards(mapped={Q0: "s" * 300}), "which is not there"),
    "shard that is a link out": (linked_shard, "is a link out of its folder"),
    "shard that is the index": (shards(mapped={Q0: INDEX}), "is not a weights file"),
    "tensor in both shards": (
        shards(two=lambda held: {**held, "embeddings.LayerNorm.bias": torch.zeros(48)}),
        f"{TWO} also holds embeddings.LayerNorm.bias",
    ),
    "tensor in neither shard": (
        shards(one=lambda held: {name: t for name, t in held.items() if name != "embeddings.LayerNorm.bias"}),
        f"{ONE} lacks embeddings.LayerNorm.bias",
    ),
    "index that is no JSON": (text("{", INDEX, shards()), DAMAGED),
    "index that is too deep": (text(DEEP, INDEX, shards()), DAMAGED),
    "index of nothing": (text('{"weight_map": {}}', INDEX, shards()), "names no file"),
    "index of lists": (text('{"weight_map": {"a": ["b"]}}', INDEX, shards()), DAMAGED),
    # pickles
    "pickle with code": (pickled(torch.save), "nothing in it was run"),
    "pickle of 2018 with code": (pickled(old_pickle), "nothing in it was run"),
    "pickle of code alone": (pickled(raw_pickle), "nothing in it was run"),
    "pickle that says it is safe": (pickled(torch.save, "model.safetensors"), DAMAGED),
    "pickle that promises too much": (pickled(lying_pickle), DAMAGED),
}


def write(folder: Path, name: str) -> Path:
    """Write one case; return its folder."""
    place = folder / name
    place.mkdir(parents=True)
    CASES[name][0](place)
    return place
