"""transformers.pipeline: with a model object, and by path, which goes through the Auto classes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import transformers

from bertlite import BertTokenizer
from tests.clients.checks.common import SIZES, Observed, Side, dense_and_pruned, equal, tiny

CLIENT = "pipeline"
WORDS = [f"word{i}" for i in range(SIZES["vocab_size"] - 5)]


@dataclass(frozen=True)
class Task:
    cls: str
    ask: Callable[[Any], Any]
    fields: dict[str, Any] = field(default_factory=dict)


def names(*labels: str) -> dict[str, Any]:
    return {"id2label": dict(enumerate(labels)), "label2id": {label: i for i, label in enumerate(labels)}}


TASKS = {
    "fill-mask": Task("BertForMaskedLM", lambda pipe: pipe("word3 word80 [MASK] word17", top_k=3)),
    "text-classification": Task(
        "BertForSequenceClassification",
        lambda pipe: pipe(["word5 word9", "word1 word2 word3"], top_k=None),
        names("bad", "good", "neither"),
    ),
    "token-classification": Task(
        "BertForTokenClassification",
        lambda pipe: pipe("word1 word44 word6 word7 word8 word9", aggregation_strategy="simple", ignore_labels=[]),
        names("O", "CITY"),
    ),
    "feature-extraction": Task("BertModel", lambda pipe: pipe(["word5 word9", "word1 word2 word3"])),
}


def worded(folder: Path, cls: str, pruned: bool = False, **fields: Any) -> Path:
    """Write a small random checkpoint with a tokenizer."""
    path = tiny(folder, cls, pruned, **fields)
    BertTokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]).save_pretrained(path)
    return path


@dense_and_pruned(CLIENT, "feature-extraction", task="feature-extraction")
@dense_and_pruned(CLIENT, "token-classification", task="token-classification")
@dense_and_pruned(CLIENT, "text-classification", task="text-classification")
@dense_and_pruned(CLIENT, "fill-mask", task="fill-mask")
def pipeline(side: Side, folder: Path, task: str, pruned: bool = False) -> Observed:
    it = TASKS[task]
    path = worded(folder, it.cls, pruned, **it.fields)
    model = side.load(it.cls, path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    by_object = transformers.pipeline(task, model=model, tokenizer=tokenizer, device="cpu")
    with side.loading():
        by_path = transformers.pipeline(task, model=str(path), device="cpu")
    side.owns(by_path.model)
    answer = it.ask(by_object)
    equal(it.ask(by_path), answer, what="the answers by path and by model")
    return {"answer": answer}
