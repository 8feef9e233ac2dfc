"""Write a folder that `bertlite.runtime` runs without torch, and compare it with the original before it is kept.

Results for texts are compared: vectors with sentence-transformers, scores and labels with sentence-transformers'
CrossEncoder or a pipeline of transformers.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from os.path import abspath
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from bertlite import __version__
from bertlite.checkpoint.folders import check_output, replacing
from bertlite.checkpoint.reading import State
from bertlite.checkpoint.saving import OPTIMISED, dtype_name
from bertlite.inference import InferenceModel, optimize_for_inference
from bertlite.inference.native.linear import kernel_activation
from bertlite.inference.native.saving import CHECKPOINT, write_packed
from bertlite.inference.optimize import parse_compute_dtype
from bertlite.opened.checkpoint import Checkpoint
from bertlite.runtime import PackedModel
from bertlite.runtime.pooling import SCORE_ACTIVATIONS
from bertlite.runtime.processing import Processing
from bertlite.runtime.tasks import ABOUT, AFTER, TOKENIZER, checksum_of, to_dict
from bertlite.runtime.texts import check_texts
from bertlite.shipping.carried import carry_tokenizer
from bertlite.shipping.original import Original, pairs, processing_of, spans, what_is_kept
from bertlite.shipping.vectors import Dense, Normalize, VectorHead, read_head
from bertlite.support.contexts import own_context
from bertlite.support.files import to_json, write_json
from bertlite.support.process import door
from bertlite.support.progress import Progress
from bertlite.support.rows import TEXT, Table, read_rows
from bertlite.tokenizer import BertTokenizer
from bertlite.tokenizer.files import SUPERSEDED

ALLOWED = 1e-4  # difference over the largest number, in float32: MiniLM's vectors differ by 2e-7
PACKED = re.compile(rf"{OPTIMISED.pattern}|tokenizer(_config)?\.json|{SUPERSEDED.pattern}")  # files of a packed folder
WORDS = "The lighthouse keeper wrote down the weather every evening, in a book that no one has read since."
TEXTS = (  # to compare results on: from an empty text to the longest
    *("", " ", "a", "Time flies like an arrow.", "[SEP] İstanbul [MASK] ΑΣ"),
    *(" Où est la gare ? 駅はどこですか。\n", WORDS, f"{WORDS} " * 4, f"{WORDS} " * 60),
)
SENTENCES = Path(__file__).with_name("sentences.txt")  # to fit int8 to: of many kinds and languages, one a line
MANY, MOST_FITTED = 128, 256  # texts: from so many on, some are fitted to, and no more than these


@door
@own_context()
def pack(
    checkpoint: str | PathLike[str],
    folder: str | PathLike[str],
    *,
    dtype: torch.dtype | str = "float32",
    texts: str | PathLike[str] | Iterable[str] | None = None,
    reproducible: bool = False,
    progress: bool = False,
) -> dict[str, Any]:
    """Write a checkpoint as a folder for `bertlite.runtime`, which is replaced in one step.

    int8's weights are fitted to texts, which takes most of the time.

    Args:
        checkpoint: a hub id or a folder: of sentence-transformers, a CrossEncoder, a classifier or a tagger.
        dtype: "float32", "bfloat16" or "int8".
        texts: texts to compare results on, or the path of a file of them; by default a few built-in ones, from empty
            texts to the longest.  From 128 different texts on, every second one, 256 at most, is not compared: int8 is
            fitted to it.  Otherwise int8 is fitted to built-in sentences of many kinds and languages.
        reproducible: give the same bits on every processor, in float32 or int8; as `optimize_for_inference`.
        progress: show the current step.

    Returns:
        The record: the kind, the bytes written, the difference of float32 results from the original library's,
        relative to the largest, and the agreement in the dtype.  For vectors that is the smallest and mean cosine, and
        from 50 texts on the share of the ten nearest neighbours; or the share of labels, or scores' rank correlation.
        For int8 also how its weights were rounded, in words.

    Raises:
        ModuleNotFoundError: the library of the original is not installed.
        TypeError: a text is not a string.
        ValueError: the runtime cannot compute this checkpoint, there are no texts, or results differ: nothing is
            written then.
    """
    # Whatever the runtime cannot compute is refused before the model is loaded.
    source, out = Checkpoint.of(checkpoint), Path(folder).expanduser()
    numbers = parse_compute_dtype(dtype) or torch.float32
    check_output(out, CHECKPOINT, checkpoint, own=False)
    check_output(out, PACKED, checkpoint, texts, own=(out / ABOUT).exists())
    about, after = describe_checkpoint(source)

    # Texts that int8 is fitted to would show it better than it is, so others are compared.
    given, kind = texts_to_compare(texts, source.tokenizer), about.kind
    texts, fitted = texts_to_fit(given) if numbers == torch.int8 else (given, [])

    # The encoder's pooler goes: no vector depends on it, and the runtime has none.
    options: dict[str, Any] = {"add_pooling_layer": False} if kind == "encoder" else {}
    original = Original.load(source, kind, about.max_length, model_kwargs={"dtype": torch.float32})
    model = source.load(source.model_class, dtype=torch.float32, **options)
    optimise = partial(optimize_for_inference, model, backend="native", reproducible=reproducible)

    with Progress(None, "", what="pack", shown=progress) as bar:
        # In float32 both agree to rounding, unless the runtime does something else than the original.
        bar.stage(f"comparing results in float32 with {original.library}")
        taken = as_taken(kind, texts)
        wanted = original.results(taken)
        if kind != "tagger" and not np.isfinite(wanted).all():
            raise ValueError(f"results of {checkpoint} in {original.library} are not finite: repair its weights")

        with replacing(out, superseded=PACKED) as new:
            rounding = write(new, optimise(dtype=torch.float32), source.tokenizer, about, after)
            packed = PackedModel(new)
            found = replace(original, model=packed).results(taken)
            if not (error := largest_difference(found, wanted)) <= ALLOWED:  # nan too
                raise ValueError(
                    f"results of {checkpoint} without torch differ by {error:.1e} of the largest from"
                    f" {original.library}, more than {ALLOWED:g}: nothing was written"
                )

            # A narrower dtype changes results, which is no fault: the agreement is recorded, in the folder too.
            if numbers != torch.float32:
                name = dtype_name(numbers)
                bar.stage(f"rounding to {name}" + (f", fitted to {len(fitted)} texts" if fitted else ""))
                rounded = optimise(dtype=numbers, sample=sample_of(packed, fitted) if fitted else None)
                (new / ABOUT).unlink()  # no model is saved over a packed one
                rounding = write(new, rounded, source.tokenizer, about, after)
                bar.stage(f"comparing results in {name}")
                found = replace(original, model=PackedModel(new)).results(taken)
            if fitted:
                rounding = f"{rounding}, to {len(fitted)} {'built-in' if texts is given else 'given'} texts"

            kept = what_is_kept(kind, found, wanted)
            made = {"checkpoint": name_of(source), "bertlite": __version__, "kept": kept, "rounding": rounding}
            write_about(new, replace(about, made=made))
            size = sum(path.stat().st_size for path in new.iterdir())

    return {
        "what": "bertlite pack",
        "kind": kind,
        "dtype": dtype_name(numbers),
        "bytes": size,
        "original": original.library,
        "texts": len(texts),
        "difference": error,
        "kept": kept,
        "rounding": rounding,
    }


def texts_to_compare(
    given: str | PathLike[str] | Iterable[str] | None, tokenizer: BertTokenizer | None = None
) -> list[str]:
    """Return the given texts, a file's or the built-in ones; raise ValueError if there are none.

    Args:
        tokenizer: it leaves out built-in texts that have no tokens.
    """
    if isinstance(given, str | PathLike):
        texts = [text for _, (text,) in read_rows(Table(Path(given), [("text", TEXT)]))]
    else:
        texts = check_texts(TEXTS if given is None else given)
    if given is None and tokenizer is not None:
        texts = [text for text, ids in zip(texts, tokenizer(texts)["input_ids"], strict=True) if ids]
    if not texts:
        raise ValueError(f"{given} has no texts to compare; leave texts out for the built-in ones")
    return texts


def texts_to_fit(texts: list[str]) -> tuple[list[str], list[str]]:
    """Return the texts to compare results on, and those to fit int8 to: given ones if there are many, or built in."""
    different = [*dict.fromkeys(texts)]  # or a text could be both fitted to and compared
    if len(different) < MANY:
        return texts, SENTENCES.read_text(encoding="utf-8").splitlines()
    fitted = different[1::2][:MOST_FITTED]
    known = {*fitted}
    return [text for text in texts if text not in known], fitted


def sample_of(packed: PackedModel, texts: Sequence[str]) -> dict[str, list[list[int]]]:
    """Return the token ids of texts as a folder's model meets them: with its prompt, truncated, in pairs."""
    found = packed.texts.encode(as_taken(packed.kind, texts), packed.processing.prompt())
    segments = {"token_type_ids": [each.type_ids for each in found]} if packed.processing.segments else {}
    return {"input_ids": [each.ids for each in found], **segments}


def summary_lines(record: Mapping[str, Any], out: Mapping[str, Path]) -> Iterator[str]:
    """Yield the folder and the agreement with the original, in words."""
    yield f"{out['FOLDER']}: {record['kind']}, {record['dtype']}, {record['bytes'] / 1e6:.1f} MB"
    yield f"  from {record['original']}, {record['texts']} texts: {record['difference']:.1e} of the largest in float32"
    yield from (f"  {name}: {value:.4f}" for name, value in record["kept"].items())
    if record["rounding"]:
        yield f"  weights: {record['rounding']}"


def write(
    folder: Path, quick: InferenceModel, tokenizer: BertTokenizer, about: Processing, after: State
) -> str | None:
    """Write the files of a packed folder; return how its weights were rounded to 8 bits."""
    quick.save(folder)
    carry_tokenizer(tokenizer, folder, quick.config)
    if after:
        write_packed(folder / AFTER, after, {"format": 6, "byteorder": "little"})
    write_about(folder, about)
    return quick.rounding


def name_of(source: Checkpoint) -> str:
    """Return a hub id, or the name of a folder without its path, which tells of this machine and helps on no other."""
    path = Path(source).expanduser()
    return Path(abspath(path)).name if path.exists() else str(source)


def write_about(folder: Path, about: Processing) -> None:
    """Write runtime.json, with a checksum that also covers the tokenizer."""
    known = json.loads(to_json(to_dict(about)))
    write_json(folder / ABOUT, {**known, "crc32": checksum_of(known, folder / TOKENIZER)})


# The description of a checkpoint


def describe_checkpoint(source: Checkpoint) -> tuple[Processing, State]:
    """Return the steps before and after a checkpoint's encoder, and the tensors of those after pooling.

    Raises:
        ValueError: the runtime does not have it.
    """
    about = processing_of(source)
    about.check()
    if about.kind == "encoder":
        steps, after = head_steps(read_head(source), source)
        return replace(about, after=[*steps, *about.after]), after
    if about.activation not in SCORE_ACTIVATIONS:
        known = ", ".join(SCORE_ACTIVATIONS)
        raise ValueError(f"{source} has the activation {about.activation}; the runtime has {known}")
    return about, {}


def head_steps(head: VectorHead, source: Checkpoint) -> tuple[list[dict[str, Any]], State]:
    """Return the runtime's steps after pooling, and their tensors.

    Raises:
        ValueError: it does not have a module.
    """
    steps, tensors = list[dict[str, Any]](), State()
    for i, module in enumerate(head.modules):
        if isinstance(module, Normalize):
            steps.append({"type": "normalize"})
        elif isinstance(module, Dense) and not hasattr(module, "residual") and (act := kernel_activation(module.act)):
            linear = module.linear
            sizes = {"outputs": linear.out_features, "bias": linear.bias is not None}
            steps.append({"type": "dense", "name": str(i), "activation": act, **sizes})
            tensors |= {f"{i}.{part}": x.detach() for part, x in linear.named_parameters()}
        elif not isinstance(module, nn.Identity):
            residual = " and a residual" if hasattr(module, "residual") else ""
            what = f"Dense with {module.act}{residual}" if isinstance(module, Dense) else "LayerNorm"
            raise ValueError(f"{source} has a {what} after its pooling, which the runtime lacks: use it with torch")
    return steps, tensors


# Results


def as_taken(kind: str, texts: Sequence[str]) -> Sequence[Any]:
    """Return texts as this kind of model takes them: a cross-encoder each with the next one."""
    return pairs(texts) if kind == "cross-encoder" else texts


def largest_difference(found: Any, wanted: Any) -> float:
    """Return the largest difference, relative to the largest number if that is not 0; for other spans, infinity."""
    if isinstance(found, list):
        scores = [np.array([each["score"] for row in x for each in row]) for x in (found, wanted)]
        same = spans(found) == spans(wanted)
        return float(np.abs(scores[0] - scores[1]).max(initial=0)) if same else float("inf")
    return float(np.abs(found - wanted).max() / (np.abs(wanted).max() or 1))
