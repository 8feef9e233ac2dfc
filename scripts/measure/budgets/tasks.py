"""The tasks of the comparison, made from four public data sets: two files of examples each, for training and judging.

sentiment    SST-2: positive or negative (accuracy)
similarity   STS benchmark: how alike two sentences are, 0 to 5 (Spearman's correlation)
entities     WNUT 17: does the message name somebody or something? (accuracy)
next         WikiText-2: does the second sentence follow the first in its article? (accuracy)
topic        WikiText-2: from which of its 20 longest articles is the sentence? (accuracy)
"""

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

from bertlite.rows import TEXT, Table, read_rows

Row = tuple[str, str, str]  # two texts, the second may be empty, and the label
LONGEST = 40  # words of a sentence from WikiText-2
ARTICLES = 20  # of WikiText-2, the longest
SHARE = 5  # of WikiText's sentences one in so many judges


def sentiment(data: Path, part: str) -> Iterator[Row]:
    for text, label in cells(data / "sst2" / f"{part}.tsv", "text", "label"):
        yield text, "", label


def similarity(data: Path, part: str) -> Iterator[Row]:
    rows = cells(data / "stsb" / f"stsb-en-{part}.csv", "first", "second", "score")
    yield from ((first, second, score) for first, second, score in rows)


def cells(path: Path, *columns: str) -> Iterator[list[str]]:
    """Yield the cells of each row of a file without a header."""
    return (row for _, row in read_rows(Table(path, [(name, TEXT) for name in columns], columns)))


def entities(data: Path, part: str) -> Iterator[Row]:
    name = "wnut17train.conll" if part == "train" else "emerging.dev.conll"
    for block in re.split(r"\n\s*\n", (data / "wnut17" / name).read_text(encoding="utf-8")):
        pairs = [line.split("\t") for line in block.splitlines() if "\t" in line]
        if pairs:
            tagged = any(tag.strip() != "O" for _, tag, *_ in pairs)
            yield " ".join(word for word, *_ in pairs), "", str(int(tagged))


def wiki_sentences(data: Path, part: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the article and the sentences of WikiText-2's paragraphs, of which one in SHARE judges."""
    article, number = "", 0
    for line in (data / "wikitext2" / "valid.txt").read_text(encoding="utf-8").splitlines():
        title = re.fullmatch(r"= ([^=]+) =", line.strip())
        if title:
            article = title[1]
        elif len(line) > 200:
            if (number % SHARE == 0) == (part == "dev"):
                parts = (each.split() for each in line.strip().split(" . "))
                yield article, [" ".join(words[:LONGEST]) for words in parts if len(words) > 5]
            number += 1


def next_sentence(data: Path, part: str) -> Iterator[Row]:
    draw = random.Random(0)
    pairs = [pair for _, sentences in wiki_sentences(data, part) for pair in pairwise(sentences)]
    for first, second in pairs:
        follows = draw.random() < 0.5
        yield first, second if follows else draw.choice(pairs)[1], str(int(follows))


def topic(data: Path, part: str) -> Iterator[Row]:
    lengths = Counter[str]()
    for article, sentences in wiki_sentences(data, "train"):
        lengths[article] += len(sentences)
    longest = [article for article, _ in lengths.most_common(ARTICLES)]
    for article, sentences in wiki_sentences(data, part):
        if article in longest:
            yield from ((sentence, "", str(longest.index(article))) for sentence in sentences)


TASKS: dict[str, tuple[Callable[[Path, str], Iterator[Row]], int]] = {  # the rows, and outputs; 1 is a number's
    "sentiment": (sentiment, 2),
    "similarity": (similarity, 1),
    "entities": (entities, 2),
    "next": (next_sentence, 2),
    "topic": (topic, ARTICLES),
}


def write_task(name: str, data: Path, folder: Path) -> dict[str, Path]:
    """Write the examples of a task as train.jsonl and dev.jsonl, unless they are there; return both paths."""
    rows, _ = TASKS[name]
    found = {part: folder / name / f"{part}.jsonl" for part in ("train", "dev")}
    for part, path in found.items():
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = [json.dumps({"a": a, "b": b, "label": label}) + "\n" for a, b, label in rows(data, part)]
            path.write_text("".join(lines), encoding="utf-8")
    return found


def has_pairs(name: str) -> bool:
    return name in ("similarity", "next")
