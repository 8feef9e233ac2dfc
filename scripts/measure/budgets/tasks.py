"""The tasks of the comparison, made from public data sets: two files of examples each, for training and judging.

A task is its data set's own, except for two: "entities" asks whether a message of WNUT 17 names somebody or something,
and "next" and "topic" are made of WikiText-2 (does the second sentence follow the first in its article? from which of
its 20 longest articles is the sentence?).  SICK gives two: the entailment of a pair, and how related it is.
"""

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from bertlite.support.rows import TEXT, Table, read_rows

Row = tuple[str, str, str]  # two texts, the second may be empty, and the label
JUDGED = 1500  # examples that judge, at most
HELD_OUT = 4  # of data without a split that is large enough, one example in so many judges, up to JUDGED
LONGEST = 40  # words of a sentence from WikiText-2
ARTICLES = 20  # of WikiText-2, the longest
SHARE = 5  # of WikiText's paragraphs one in so many judges
ENTAILMENT = ("CONTRADICTION", "NEUTRAL", "ENTAILMENT")


@dataclass(frozen=True)
class Dataset:
    """A task: rows(folder of all data, "train" or "dev"), and outputs of the head (1 is a number's)."""

    rows: Callable[[Path, str], Iterable[Row]]
    outputs: int = 2
    examples: int = 3000  # to fine-tune on, at most
    epochs: float = 2  # of fine-tuning
    pairs: bool = False


def cells(path: Path, *columns: str) -> list[list[str]]:
    """Return the cells of each row of a file without a header."""
    return [row for _, row in read_rows(Table(path, [(name, TEXT) for name in columns], columns))]


def lines(path: Path, encoding: str = "utf-8") -> list[str]:
    return path.read_text(encoding=encoding).strip("\n").split("\n")


def held_out(rows: list[Row], part: str) -> list[Row]:
    """Return a part of rows that have no split, or a small one."""
    drawn = random.Random(0).sample(rows, len(rows))
    judged = min(JUDGED, len(rows) // HELD_OUT)
    return drawn[judged:] if part == "train" else drawn[:judged]


def numbered(name: str) -> Callable[[Path, str], list[Row]]:
    """Return the reader of a file with a class and a text on each line."""

    def rows(data: Path, part: str) -> list[Row]:
        split = (line.split(" ", 1) for line in lines(data / name, "latin-1"))
        return held_out([(text.strip(), "", label) for label, text in split], part)

    return rows


def agnews(data: Path, part: str) -> list[Row]:
    found = cells(data / "agnews" / "test.csv", "class", "title", "text")
    return held_out([(f"{title}. {text}", "", str(int(label) - 1)) for label, title, text in found], part)


def named(rows: dict[str, list[Row]], part: str) -> list[Row]:
    """Return rows with the names of classes as numbers."""
    classes = sorted({label for *_, label in rows["train"]})
    return [(a, b, str(classes.index(label))) for a, b, label in rows[part]]


def banking77(data: Path, part: str) -> list[Row]:
    files = {"train": "train.csv", "dev": "test.csv"}
    read = {each: cells(data / "banking77" / name, "text", "class")[1:] for each, name in files.items()}
    return named({each: [(text, "", label) for text, label in found] for each, found in read.items()}, part)


def clinc150(data: Path, part: str) -> list[Row]:
    found = json.loads((data / "clinc150" / "data_full.json").read_text(encoding="utf-8"))
    read = {"train": found["train"], "dev": found["val"]}
    return named({each: [(text, "", label) for text, label in rows] for each, rows in read.items()}, part)


def sick(column: int) -> Callable[[Path, str], list[Row]]:
    def rows(data: Path, part: str) -> list[Row]:
        name = "SICK_train.txt" if part == "train" else "SICK_test_annotated.txt"
        found = [line.strip().split("\t") for line in lines(data / "sick" / name)[1:]]
        labels = {word: str(i) for i, word in enumerate(ENTAILMENT)}
        return [(row[1], row[2], labels.get(row[column], row[column])) for row in found]

    return rows


def xquad(data: Path, part: str) -> list[Row]:
    """Return texts with the number of their paragraph.

    "passages" are the paragraphs of all articles; "dev" has the questions to every second article, "train" the
    sentences of the other articles, and "paragraphs" their paragraphs.
    """
    articles = json.loads((data / "xquad" / "xquad.en.json").read_text(encoding="utf-8"))["data"]
    paragraphs = [(i % 2, each) for i, article in enumerate(articles) for each in article["paragraphs"]]
    rows = []
    for number, (judges, each) in enumerate(paragraphs):
        texts = [" ".join(each["context"].split())]
        if part == "dev":
            texts = [" ".join(question["question"].split()) for question in each["qas"]]
        elif part == "train":
            texts = re.split(r"(?<=[.!?]) (?=[A-Z])", texts[0])
        if part == "passages" or judges == (part == "dev"):
            rows += [(text, "", str(number)) for text in texts]
    return rows


def sst2(data: Path, part: str) -> list[Row]:
    return [(text, "", label) for text, label in cells(data / "sst2" / f"{part}.tsv", "text", "label")]


def stsb(data: Path, part: str) -> list[Row]:
    rows = cells(data / "stsb" / f"stsb-en-{part}.csv", "first", "second", "score")
    return [(first, second, score) for first, second, score in rows]


def tags(data: Path, part: str) -> list[Row]:
    """Return messages, and the tags of their words."""
    name = "wnut17train.conll" if part == "train" else "emerging.dev.conll"
    blocks = re.split(r"\n\s*\n", (data / "wnut17" / name).read_text(encoding="utf-8"))
    found = ([line.split("\t") for line in block.splitlines() if "\t" in line] for block in blocks)
    return [(" ".join(row[0] for row in rows), "", " ".join(row[1].strip() for row in rows)) for rows in found if rows]


def entities(data: Path, part: str) -> list[Row]:
    return [(text, "", str(int({*found.split()} != {"O"}))) for text, _, found in tags(data, part)]


def wiki_sentences(data: Path, part: str) -> list[tuple[str, list[str]]]:
    """Return the article and the sentences of WikiText-2's paragraphs, of which one in SHARE judges."""
    article, found = "", []
    for line in (data / "wikitext2" / "valid.txt").read_text(encoding="utf-8").splitlines():
        title = re.fullmatch(r"= ([^=]+) =", line.strip())
        if title:
            article = title[1]
        elif len(line) > 200:
            words = (each.split() for each in line.strip().split(" . "))
            found.append((article, [" ".join(each[:LONGEST]) for each in words if len(each) > 5]))
    return [each for i, each in enumerate(found) if (i % SHARE == 0) == (part == "dev")]


def next_sentence(data: Path, part: str) -> list[Row]:
    draw = random.Random(0)
    pairs = [pair for _, sentences in wiki_sentences(data, part) for pair in pairwise(sentences)]
    rows = []
    for first, second in pairs:
        follows = draw.random() < 0.5
        rows.append((first, second if follows else draw.choice(pairs)[1], str(int(follows))))
    return rows


def topic(data: Path, part: str) -> list[Row]:
    lengths = Counter[str]()
    for article, sentences in wiki_sentences(data, "train"):
        lengths[article] += len(sentences)
    longest = [article for article, _ in lengths.most_common(ARTICLES)]
    every = ((text, article) for article, sentences in wiki_sentences(data, part) for text in sentences)
    return [(text, "", str(longest.index(article))) for text, article in every if article in longest]


def capitals(data: Path, part: str) -> list[Row]:
    texts = [text.split() for _, sentences in wiki_sentences(data, part) for text in sentences]
    return [
        (" ".join(words), "", " ".join("capital" if word[0].isupper() else "O" for word in words)) for words in texts
    ]


TASKS = {
    "sst2": Dataset(sst2, epochs=3),
    "trec": Dataset(numbered("trec/TREC.train.all"), 6, epochs=3),
    "stsb": Dataset(stsb, 1, pairs=True),
    "agnews": Dataset(agnews, 4),
    "sick": Dataset(sick(4), 3, pairs=True),
    "subj": Dataset(numbered("subj/subj.all")),
    "entities": Dataset(entities),
    "banking77": Dataset(banking77, 77, examples=8000, epochs=5),
    "topic": Dataset(topic, ARTICLES),
    "mpqa": Dataset(numbered("mpqa/mpqa.all")),
    "next": Dataset(next_sentence, pairs=True),
    "cr": Dataset(numbered("cr/custrev.all")),
    "relatedness": Dataset(sick(3), 1, pairs=True),
    "mr": Dataset(numbered("mr/rt-polarity.all")),
    "clinc150": Dataset(clinc150, 150, examples=8000, epochs=5),
}
# of the main comparison, named before its runs: sentiment, kinds of questions, pairs with a class or a number, intents
MAIN = ("sst2", "trec", "sick", "stsb", "banking77")
TAGGED = {"tags": Dataset(tags), "capitals": Dataset(capitals)}


def write_task(name: str, data: Path, folder: Path) -> dict[str, Path]:
    """Write the examples of a task as train.jsonl and dev.jsonl, unless they are there; return both paths.

    If there are more than JUDGED examples, a sample judges.  A text that judges is not trained on.  Empty texts are
    left out.
    """
    found = {part: folder / name / f"{part}.jsonl" for part in ("train", "dev")}
    if not all(path.exists() for path in found.values()):
        rows = {part: list((TASKS | TAGGED)[name].rows(data, part)) for part in found}
        rows["dev"] = random.Random(0).sample(rows["dev"], min(JUDGED, len(rows["dev"])))
        judged = {(a, b) for a, b, _ in rows["dev"]}
        rows["train"] = [row for row in rows["train"] if row[:2] not in judged]
        found["train"].parent.mkdir(parents=True, exist_ok=True)
        for part, path in found.items():
            each = [json.dumps({"a": a, "b": b, "label": label}) + "\n" for a, b, label in rows[part] if a]
            path.write_text("".join(each), encoding="utf-8")
    return found
