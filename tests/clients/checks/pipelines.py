"""transformers.pipeline: with a model object, and by path, which goes through the Auto classes."""

import atexit
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import bertlite
from tests.clients.checks.common import SOME, Observed, Side, dense_and_pruned, equal, minilm, seed, taught

CLIENT = "pipeline"
MASK, IGNORED = 103, -100  # [MASK] in MiniLM's vocabulary, which is bert-base-uncased's
CAPITALS = {"france": "paris", "italy": "rome", "japan": "tokyo", "egypt": "cairo"}
REVIEWS = {
    "what a wonderful film": 1,
    "i enjoyed every minute of it": 1,
    "simply the best of the year": 1,
    "a dull and boring story": 0,
    "i hated it, a waste of time": 0,
    "the worst acting ever seen": 0,
}
PLACES = ("anna lives in paris", "the train to rome was late", "tokyo is larger than cairo", "he wrote a long letter")


@dataclass(frozen=True)
class Task:
    cls: str
    texts: Sequence[Any]
    labels: Callable[[Any], Tensor]
    ask: Callable[[Any], Any]
    right: Callable[[Any], bool]  # whether the answer is the one that was taught
    fields: dict[str, Any] = field(default_factory=dict)


def names(*labels: str) -> dict[str, Any]:
    return {"id2label": dict(enumerate(labels)), "label2id": {label: i for i, label in enumerate(labels)}}


def masked(batch: Any) -> Tensor:
    """Mask the last token before [SEP], in place; return the labels."""
    ids = batch["input_ids"]
    place = (torch.arange(len(ids)), batch["attention_mask"].sum(1) - 2)
    labels = torch.full_like(ids, IGNORED)
    labels[place] = ids[place]
    ids[place] = MASK
    return labels


def capitals(batch: Any) -> Tensor:
    """Label the name of a capital 1, another token 0, and padding not at all."""
    words = transformers.AutoTokenizer.from_pretrained(minilm())
    known = torch.tensor(words.convert_tokens_to_ids(list(CAPITALS.values())))
    return torch.isin(batch["input_ids"], known).long().masked_fill(batch["attention_mask"] == 0, IGNORED)


TASKS = {
    "fill-mask": Task(
        "BertForMaskedLM",
        [f"the capital of {land} is {town}" for land, town in CAPITALS.items()],
        masked,
        lambda pipe: pipe("the capital of italy is [MASK]", top_k=3),
        lambda answer: answer[0]["token_str"] == "rome",
    ),
    "text-classification": Task(
        "BertForSequenceClassification",
        list(REVIEWS),
        lambda _: torch.tensor(list(REVIEWS.values())),
        lambda pipe: pipe(["a wonderful film, i enjoyed it", "boring, a waste of time"], top_k=None),
        lambda answer: [each[0]["label"] for each in answer] == ["good", "bad"],
        names("bad", "good"),
    ),
    "token-classification": Task(
        "BertForTokenClassification",
        PLACES,
        capitals,
        lambda pipe: pipe("from paris to tokyo by train", aggregation_strategy="simple", ignore_labels=["O"]),
        lambda answer: [each["word"] for each in answer] == ["paris", "tokyo"],
        names("O", "CITY"),
    ),
    "feature-extraction": Task(
        "BertModel",
        [],
        lambda _: torch.tensor([]),
        lambda pipe: pipe(["a wonderful film", "simmer the soup slowly"]),
        lambda answer: [len(each[0]) for each in answer] == [5, 7],
    ),
}


@cache
def learnt(task: str) -> Path:
    """Train the checkpoint of a task, once in a process; return its folder."""
    it, seen = TASKS[task], tempfile.mkdtemp(prefix="bertlite-clients-")
    atexit.register(shutil.rmtree, seen, ignore_errors=True)
    seed()
    return taught(Path(seen), it.cls, it.texts, it.labels, **it.fields)


@dense_and_pruned(CLIENT, "feature-extraction", task="feature-extraction")
@dense_and_pruned(CLIENT, "token-classification", task="token-classification")
@dense_and_pruned(CLIENT, "text-classification", task="text-classification")
@dense_and_pruned(CLIENT, "fill-mask", task="fill-mask")
def pipeline(side: Side, folder: Path, task: str, pruned: bool = False) -> Observed:
    it = TASKS[task]
    path = learnt(task)
    if pruned:
        model = bertlite.prune_heads(getattr(bertlite, it.cls).from_pretrained(path), SOME)
        path = Path(shutil.copytree(path, folder / "pruned"))
        model.save_pretrained(path)
    model = side.load(it.cls, path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    by_object = transformers.pipeline(task, model=model, tokenizer=tokenizer, device="cpu")
    with side.loading():
        by_path = transformers.pipeline(task, model=str(path), device="cpu")
    side.owns(by_path.model)
    answer = it.ask(by_object)
    equal(it.ask(by_path), answer, what="the answers by path and by model")
    if not it.right(answer):
        raise AssertionError(f"taught otherwise: {str(answer)[:300]}")
    return {"answer": answer}
