"""The page on one's own data: its commands run, from top to bottom, on files of the kinds that it names."""

import csv
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import chdir
from importlib.util import find_spec
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import blocks
import pytest

pytest.importorskip("accelerate")

from bertlite import BertForSequenceClassification, BertForTokenClassification
from bertlite.cli import main
from bertlite.experiments.evaluate import class_names
from bertlite.shipping.onnx import PACKAGES
from bertlite.support.runs import read_runs

pyarrow, parquet = map(pytest.importorskip, ("pyarrow", "pyarrow.parquet"))
PAGE = Path(__file__).resolve().parents[2] / "notebooks" / "docs" / "own_data.md"
TEXT = (
    PAGE.read_text(encoding="utf-8")
    .replace(" \\\n ", "")
    .replace("sentence-transformers/all-MiniLM-L6-v2", blocks.HUB_IDS[0])
)
COMMANDS = re.findall(r"^bertlite (.*)$", TEXT, re.MULTILINE)
QUICK = ["--epochs", "1", "--lr", "3e-3"]  # what the page leaves at its default, which takes longer
Rows = list[dict[str, Any]]


def reviews(draw: Random) -> dict[str, Any]:
    verdict = draw.choice(["good", "fair", "poor"])
    text = f'so {verdict}, "{draw.randrange(10**6)}" says {draw.choice("abcdef")}'
    return {"review": text, "verdict": verdict, "stars": draw.random() * 5}


def words(draw: Random) -> dict[str, Any]:
    tags = [draw.choice(["O", "O", "B-name", "I-name"]) for _ in range(draw.randrange(1, 9))]
    return {"words": [f"{tag[0].lower()}{draw.randrange(99)}" for tag in tags], "tags": tags}


def pairs(draw: Random) -> dict[str, Any]:
    answer = draw.choice(["yes", "no"])
    return {"question": f"is it {draw.randrange(10**6)}?", "answer": f"{answer} it is", "answers": answer}


def write(path: Path, rows: Rows) -> None:
    """Write rows as the page says that such a file has them."""
    if path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8-sig") as file:
            writer = csv.DictWriter(file, ["review", "verdict"], extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".tsv":
        lines = (f"{row['review']}\t{['poor', 'fair', 'good'].index(row['verdict'])}\n" for row in rows)
        path.write_text("".join(lines), encoding="utf-8")
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    else:
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)


MAKERS: dict[str, tuple[Callable[[Random], dict[str, Any]], int]] = {
    "reviews.csv": (reviews, 1000),
    "plain.tsv": (reviews, 90),
    "pairs.jsonl": (pairs, 90),
    "stars.parquet": (reviews, 90),
    "names.jsonl": (words, 90),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder in which all commands of the page were run."""
    folder = tmp_path_factory.mktemp("page")
    for name, (make, count) in MAKERS.items():
        path = folder / name
        draw = Random(0)
        write(path, [make(draw) for _ in range(count)])
        write(path.with_stem(f"{path.stem}-dev"), [make(draw) for _ in range(41)])
    cola = [{"sentence": f"it is {i}", "label": int(i % 4 > 0)} for i in range(90)]

    class Data(list[dict[str, Any]]):
        features = {"label": SimpleNamespace(names=["unacceptable", "acceptable"])}  # noqa: RUF012

    def load_dataset(name: str, configuration: str, split: str) -> Data:
        assert (name, configuration) == ("nyu-mll/glue", "cola")
        return Data({"train": cola[:60], "validation": cola[60:]}[split])

    checkpoint = blocks.given(folder)["checkpoint"]
    with pytest.MonkeyPatch.context() as patch, blocks.hub(checkpoint, folder), chdir(folder):
        patch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
        patch.setattr("bertlite.experiments.speed.TIMING", 0.1)
        for command in COMMANDS:
            words = shlex.split(command)
            if words[0] == "export" and not all(map(find_spec, PACKAGES)):
                continue
            status = main([*words, *(QUICK if "finetune" in words else [])])
            assert status in ((0, 1) if words[0] == "evaluate" else (0,)), command
        yield folder


def test_the_page_has_a_command_for_every_kind_of_data() -> None:
    said = "\n".join(COMMANDS)
    for wanted in ("--columns", "--classes", "regression", "tokens", "glue:cola"):
        assert wanted in said
    assert all(name in said for name in MAKERS)


@pytest.mark.slow
def test_a_csv_becomes_a_model_with_the_classes_of_the_data(runs: Path) -> None:
    (run,) = read_runs(runs / "runs" / "half")
    folders = run.folder / "model", runs / "fast"
    small, fast = map(BertForSequenceClassification.from_pretrained, folders)
    assert class_names(small.config) == class_names(fast.config) == ("fair", "good", "poor")
    assert sum(map(len, small.config.pruned_heads.values())) == 24  # half of 4 layers of 12
    assert {"accuracy", "macro-f1", "mcc"} <= run.results.keys()
    assert (run.config["cell"]["at_least"], run.config["cell"]["repair"]) == (1, "refit")


@pytest.mark.slow
def test_every_kind_of_data_becomes_a_run(runs: Path) -> None:
    found = {run.folder.name: run for run in read_runs(runs / "runs", name="finetune")}
    assert set(found) == {"quick", "dense", "plain", "pairs", "stars", "names", "cola"}
    assert all(line["label"] in (0, 1, 2) for line in found["plain"].predictions)
    assert len(found["stars"].predictions[0]["outputs"]) == 1
    assert found["stars"].predictions[0]["label"] % 1 > 0
    tagger = BertForTokenClassification.from_pretrained(runs / "runs" / "names" / "model")
    assert class_names(tagger.config) == ("O", "B-name", "I-name")
    for line in found["names"].predictions:
        assert len(line["label"]) == len(line["outputs"]) >= 1
    cola = BertForSequenceClassification.from_pretrained(runs / "runs" / "cola" / "model")
    assert class_names(cola.config) == ("unacceptable", "acceptable")
