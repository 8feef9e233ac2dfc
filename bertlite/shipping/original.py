"""A checkpoint in the library that it is for, its results for texts, and the share of them that another model keeps.

An encoder's results are vectors (texts, D), a cross-encoder's scores (pairs,), a classifier's probabilities (texts,
classes), and a tagger's the spans of each text.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertlite.opened.checkpoint import Checkpoint
from bertlite.runtime.contents import CALLS, CLASSES
from bertlite.runtime.processing import Processing
from bertlite.runtime.tasks import PackedModel
from bertlite.shipping.vectors import ENCODER
from bertlite.support.extras import import_optional
from bertlite.tokenizer.sentences import LEGACY_ENCODERS, MODULES, SENTENCE_CONFIG, last_name

Array = NDArray[Any]
NEAREST = 10  # neighbours of each text that are counted
NEIGHBOURS = "ten nearest neighbours"  # name of the share that is kept
CROSS_ENCODER = "CrossEncoder"  # sentence-transformers' type of such models
MOST = 2000  # neighbours are sought among at most so many texts


def processing_of(source: Checkpoint) -> Processing:
    """Return the steps before and after the encoder of a checkpoint that has results for texts.

    Raises:
        ValueError: its class has no kind, its labels are not numbered from 0, or it is a cross-encoder with further
            modules.
    """
    about, config, modules = source.processing, source.config, source.modules
    if not (kind := about.kind):
        raise ValueError(f"{source.name} is a {source.model_class.__name__}, not one of {', '.join(CLASSES)}")
    if kind != "encoder" and {*config.id2label} != {*range(config.num_labels)}:
        keys, last = ", ".join(map(str, config.id2label)), config.num_labels - 1
        raise ValueError(f"{source.name}: id2label in its config.json has the labels {keys}; number them 0 to {last}")

    # Without this, the library of the original would say only that an index is out of range.
    segment = max(source.tokenizer("a", "b")["token_type_ids"]) if kind == "cross-encoder" and about.segments else 0
    if segment >= config.type_vocab_size:
        raise ValueError(
            f"{source.name}: its tokenizer gives a pair's second text segment {segment}; the model has"
            f" {config.type_vocab_size}, from 0: take token_type_ids out of model_input_names in tokenizer_config.json"
        )

    # If a folder names another type, sentence-transformers reads only the weights and passes over its settings.
    found = source.place.values(SENTENCE_CONFIG).get("model_type", ENCODER) if modules else CROSS_ENCODER
    if kind == "cross-encoder" and (found != CROSS_ENCODER or len(modules) > 1):
        types = ", ".join(module["type"] for module in modules)
        raise ValueError(f"{source.name} is a {found} of {types}; a reranker must be a {CROSS_ENCODER} of one module")
    return about


def check_modules(source: Checkpoint) -> None:
    """Raise ValueError for an encoder's module that sentence-transformers has not supported since 2020."""
    for module in source.modules:
        if last_name(module["type"]) in LEGACY_ENCODERS:
            which = module["path"] or module["type"]
            raise ValueError(
                f"{source.place.get(MODULES)} is of sentence-transformers 0.x: change the type of {which} in it to"
                " sentence_transformers.models.Transformer, which reads that folder"
            )


@contextmanager
def named_errors(checkpoint: Checkpoint) -> Iterator[None]:
    """Raise ValueError that names a checkpoint for errors of a library that would name none."""
    try:
        yield
    except (TypeError, KeyError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"the library that {checkpoint} is for does not load it: {what}") from error


@dataclass(frozen=True)
class Original:
    """A checkpoint as its library loads it: a SentenceTransformer, a CrossEncoder, or a pipeline of transformers."""

    kind: str
    library: str
    model: Any

    @classmethod
    def load(cls, checkpoint: Checkpoint, kind: str, longest: int, device: str = "cpu", **given: Any) -> Any:
        """Load a checkpoint, pruned ones too.

        Args:
            longest: the number of tokens to truncate texts to.
            given: arguments of the library's, such as `model_kwargs`.

        Raises:
            ModuleNotFoundError: the library is not installed.
            ValueError: its library cannot load it.
        """
        from bertlite.hf.registry import registered

        transformers = import_optional("transformers", f"running this {kind}", "hf")
        if (own := checkpoint.origin.kind) not in transformers.CONFIG_MAPPING:
            raise ValueError(
                f"{checkpoint} is a {own!r} model, which this transformers does not know:"
                f" `bertlite convert {checkpoint} --out FOLDER` makes one that it loads"
            )

        # Encoders and rerankers are sentence-transformers', and all else a pipeline's.
        given |= {"device": device, **checkpoint.pinned}
        with registered(), named_errors(checkpoint):  # so that pruned checkpoints load
            if kind in ("encoder", "cross-encoder"):
                check_modules(checkpoint)
                library = import_optional("sentence_transformers", f"running this {kind}", "embed")
                make = library.SentenceTransformer if kind == "encoder" else library.CrossEncoder
                model = make(str(checkpoint), **given)
                model.max_seq_length = min(model.max_seq_length or longest, longest)
                model.tokenizer.padding_side = "right"  # on the left it would shift absolute positions
                return cls(kind, "sentence-transformers", model)

            if kind == "tagger":
                how: dict[str, Any] = {"task": "token-classification", "aggregation_strategy": "first"}
            else:
                how = {"task": "text-classification", "top_k": None}
            model = transformers.pipeline(model=str(checkpoint), **how, **given)
            model.tokenizer.model_max_length = longest
            config = model.model.config
            each = config.id2label.items()  # two labels of a classifier may have one name
            config.id2label = {i: i if kind == "classifier" else str(name) for i, name in each}
            return cls(kind, "transformers", model)

    def results(self, texts: Sequence[Any], **options: Any) -> Any:
        """Return the results for texts, or for pairs of them.

        Args:
            options: options of the library's call, such as batch_size; by default its own.
        """
        if self.library == "sentence-transformers" or isinstance(self.model, PackedModel):  # the calls have its names
            return getattr(self.model, CALLS[self.kind][0])(list(texts), show_progress_bar=False, **options)
        if self.kind == "tagger":
            return self.model(list(texts), **options)
        names = ("text", "text_pair")
        asked = [text if isinstance(text, str) else dict(zip(names, text, strict=True)) for text in texts]
        found = self.model(asked, truncation=True, **options)
        return np.array([[each["score"] for each in sorted(row, key=itemgetter("label"))] for row in found])


def pairs(texts: Sequence[str]) -> list[tuple[str, str]]:
    """Return each text with the next one."""
    return list(zip(texts, (*texts[1:], texts[0]), strict=True))


# Shares of results that are kept ------------------------------------------------------------------------------------


def what_is_kept(kind: str, found: Any, wanted: Any) -> dict[str, float]:
    """Return how much of an original's results other results keep, by name: shares of 1, cosines or correlations.

    Neighbours are the texts with the largest cosine; they are counted from 50 texts on, among the first 2,000.
    """
    if kind == "tagger":
        each = [(set(a), set(b)) for a, b in zip(spans(found), spans(wanted), strict=True)]
        both, all_spans = sum(len(a & b) for a, b in each), sum(len(a) + len(b) for a, b in each)
        same = {"texts with the same labels": float(np.mean([a == b for a, b in each]))}
        return same | ({"spans in both, as F1": 2 * both / all_spans} if all_spans else {})
    if kind == "classifier":
        return {"texts with the same label": same_labels(found, wanted)}
    if kind == "cross-encoder":
        return {"rank correlation of scores": spearman(found, wanted)}
    cosines = (unit_vectors(found) * unit_vectors(wanted)).sum(1)
    kept = {"smallest cosine": float(cosines.min()), "mean cosine": float(cosines.mean())}
    if len(found) >= 5 * NEAREST:
        kept[NEIGHBOURS] = float(kept_neighbours(found, wanted).mean())
    return kept


def kept_neighbours(found: Array, wanted: Array) -> Array:
    """Return the share of each text's nearest texts that other vectors keep, among the first `MOST`, (texts,)."""
    units = (unit_vectors(x[:MOST]) for x in (found, wanted))
    nearest = [np.argsort(-(x @ x.T) + 2 * np.eye(len(x)), axis=1)[:, :NEAREST] for x in units]
    return np.array([len({*a} & {*b}) / NEAREST for a, b in zip(*nearest, strict=True)])


def unit_vectors(vectors: Array) -> Array:
    """Return vectors with length 1, in float64."""
    exact = np.asarray(vectors, np.float64)
    return exact / np.linalg.norm(exact, axis=1, keepdims=True)


def same_labels(found: Array, wanted: Array) -> float:
    """Return the share of rows, (…, classes), whose largest number belongs to the same class."""
    return float(np.mean(found.argmax(-1) == wanted.argmax(-1)))


def spans(rows: list[Any]) -> list[list[tuple[Any, ...]]]:
    return [[(each["entity_group"], each["start"], each["end"]) for each in row] for row in rows]


def spearman(found: Array, wanted: Array) -> float:
    """Return Spearman's rank correlation, of (n,) or (n, 1) numbers; 0 if either side is constant."""
    from scipy.stats import spearmanr

    sides = np.ravel(found), np.ravel(wanted)
    varies = all(np.ptp(x) > 0 for x in sides)  # False for nan
    return float(spearmanr(*sides).statistic) if varies else 0.0
