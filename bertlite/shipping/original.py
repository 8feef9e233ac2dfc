"""A checkpoint in the library that it is for, its results for texts, and the share of them that another model keeps.

An encoder's results are vectors (texts, D), a cross-encoder's scores (pairs,), a classifier's probabilities (texts,
classes), and a tagger's the spans of each text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertlite.checkpoint.files import Source, locate
from bertlite.models.heads import CLASSES
from bertlite.shipping.carried import class_for
from bertlite.support.extras import import_optional
from bertlite.tokenizer import BertTokenizer
from bertlite.tokenizer.sentences import SENTENCE_CONFIG, last_name, read_modules, read_object

Array = NDArray[Any]
NEAREST = 10  # neighbours of each text that are counted
NEIGHBOURS = "ten nearest neighbours"  # name of the share that is kept
PIPELINES = {"multi_label_classification": "Sigmoid", "regression": "Identity"}  # a pipeline's activations
ACTIVATION_BEFORE_4 = "sbert_ce_default_activation_function"  # a key in config.json of sentence-transformers 3
MOST = 2000  # neighbours are sought among at most so many texts


def checkpoint_kind(source: Source, config: Any) -> tuple[str, str]:
    """Return the kind of a checkpoint, and the name of its scores' activation among torch's modules.

    A cross-encoder is a classifier that sentence-transformers loads as one; one with a single label is.

    Raises:
        ValueError: its class has no kind.
    """
    cls = class_for(source)
    if (kind := cls.runtime_kind) is None:
        known = ", ".join(name for name, each in CLASSES.items() if each.runtime_kind)
        raise ValueError(f"{source.name} is a {cls.__name__}, not one of {known}")
    whole, own = (read_object(locate(source), name) for name in (SENTENCE_CONFIG, "config.json"))
    stated = own.get("sentence_transformers") or {}
    named = [whole.get("activation_fn"), stated.get("activation_fn"), own.get(ACTIVATION_BEFORE_4)]
    if kind == "classifier" and (config.num_labels == 1 or stated or named[2] or read_modules(locate(source))):
        usual = "Sigmoid" if config.num_labels == 1 else "Identity"
        return "cross-encoder", last_name(next((name for name in named if name), usual))
    return kind, PIPELINES.get(config.problem_type, "Softmax")


def longest_text(tokenizer: BertTokenizer, config: Any) -> int:
    """Return the most tokens of a text that the library of a checkpoint reads."""
    most = tokenizer.sentences.max_seq_length or tokenizer.model_max_length
    return min(most, int(config.max_position_embeddings))


@dataclass(frozen=True)
class Original:
    """A checkpoint as its library loads it: a SentenceTransformer, a CrossEncoder, or a pipeline of transformers.

    Args:
        labels: a classifier's labels, in the order of its outputs.
    """

    kind: str
    library: str
    model: Any
    labels: tuple[str, ...] = ()

    @classmethod
    def load(cls, checkpoint: str, kind: str, longest: int, labels: Sequence[str] = (), device: str = "cpu") -> Any:
        """Load a checkpoint, pruned ones too.

        Args:
            longest: the number of tokens to truncate texts to.

        Raises:
            ModuleNotFoundError: the library is not installed.
        """
        from bertlite.hf.registry import registered

        with registered():  # so that pruned checkpoints load
            if kind in ("encoder", "cross-encoder"):
                library = import_optional("sentence_transformers", f"running this {kind}", "embed")
                if kind == "encoder":
                    model = library.SentenceTransformer(checkpoint, device=device)
                    model.max_seq_length = min(model.max_seq_length or longest, longest)
                else:
                    model = library.CrossEncoder(checkpoint, device=device, max_length=longest)
                return cls(kind, "sentence-transformers", model)
            transformers = import_optional("transformers", f"running this {kind}", "hf")
            if kind == "tagger":
                how: dict[str, Any] = {"task": "token-classification", "aggregation_strategy": "first"}
            else:
                how = {"task": "text-classification", "top_k": None}
            model = transformers.pipeline(model=checkpoint, device=device, **how)
            model.tokenizer.model_max_length = longest
            return cls(kind, "transformers", model, tuple(labels))

    def results(self, texts: Sequence[Any], **options: Any) -> Any:
        """Return the results for texts, or for pairs of them.

        Args:
            options: options of the library's call, such as batch_size; by default its own.
        """
        if self.kind == "encoder":
            return self.model.encode(list(texts), show_progress_bar=False, **options)
        if self.kind == "cross-encoder":
            return self.model.predict(list(texts), show_progress_bar=False, **options)
        if self.kind == "tagger":
            return self.model(list(texts), **options)
        asked = [
            text if isinstance(text, str) else dict(zip(("text", "text_pair"), text, strict=True)) for text in texts
        ]
        found = [
            {each["label"]: each["score"] for each in row} for row in self.model(asked, truncation=True, **options)
        ]
        return np.array([[row[label] for label in self.labels] for row in found])


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
    """Return vectors with length 1."""
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


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
