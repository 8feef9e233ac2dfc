"""Change packed folders at random and run them under a sanitizer: each must run, or be refused with a file's name.

    python -m scripts.stress.folders                                # 2,000 tries, some minutes
    python -m scripts.stress.folders --tries 20000 --out scripts/results/folders.json
    python -m scripts.stress.folders --tries 1 --seed 0 --first 1234  # a single try again

Small models of every kind are packed.  A try copies one of them and changes descriptions, headers, runtime.json or
tensors, mostly with the checksums that a forger would compute.  Then both loaders, `runtime.load` and
`InferenceModel.load`, load and run it.  A process takes tries one after another, with kernels compiled for the
sanitizers of addresses and undefined behaviour; if it dies, the next one goes on.  Prints each fault, and a line of
JSON.  Faults are crashes, errors without a file's name, outputs of another shape, and outputs that are not finite
though no tensor was changed.  The exit status is 1 if there are any.
"""

import argparse
import copy
import json
import os
import random
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bertlite.runtime import library, tasks
from bertlite.runtime.packed import FILE, checksum
from bertlite.runtime.shapes import BLOCKS, shape_from
from bertlite.runtime.structs import Kernels
from scripts.stress.native import SANITIZERS, FaultError, run_program

SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
}
DISTANCES = {
    "relative_attention": True,
    "pos_att_type": ["c2p", "p2c"],
    "position_buckets": 8,
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
    "type_vocab_size": 0,
    "max_relative_positions": 32,
}
TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")
MODERN = {"local_attention": 8, **dict.fromkeys(TOKENS, 0)}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # {kind: (transformers' name of the model, fields of its config)}
    "encoder": ("BertModel", {}),
    "cross-encoder": ("BertForSequenceClassification", {"num_labels": 1}),
    "classifier": ("BertForSequenceClassification", {"num_labels": 3}),
    "tagger": ("BertForTokenClassification", {"num_labels": 3}),
    "deberta": ("DebertaV2Model", DISTANCES),
    "mpnet": ("MPNetModel", {}),
    "electra": ("ElectraModel", {"embedding_size": 16}),
    "modernbert": ("ModernBertModel", MODERN),
    "modern-classifier": ("ModernBertForSequenceClassification", {**MODERN, "classifier_pooling": "mean"}),
    "modern-tagger": ("ModernBertForTokenClassification", {**MODERN, "num_labels": 3}),
}
DTYPES = ("float32", "bfloat16", "int8")
TEXTS = ["hello w3 w7", "w1", "", "a longer text with w5 w6 w7 w8 w9 abcdefg hijkl " * 3, "w2 w2"]
NAMES = (
    "float32",
    "int8",
    "float8",
    "relative_key",
    "bucketed",
    "disentangled",
    "rotary",
    "c2p",
    "after",
    "dense",
    "cls",
    "F32",
)
NUMBERS = (0, 1, -1, 2, 3, 16, 64, 4800, 10**6, 2**31, 2**62, 2**63, 2**64, 10**30, 0.5, 1e-320, 1e300, 1e999, -1e999)
VALUES: tuple[Any, ...] = (None, True, False, "", "\ud800\n", [], {}, [[]], {"a": {}}, *NAMES, *NUMBERS)
SECONDS = 60  # after which a try is a fault


# Folders


def make_folders(place: Path, kinds: Sequence[str]) -> list[Path]:
    """Pack small models of each kind, each in two dtypes."""
    import transformers

    from bertlite.shipping.pack import pack

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    found = []
    for i, kind in enumerate(kinds):
        source = save_model(kind, place / f"source-{kind}")
        for dtype in (DTYPES[-i % 3], DTYPES[(2 - i) % 3]):
            found.append(place / f"{kind}-{dtype}")
            pack(source, found[-1], dtype=dtype)
    return found


def save_model(kind: str, folder: Path) -> Path:
    """Save a small model of transformers and a tokenizer; return their folder, an encoder's with a Dense."""
    import torch
    import transformers

    name, fields = MODELS[kind]
    model = getattr(transformers, name)
    torch.manual_seed(0)
    made = model(model.config_class(**SIZES, **fields))
    for parameter in made.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    made.save_pretrained(folder)
    letters = [chr(ord("a") + i) for i in range(26)]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{each}" for each in letters)]
    words += [f"w{i}" for i in range(SIZES["vocab_size"] - len(words))]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    transformers.BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=40).save_pretrained(folder)
    if kind != "encoder":
        return folder
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules

    parts = [modules.Transformer(str(folder)), modules.Pooling(32, ("mean", "cls")), modules.Dense(64, 24)]
    SentenceTransformer(modules=[*parts, modules.Normalize()], device="cpu").save(str(folder / "whole"))
    return folder / "whole"


# Changes


class Folder:
    """The files of a packed folder in memory, to be changed."""

    def __init__(self, folder: Path) -> None:
        self.settings = json.loads((folder / tasks.ABOUT).read_bytes())
        self.files = {name: read(folder / name) for name in (FILE, tasks.AFTER) if (folder / name).is_file()}
        self.touched = False  # whether tensors were changed

    def write(self, folder: Path, *, honest: bool = False) -> None:
        """Write all files, with checksums made anew, or else with the old ones."""
        for name, (header, data, about) in self.files.items():
            metadata = header.get("__metadata__")
            if isinstance(metadata, dict):
                metadata["native"] = json.dumps(about)
                if not honest:
                    parts = [each for each in (data[s:e] for s, e in places(header)) if each]
                    metadata["crc32"] = f"{checksum(header, parts):08x}"
            raw = json.dumps(header).encode()
            (folder / name).write_bytes(len(raw).to_bytes(8, "little") + raw + data)
        if isinstance(self.settings, dict) and not honest:
            self.settings.pop("crc32", None)
            self.settings["crc32"] = tasks.checksum_of(self.settings, folder / tasks.TOKENIZER)
        (folder / tasks.ABOUT).write_text(json.dumps(self.settings))


def read(path: Path) -> tuple[dict[str, Any], bytes, Any]:
    whole = path.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:end])
    return header, whole[end:], json.loads(header["__metadata__"]["native"])


def places(header: dict[str, Any]) -> Iterator[tuple[int, int]]:
    """Yield the bytes of each entry that states any, as a reader takes them."""
    for name, entry in header.items():
        offsets = entry.get("data_offsets") if isinstance(entry, dict) and name != "__metadata__" else None
        if isinstance(offsets, list) and len(offsets) == 2 and all(type(each) is int for each in offsets):
            yield offsets[0], offsets[1]


def containers(value: Any) -> Iterator[Any]:
    """Yield all objects and lists within a value that have an item."""
    if isinstance(value, dict | list) and value:
        yield value
        for each in value.values() if isinstance(value, dict) else value:
            yield from containers(each)


def change_value(value: Any, draw: random.Random) -> None:
    """Change, remove, double or swap one value within a value."""
    inner = draw.choice([*containers(value)])
    keys = [*inner] if isinstance(inner, dict) else range(len(inner))
    key = draw.choice(keys)
    old, way = inner[key], draw.randrange(8)
    if way == 0:
        del inner[key]
    elif way == 1:
        other = draw.choice(keys)
        inner[key], inner[other] = inner[other], inner[key]
    elif way == 2 and isinstance(inner, dict):
        inner[f"{key}x"] = inner.pop(key)
    elif way == 3:
        inner[key] = [old] if draw.random() < 0.9 else nested(draw)
    elif way == 4 and type(old) in (int, float):
        inner[key] = draw.choice((old + 1, old - 1, 2 * old, -old, 1000 * old, old / 2, str(old), float(old)))
    elif way == 5 and type(old) is list:
        inner[key] = draw.choice((old + old, old[1:], old[:-1], old[::-1]))
    else:
        inner[key] = copy.deepcopy(draw.choice(VALUES))


def nested(draw: random.Random) -> Any:
    value: Any = 0
    for _ in range(draw.choice((30, 900))):
        value = [value]
    return value


def change_description(folder: Folder, draw: random.Random) -> None:
    about = folder.files[draw.choice([*folder.files])][2]
    folder.touched |= bool(about.get("shape", {}).get("kept"))  # numbers of one dtype may be read as another's
    change_value(about if draw.random() < 0.3 else {name: about[name] for name in about if name != "config"}, draw)


def change_settings(folder: Folder, draw: random.Random) -> None:
    change_value(folder.settings, draw)


def change_header(folder: Folder, draw: random.Random) -> None:
    change_value(folder.files[draw.choice([*folder.files])][0], draw)


def change_sizes(folder: Folder, draw: random.Random) -> None:
    """Give a tensor another shape or dtype, or remove or add one; all others lie where they then must."""
    name = draw.choice([*folder.files])
    header, data, about = folder.files[name]
    entries = {each: header[each] for each in header if each != "__metadata__"}
    parts = {each: data[slice(*entry["data_offsets"])] for each, entry in entries.items()}
    chosen, way = draw.choice([*entries]), draw.randrange(5)
    entry = entries[chosen]
    if way == 0:
        del entries[chosen]
    elif way == 1:
        other = draw.choice([*entries])
        entries["more"], parts["more"] = copy.deepcopy(entries[other]), parts[other]
    elif way == 2:  # the same bytes under another dtype
        entry["dtype"] = draw.choice(("F32", "BF16", "I8", "U8", "F64"))
        entry["shape"] = [len(parts[chosen]) // {"F32": 4, "BF16": 2, "F64": 8}.get(entry["dtype"], 1)]
    else:
        axis = draw.randrange(len(entry["shape"]))
        count = draw.choice((0, 1, 2, entry["shape"][axis] + 1, 2 * entry["shape"][axis]))
        bytes_of_one = len(parts[chosen]) // max(1, entry["shape"][axis])
        entry["shape"][axis] = count
        parts[chosen] = (parts[chosen] * 2 + bytes(64))[: count * bytes_of_one]
    end = 0
    for each, value in entries.items():
        value["data_offsets"] = [end, end + len(parts[each])]
        end += len(parts[each])
    laid = {"__metadata__": header["__metadata__"], **entries}
    folder.files[name] = laid, b"".join(parts[each] for each in entries), about


def change_tensors(folder: Folder, draw: random.Random) -> None:
    """Write some other numbers into tensors, half of them into a part of a layer."""
    name = draw.choice([*folder.files])
    header, data, about = folder.files[name]
    spans = [*places(header)]
    if name == FILE and draw.random() < 0.5:
        spans = [(first, first + count) for first, count in shape_from(about["shape"], BLOCKS[0]).offsets.values()]
    whole, words = bytearray(data), (b"\xff\xff\xff\x7f", b"\0\0\x80\x7f", b"\0\0\x80\xff", b"\xff" * 4, b"\0" * 4)
    for _ in range(draw.choice((1, 4, 64))):
        start, end = draw.choice(spans)
        at = draw.randrange(start, max(start + 1, end)) // 4 * 4
        whole[at : at + 4] = draw.choice((*words, draw.randbytes(4)))
    folder.files[name], folder.touched = (header, bytes(whole[: len(data)]), about), True


def change_bytes(folder: Folder, draw: random.Random) -> None:
    """Cut a file's tensors short, or lengthen them."""
    name = draw.choice([*folder.files])
    header, data, about = folder.files[name]
    data = draw.choice((data[: draw.randrange(len(data))], data + draw.randbytes(draw.choice((1, 64, 4096)))))
    folder.files[name] = header, data, about


CHANGES: dict[Callable[[Folder, random.Random], None], int] = {  # {change: its share}, in the order to make them
    change_sizes: 4,
    change_tensors: 3,
    change_bytes: 1,
    change_header: 3,
    change_description: 6,
    change_settings: 3,
}


# Tries, in a process of their own


def work(folders: Sequence[Path], seed: int, tries: range, kernels: str) -> None:
    """Take tries with some kernels, or the usual ones, and print the number and the results of each."""
    import torch

    from bertlite.inference.native import saving

    if kernels:
        for module in (tasks, saving):
            module.load_kernels = lambda reproducible=False: Kernels(kernels, reproducible)  # type: ignore[attr-defined]
    torch.set_num_threads(1)
    for i, results in results_of(folders, seed, tries):
        print(json.dumps([i, *results]), flush=True)


def results_of(folders: Sequence[Path], seed: int, tries: range) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of each try, and the results of both loaders."""
    with tempfile.TemporaryDirectory(prefix="bertlite-forged-") as place:
        for i in tries:
            draw = random.Random(f"{seed}-{i}")
            source, forged = draw.choice(folders), Path(place, str(i))
            shutil.copytree(source, forged)
            folder = Folder(forged)
            chosen = {*draw.choices([*CHANGES], [*CHANGES.values()], k=draw.choice((1, 1, 2, 3)))}
            for change in CHANGES:
                if change in chosen:
                    change(folder, draw)
            folder.write(forged, honest=draw.random() < 0.02)
            yield i, [outcome(run, forged, folder.touched) for run in (run_packed, run_optimised)]
            shutil.rmtree(forged)


def outcome(run: Callable[[Path], bool], forged: Path, touched: bool) -> str:
    """Return the result of a try in a word, or the fault."""
    try:
        if run(forged) or touched:
            return "run"
        return "fault: outputs are not finite"
    except Exception as error:
        named = isinstance(error, ValueError | FileNotFoundError) and str(forged) in str(error)
        return "refused" if named else f"fault: {type(error).__name__}: {error}"


def run_packed(forged: Path) -> bool:
    """Run a folder by the runtime; return whether its numbers are finite."""
    import numpy as np

    model = tasks.PackedModel(forged, threads=1)
    if model.kind == "tagger":
        return bool(np.isfinite([each["score"] for spans in model.tag(TEXTS) for each in spans]).all())
    if model.kind == "encoder":
        found, wanted = model.encode(TEXTS), (len(TEXTS), model.dimension)
    else:
        found = model.predict([(text, "w1") for text in TEXTS] if model.kind == "cross-encoder" else TEXTS)
        wanted = (len(TEXTS), len(model.labels))
    if found.shape not in (wanted, wanted[:1]):
        raise AssertionError(f"outputs have shape {found.shape}, not {wanted}")
    return bool(np.isfinite(found).all())


def run_optimised(forged: Path) -> bool:
    """Run a folder as an optimised model; return whether its numbers are finite."""
    import torch

    from bertlite.inference import InferenceModel

    model = InferenceModel.load(forged)
    ids = torch.arange(5, 65).view(3, 20) % min(model.config.vocab_size, 300)
    with torch.no_grad():
        found = model(ids)
    return all(bool(x.isfinite().all()) for x in found.to_tuple() if x is not None)


# The process that starts them


def sanitized_kernels() -> tuple[Path, dict[str, str]]:
    """Compile the kernels for sanitizers; return their path and the environment of a process that loads them."""
    best, compiler = library.usable_sets()[0], library.find_compiler()
    path = library.own_folder(library.cache_folder()) / f"sanitized-{library.file_name(best)}"
    if not path.exists():
        flags = [*library.FLAGS, "-O1", "-g", "-w", *best.flags, *SANITIZERS["address"]]
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            run_program([*compiler, *flags, str(library.SOURCES / library.MAIN), "-o", f"{folder}/kernels.so"])
            os.replace(f"{folder}/kernels.so", path)
    runtime = run_program([*compiler, "-print-file-name=libasan.so"]).strip()
    options = "detect_leaks=0:max_allocation_size_mb=256:allocator_may_return_null=1"
    return path, {"LD_PRELOAD": runtime, "ASAN_OPTIONS": options, "PYTHONMALLOC": "malloc"}


def take(folders: Sequence[Path], seed: int, tries: range, sanitized: bool) -> tuple[Counter[str], list[str]]:
    """Take tries in processes; return how many had each result, by loader, and the faults."""
    kernels, own = sanitized_kernels() if sanitized else ("", {})
    counts, faults, at = Counter[str](), list[str](), tries.start
    while at < tries.stop:
        given = json.dumps([[*map(str, folders)], seed, at, tries.stop, str(kernels)])
        command = [sys.executable, "-W", "ignore", "-m", "scripts.stress.folders", "--child", given]
        with (
            tempfile.TemporaryFile("w+") as errors,
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, env={**os.environ, **own}
            ) as child,
        ):
            assert child.stdout is not None
            for line in lines_in_time(child):
                at, *results = json.loads(line)
                for loader, result in zip(("runtime", "inference"), results, strict=True):
                    counts[f"{loader} {result.partition(':')[0]}"] += 1
                    faults += [f"try {at}, {loader}: {result}"] if result.startswith("fault") else []
                at += 1
            if at < tries.stop:
                errors.seek(0)
                faults.append(f"try {at}: the process ended ({child.returncode}): {errors.read()[-3000:]}")
                counts["crash"] += 1
                at += 1
    return counts, faults


def lines_in_time(child: "subprocess.Popen[str]") -> Iterator[str]:
    """Yield the lines that a process prints; end it if none comes in time."""
    assert child.stdout is not None
    while select.select([child.stdout], [], [], SECONDS)[0]:
        line = child.stdout.readline()
        if not line.endswith("\n"):
            break
        yield line
    child.kill()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=2000, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the number of the first try (default: %(default)s)")
    parser.add_argument("--without-sanitizer", action="store_true", help="run the usual kernels")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the same, and where it was run")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        folders, seed, first, end, kernels = json.loads(args.child)
        work([*map(Path, folders)], seed, range(first, end), kernels)
        return 0

    from bertlite.support.environment import environment
    from bertlite.support.files import write_json

    began, tries = time.monotonic(), range(args.first, args.first + args.tries)
    with tempfile.TemporaryDirectory(prefix="bertlite-folders-") as place:
        folders = make_folders(Path(place), [*MODELS])
        try:
            counts, faults = take(folders, args.seed, tries, not args.without_sanitizer)
        except FaultError as fault:
            print(fault, file=sys.stderr)
            return 1
    for each in faults:
        print(each, file=sys.stderr)
    record = {
        "what": "scripts/stress/folders.py",
        "tries": args.tries,
        "seed": args.seed,
        "folders": [folder.name for folder in folders],
        "sanitizers": [] if args.without_sanitizer else [*SANITIZERS["address"]],
        "results": dict(sorted(counts.items())),
        "faults": len(faults),
        "seconds": round(time.monotonic() - began),
    }
    print(json.dumps(record))
    if args.out:
        write_json(args.out, {**record, "environment": environment()})
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
