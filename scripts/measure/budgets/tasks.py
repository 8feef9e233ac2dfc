"""The tasks of the comparison, made from four public data sets: two files of examples each, for training and judging.

sentiment    SST-2: positive or negative (accuracy)
similarity   STS benchmark: how alike two sentences are, 0 to 5 (Spearman's correlation)
entities     WNUT 17: does the message name somebody or something? (accuracy)
next         WikiText-2: does the second sentence follow the first in its article? (accuracy)
order        WikiText-2: have two neighbouring words changed places? (accuracy)
"""

import csv
import json
import random
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

Row = tuple[str, str, str]  # two texts, the second may be empty, and the label
LONGEST = 40  # words of a sentence from WikiText-2
SHARE = 5  # of WikiText's sentences one in so many judges


def sentiment(data: Path, part: str) -> Iterator[Row]:
    with (data / "sst2" / f"{part}.tsv").open(encoding="utf-8", newline="") as file:
        for text, label in csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
            yield text, "", label


def similarity(data: Path, part: str) -> Iterator[Row]:
    with (data / "stsb" / f"stsb-en-{part}.csv").open(encoding="utf-8", newline="") as file:
        yield from ((first, second, score) for first, second, score in csv.reader(file))


def entities(data: Path, part: str) -> Iterator[Row]:
    name = "wnut17train.conll" if part == "train" else "emerging.dev.conll"
    for block in re.split(r"\n\s*\n", (data / "wnut17" / name).read_text(encoding="utf-8")):
        pairs = [line.split("\t") for line in block.splitlines() if "\t" in line]
        if pairs:
            tagged = any(tag.strip() != "O" for _, tag, *_ in pairs)
            yield " ".join(word for word, *_ in pairs), "", str(int(tagged))


def wiki_sentences(data: Path, part: str) -> Iterator[tuple[str, str]]:
    """Yield neighbouring sentences of WikiText-2's paragraphs, of which one in SHARE judges."""
    text = (data / "wikitext2" / "valid.txt").read_text(encoding="utf-8")
    paragraphs = [line.strip() for line in text.splitlines() if len(line) > 200]
    for number, paragraph in enumerate(paragraphs):
        if (number % SHARE == 0) == (part == "dev"):
            sentences = [" ".join(each.split()[:LONGEST]) for each in paragraph.split(" . ") if len(each.split()) > 5]
            yield from pairwise(sentences)


def next_sentence(data: Path, part: str) -> Iterator[Row]:
    draw = random.Random(0)
    pairs = [*wiki_sentences(data, part)]
    for first, second in pairs:
        follows = draw.random() < 0.5
        yield first, second if follows else draw.choice(pairs)[1], str(int(follows))


def word_order(data: Path, part: str) -> Iterator[Row]:
    draw = random.Random(0)
    for sentence, _ in wiki_sentences(data, part):
        words = sentence.split()
        swapped = draw.random() < 0.5
        if swapped:
            at = draw.choice([i for i in range(len(words) - 1) if words[i] != words[i + 1]])
            words[at : at + 2] = words[at + 1], words[at]
        yield " ".join(words), "", str(int(swapped))


TASKS: dict[str, tuple[Callable[[Path, str], Iterator[Row]], bool]] = {  # the rows, and whether labels are numbers
    "sentiment": (sentiment, False),
    "similarity": (similarity, True),
    "entities": (entities, False),
    "next": (next_sentence, False),
    "order": (word_order, False),
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
