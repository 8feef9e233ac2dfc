"""The calls of a packed folder: vectors of texts, scores of texts or pairs, labels of words.

Shapes:  B texts · T tokens of all of them · D numbers of a vector · L labels
"""

import json
import math
import operator
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding

from .contents import ABOUT_FORMAT, CALLS, ENTRIES, KINDS, POOLING, RULES, STORED, TEXTS, Tensors, word_count
from .encoder import Encoder, Floats, PackedLinear, States
from .fields import Maybe, check_fields, must_be, one_of, parse_json, whole_number
from .library import load_kernels
from .options import NAMES, Progress, RunOptions, check_options, print_progress
from .packed import FILE, OpenedFile, open_packed, read_packed
from .pooling import SCORE_ACTIVATIONS, SIMILARITIES, normalize, pool, softmax
from .processing import Processing
from .structs import Kernels
from .tagging import spans_of, words_of
from .texts import CHUNK, Pair, Texts, TokenBatch, batches, check_text, check_texts, run_batches

ABOUT, TOKENIZER = "runtime.json", "tokenizer.json"
AFTER = "after.safetensors"  # weights of the steps after pooling
MOST_THREADS = 4096
WAY_OUT = "pack the model again"


class PackedModel:
    """A packed folder: a sentence encoder, a cross-encoder, a classifier, or a tagger of words.

    Several threads may call one object.  Its calls depend on its kind: an encoder has `encode`, a cross-encoder
    `predict` and `rank`, a classifier `predict`, a tagger `tag`.  All take the options of `RunOptions`.  A copy loads
    the folder again, also one that another process unpickles.

    Args:
        folder: a folder that `bertlite pack` wrote.
        threads: by default all processors that this process may use; in a container, its limit.
        batch_tokens: the number of tokens that run at once.

    Raises:
        FileNotFoundError: a file of the folder is not there.
        TypeError: the folder is no path.
        ValueError: a file is damaged, or of another format; or a number is not an integer in its range.
        NativeKernelsError: there are no kernels for this machine.
    """

    def __init__(
        self, folder: str | os.PathLike[str], threads: int | None = None, batch_tokens: int = 4096, **habits: Any
    ) -> None:
        check_options("load", habits)
        if not (isinstance(folder, str | os.PathLike) and os.fspath(folder)):
            raise TypeError(f"folder is {folder!r:.80}; give a path")

        # The arguments are kept as they were given: a copy in another process may have other processors.
        self.folder, self.made_with = Path(folder).expanduser().absolute(), (threads, batch_tokens)
        self.processing = read_runtime_json(self.folder / ABOUT)
        self.kind, self.labels = self.processing.kind, [*self.processing.labels]
        self.threads = check_count("threads", available_processors() if threads is None else threads, MOST_THREADS)
        self.batch_tokens = check_count("batch_tokens", batch_tokens)

        self.texts = Texts(self.folder / TOKENIZER, self.processing)

        # Each file obeys its own rules by now; here they are held against each other.
        file, about = read_packed(self.folder / FILE, words_later=True), to_dict(self.processing)
        check_fields(self.folder / ABOUT, about, rules_beside(file.about, self.kind, self.texts), WAY_OUT)
        self.texts.check_ids(word_count(file.about))

        self.dtype = file.dtype
        self.reproducible = file.about.get("reproducible") is True
        kernels = load_kernels(self.reproducible)
        self.encoder = Encoder(file, kernels)

        # The steps after pooling may change the width of a vector, so one vector is computed to learn it.
        hidden = self.encoder.model.hidden_size
        self.after = after_pooling(self.folder, self.processing, hidden, kernels) if self.kind == "encoder" else []
        states = np.zeros((1, hidden), dtype=np.float32)
        self.dimension = len(self.vector(states)) if self.kind == "encoder" else 0  # D

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.folder, *self.made_with)

    def __getattr__(self, name: str) -> Any:
        hint = f": {NAMES[name]}" if name in NAMES else ""
        raise AttributeError(f"{type(self).__name__} has no {name!r}{hint}")

    def encode(
        self,
        texts: str | Sequence[str],
        *,
        prompt: str | None = None,
        prompt_name: str | None = None,
        normalize_embeddings: bool = False,
        **options: Unpack[RunOptions],
    ) -> Floats:
        """Return the vectors of texts, (B, D), float32; for one text (D,).

        Args:
            prompt: a string to put before each text; by default the folder's prompt with `prompt_name`.
            prompt_name: the name of one of the folder's prompts; by default the default one.
            normalize_embeddings: scale vectors to length 1, even if the folder does not.
            options: see `RunOptions`.

        Raises:
            TypeError: this folder is no encoder, a text or the prompt is not a string, or there is no such option.
            ValueError: there is no such prompt, or a text holds half of a surrogate pair or has no tokens.
        """
        self.require("encode")
        one = isinstance(texts, str)
        texts = check_texts([texts] if one else texts)

        # Some encoders leave the prompt's tokens out of the pooled vector.
        before = self.prompt_of(prompt, prompt_name)
        skipped = 0 if self.processing.include_prompt or not before else self.texts.prompt_length(before)

        vectors = np.empty((len(texts), self.dimension), dtype=np.float32)
        for rows, batch, states in self.run("encode", texts, before, first_only=False, skip=skipped, **options):
            for row, tokens in zip(rows, split_rows(states.tokens, batch.lengths), strict=True):
                vector = self.vector(tokens, skipped)
                vectors[row] = normalize(vector) if normalize_embeddings else vector
        return vectors[0] if one else vectors

    def similarity(self, one: Floats, other: Floats) -> Floats:
        """Return the similarity of each vector with each other one, (B, D) and (C, D) -> (B, C).

        The folder names the function, as sentence-transformers does: cosine, dot, euclidean or manhattan.

        Raises:
            TypeError: this folder is no encoder.
            ValueError: the vectors have different numbers of elements.
        """
        self.require("similarity")
        # Products of 8-bit integers would overflow.
        one, other = (np.atleast_2d(np.asarray(x, dtype=np.float32)) for x in (one, other))
        if (width := one.shape[-1]) != (wanted := other.shape[-1]):
            raise ValueError(f"vectors of {width} and of {wanted} numbers: encode both with the same model")
        return SIMILARITIES[self.processing.similarity](one, other)

    @property
    def max_seq_length(self) -> int:
        """The most tokens of a text, special ones included; longer texts are truncated.  It can be set."""
        return self.processing.max_length

    @max_seq_length.setter
    def max_seq_length(self, tokens: int) -> None:
        specials = self.texts.tokenizer.num_special_tokens_to_add("predict" in CALLS[self.kind])
        longest = check_count("max_seq_length", tokens, self.encoder.embeddings["positions"], least=max(1, specials))
        self.processing = replace(self.processing, max_length=longest)
        self.texts = Texts(self.folder / TOKENIZER, self.processing)

    def prompt_of(self, prompt: str | None, name: str | None) -> str:
        """Return the string to put before texts: a given one, or else the folder's with a name."""
        found = self.processing.prompt(name) if prompt is None else prompt
        check_text("prompt", found)
        return found

    def vector(self, tokens: Floats, skip: int = 0) -> Floats:
        """Return the vector of a text, (D,), from the states of its tokens without `skip` at the beginning."""
        x = pool(tokens, self.processing.modes, skip)
        for step in self.after:
            x = step(x)
        return x

    def predict(
        self,
        texts: Sequence[str | Pair],
        *,
        prompt: str | None = None,
        prompt_name: str | None = None,
        **options: Unpack[RunOptions],
    ) -> Floats:
        """Return the scores of texts, or of pairs of texts: (B, L), or (B,) for a cross-encoder with one label.

        They are outputs of the activation that the folder names; a classifier's are probabilities.  A text, or the
        first of a pair, gets the prompt.

        Args:
            prompt, prompt_name, options: as for `encode`.

        Raises:
            TypeError: this folder gives no scores, a text is neither a string nor a pair, or there is no such option.
            ValueError: there is no such prompt, or a text holds half of a surrogate pair or has no tokens.
        """
        self.require("predict")
        texts, before = check_texts(texts, pairs=True), self.prompt_of(prompt, prompt_name)
        scores = np.empty((len(texts), len(self.labels)), dtype=np.float32)
        for rows, _, states in self.run("predict", texts, before, first_only=True, **options):
            assert states.pooled is not None
            logits = self.encoder.score(states.pooled, self.threads)
            scores[rows] = SCORE_ACTIVATIONS[self.processing.activation](logits.astype(np.float64))
        return scores[:, 0] if self.kind == "cross-encoder" and len(self.labels) == 1 else scores

    def rank(
        self,
        query: str,
        texts: Sequence[str],
        *,
        top_k: int | None = None,
        return_documents: bool = False,
        **options: Any,
    ) -> list[dict[str, Any]]:
        """Return the texts by their score with a query, the best first: {"corpus_id": index, "score": score}.

        Args:
            top_k: the most texts to return; by default all.
            return_documents: add each text, as "text".
            options: as for `predict`.

        Raises:
            TypeError: this folder is no cross-encoder, or a text is not a string.
            ValueError: it has several labels, so there is no one score to rank by; or a text holds half of a surrogate
                pair; or `top_k` is not a number from 1 on.
        """
        self.require("rank")
        if len(self.labels) != 1:
            raise ValueError(f"ranking needs one score; this folder has labels {', '.join(map(str, self.labels))}")
        check_text("query", query)
        if top_k is not None:
            top_k = check_count("top_k", top_k)
        texts = check_texts(texts)

        scores = self.predict([(query, text) for text in texts], **options)
        order: list[int] = np.argsort(-scores, kind="stable")[:top_k].tolist()
        more = [{"text": texts[i]} if return_documents else {} for i in order]
        return [{"corpus_id": i, "score": float(scores[i]), **each} for i, each in zip(order, more, strict=True)]

    def tag(self, texts: Sequence[str], **options: Unpack[RunOptions]) -> list[list[dict[str, Any]]]:
        """Return the labelled spans of each text, as transformers' pipeline with aggregation_strategy="first".

        Each is {"entity_group": label, "score": mean of its words', "word": text, "start": first character, "end"}.  A
        word has the label of its first token.  Words with label "O" are left out.

        Raises:
            TypeError: this folder tags no words, or a text is not a string.
            ValueError: a text holds half of a surrogate pair or has no tokens.
        """
        self.require("tag")
        texts, unknown = check_texts(texts), self.processing.unknown
        found: list[list[dict[str, Any]]] = [[] for _ in texts]
        for rows, batch, states in self.run("tag", texts, "", first_only=False, **options):
            logits = self.encoder.score(states.tokens, self.threads).astype(np.float64)
            parts = zip(rows, batch.encodings, split_rows(logits, batch.lengths), strict=True)
            for row, encoding, each in parts:
                words = words_of(texts[row], encoding, softmax(each), self.labels, self.texts.tokenizer, unknown)
                found[row] = spans_of(texts[row], words)
        return found

    def run(
        self,
        call: str,
        texts: Sequence[str | Pair],
        prompt: str,
        *,
        first_only: bool,
        skip: int = 0,
        batch_size: int | None = None,
        show_progress_bar: bool | None = False,
        progress: Progress | None = None,
        **habits: Any,
    ) -> Iterator[tuple[list[int], TokenBatch, States]]:
        """Yield the rows of each batch, its tokens, and the encoder's output for them.

        Raises:
            ValueError: a text has no tokens, or only `skip` of them, its prompt's.
        """
        check_options(call, habits)

        most = math.inf if batch_size is None else check_count("batch_size", batch_size)
        watchers = [*([print_progress] if show_progress_bar else []), *([] if progress is None else [progress])]

        def compute(encodings: list[Encoding]) -> tuple[TokenBatch, States]:
            batch = TokenBatch(encodings, self.processing.segments)
            return batch, self.encoder.run(batch.ids, batch.segments, batch.lengths, first_only, self.threads)

        # Texts are encoded in chunks, so that a generator of results does not hold the encodings of all texts.
        done = 0
        for start in range(0, len(texts), CHUNK):
            encodings = self.texts.encode(texts[start : start + CHUNK], prompt)
            lengths = [len(each) for each in encodings]

            # The kernels take no empty sequence, and behind a prompt alone there is nothing to pool.
            if (least := min(lengths)) <= skip:
                i = start + lengths.index(least)
                which = f"no tokens{' after its prompt' * (skip > 0)}"
                raise ValueError(f"text {i} is {texts[i]!r:.80}, which has {which} and so no result: leave it out")

            groups = batches(lengths, self.batch_tokens, most=most)
            for rows, (batch, states) in run_batches(encodings, groups, partial(map, compute)):
                yield [start + row for row in rows], batch, states
                done += len(rows)
                for watch in watchers:
                    watch(done, len(texts))

    def require(self, call: str) -> None:
        """Raise TypeError if a folder of this kind has no such call."""
        if call not in CALLS[self.kind]:
            known = ", ".join(CALLS[self.kind])
            raise TypeError(f"{self.folder} is packed as {self.kind}, which has no {call}(); have: {known}")


def check_count(name: str, value: Any, most: float = math.inf, least: int = 1) -> int:
    """Return an integer; raise ValueError unless it is one, from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not least <= value <= most:
        wanted = f"{least} {'or more' if most == math.inf else f'to {most}'}"
        raise ValueError(f"{name} is {value!r}; it must be an integer, {wanted}")
    return int(value)


def split_rows(x: NDArray[Any], lengths: Sequence[int]) -> list[NDArray[Any]]:
    """Return the rows of each text."""
    return np.split(x, np.cumsum(lengths)[:-1])


def is_packed(folder: str | os.PathLike[str]) -> bool:
    """Return whether `bertlite pack` wrote a folder."""
    return (Path(folder).expanduser() / ABOUT).is_file()


def read_runtime_json(path: Path) -> Processing:
    """Return a folder's description of itself; raise ValueError if a field breaks its rule."""
    folder = path.parent
    if not folder.exists():
        raise FileNotFoundError(f"there is no folder {folder}; `bertlite pack CHECKPOINT --out FOLDER` writes one")
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is no packed folder: it has no {path.name}; write one with `bertlite pack`")
    values = parse_json(path, path.read_bytes(), WAY_OUT)
    check_fields(path, values, RULES, WAY_OUT)
    if values.pop("crc32", None) != checksum_of(values, path.with_name(TOKENIZER)):
        raise ValueError(f"{path} or {TOKENIZER} is damaged: its bytes are not as written; {WAY_OUT}")
    return from_dict(values)


def from_dict(values: Mapping[str, Any]) -> Processing:
    """Return the description in a runtime.json; an entry that an earlier version did not write has its default."""
    own = {"kind", "made", *ENTRIES[values["kind"]]} - {"pooling"}
    groups = (values, own), (values["texts"], TEXTS[0]), (values.get("pooling", {}), POOLING)
    return Processing(**{name: group[name] for group, names in groups for name in names if name in group})


def to_dict(about: Processing) -> dict[str, Any]:
    """Return the content of a runtime.json without its checksum, in the order of its entries."""
    texts, pooling = ({name: getattr(about, name) for name in names} for names in (TEXTS[0], POOLING))
    found = {**vars(about), "format": ABOUT_FORMAT, "texts": texts, "pooling": pooling}
    names = ("format", "kind", "texts", *ENTRIES[about.kind], *(["made"] if about.made else []))
    return {name: found[name] for name in names}


def rules_beside(native: dict[str, Any], kind: str, texts: Texts) -> dict[str, Any]:
    """Return the rules that runtime.json must obey for the model, which its file describes, and the tokenizer."""
    count = len(native["config"].get("id2label") or ())
    specials = texts.tokenizer.num_special_tokens_to_add("predict" in CALLS[kind])
    return {
        "kind": one_of(*(each for each, name in KINDS.items() if name == native["class"])),
        "texts": {"max_length": whole_number(max(1, specials), native["embeddings"]["positions"])},
        "labels": Maybe(must_be(f"a list of {count} names", lambda x: kind == "encoder" or len(x) == count)),
    }


def checksum_of(values: dict[str, Any], tokenizer: Path) -> str:
    """Return the checksum of a folder's description of itself, and of its tokenizer."""
    return f"{zlib.crc32(tokenizer.read_bytes(), zlib.crc32(json.dumps(values, sort_keys=True).encode())):08x}"


def available_processors() -> int:
    """Return the number of processors that this process may use, within the limits of its container."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([count, *map(math.ceil, processor_limits())]))


def processor_limits() -> Iterator[float]:
    """Yield the limits of processor time, in processors, of the control groups that hold this process."""
    mounts = [line.split(" - ", 1) for line in read_or_empty(Path("/proc/self/mountinfo")).splitlines()]
    for line in read_or_empty(Path("/proc/self/cgroup")).splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):  # the line of cgroups 2 has none
            continue

        # A container's mount has its own group at the root, whose path on the host may be in front of `group`.
        kind = "cgroup" if controllers else "cgroup2"
        found = [
            where.split()[3:5]
            for where, what in mounts
            if what.split()[0] == kind and (not controllers or "cpu" in what.split()[-1].split(","))
        ]

        # Without a mount of its kind, the usual place is tried.  A group's own path counts only inside its mount.
        for root, mount in found or [["/", f"/sys/fs/cgroup/{controllers}"]]:
            inner = PurePosixPath(group)
            inner = inner.relative_to(root if inner.is_relative_to(root) else "/")
            groups = [PurePosixPath("."), *(() if ".." in inner.parts else (inner, *inner.parents))]
            for folder in {Path(mount, each) for each in groups}:  # a group above also limits those in it
                names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if controllers else ("cpu.max",)
                stated = " ".join(read_or_empty(folder / name) for name in names).split()
                if len(stated) == 2 and all(each.isdecimal() and int(each) for each in stated):  # else max, or -1
                    yield int(stated[0]) / int(stated[1])


def read_or_empty(path: Path) -> str:
    """Return the text of a file of the system; "" if there is none."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""


# The steps after pooling


def apply_row(layer: PackedLinear, x: Floats) -> Floats:
    """Return a layer's output for one vector, computed alone, so that other vectors cannot change a bit of it."""
    return layer(x[None])[0]


def after_pooling(folder: Path, about: Processing, hidden: int, kernels: Kernels) -> list[Callable[[Floats], Floats]]:
    """Return the functions of the steps after pooling.

    Args:
        hidden: the width of the states that are pooled.
    """
    tensors = dict[str, NDArray[Any]]()
    if any(each["type"] == "dense" for each in about.after):
        with open_packed(folder / AFTER, {}) as opened:
            tensors = opened.read(dense_tensors(opened, about.after, hidden * len(about.modes))).tensors

    # Each step becomes a function of one vector.
    made: list[Callable[[Floats], Floats]] = []
    for each in about.after:
        if each["type"] == "normalize":
            made.append(normalize)
        elif each["type"] == "truncate":
            made.append(operator.itemgetter(slice(each["size"])))
        else:
            weight, bias = tensors[f"{each['name']}.weight"], tensors.get(f"{each['name']}.bias")
            made.append(partial(apply_row, PackedLinear(kernels, weight, bias, each["activation"])))
    return made


def dense_tensors(file: OpenedFile, steps: Sequence[Mapping[str, Any]], width: int) -> Tensors:
    """Return the tensors of the steps on vectors of a width; earlier folders state neither outputs nor bias."""
    found: Tensors = {}
    for each in steps:
        if each["type"] == "truncate":
            width = min(width, each["size"])
        elif each["type"] == "dense":
            weight, bias = (f"{each['name']}.{part}" for part in ("weight", "bias"))

            stated = file.entries.get(weight, {}).get("shape") or [1]
            outputs = each.get("outputs", max(1, stated[0]))
            found[weight] = STORED["float32"], (outputs, width)
            if each.get("bias", bias in file.entries):
                found[bias] = STORED["float32"], (outputs,)
            width = outputs
    return found
