"""README.md: its code runs, and its figures are those of the records."""

import contextlib
import json
import re
from code import InteractiveConsole
from collections.abc import Callable
from pathlib import Path

import blocks
import pytest

from bertlite.support.environment import run_git
from scripts.make import tables
from scripts.make.tables import origin, proof, pruning, read
from scripts.make.tables.read import RESULTS, Record

ROOT = Path(__file__).resolve().parents[1]

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {page: page.read_text(encoding="utf-8") for page in tables.PAGES}
SECTIONS = [
    "Install",
    "Models",
    "Use",
    "What transformers 5 lost",
    "Proof",
    "Speed",
    "Pruning",
    "Commands",
    "Where things are",
    "Limits",
]


def test_the_readme_is_short_and_in_order():
    assert len(README.encode()) <= 12_000
    assert re.findall("^## (.*)$", README, re.MULTILINE) == SECTIONS
    (introduction,) = re.findall(r"^# bertlite\n\n(.*?)\n\n", README, re.DOTALL)
    assert len(re.findall(r"\.(?=\s|$)", introduction)) == 3, "three sentences: what it is, what you keep, for whom"
    first_screen = README.partition("\n## ")[0]
    assert first_screen.count("\n") <= 45
    for word in (
        "CPUs",
        "rerankers",
        "scripts/results/speed.png",
        "SentenceTransformer(",
        ".similarity(",
        "**make mine faster**",
        "**prune**",
        "**read BERT**",
        "notebooks/bert_on_one_page.py",
        "from bertlite.hf import",
        "bertlite evaluate FOLDER --texts FILE --speed",
        "notebooks/docs/runtime.md",
        "notebooks/docs/troubleshooting.md",
        "on PyPI",
        "ModernBERT",
        "AMD EPYC",
        "fine-tuned MiniLMs",
        "**speed**",
        "**int8**",
        "**pruning**",
        "**proof**",
        "License:",
    ):
        assert word in first_screen


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_figures_are_those_of_the_records(page):
    assert tables.filled(PAGES[page]) == PAGES[page], "run python -m scripts.make.tables"


def test_every_table_is_on_one_page():
    shown = re.findall(r"^<!-- ([a-z]+) -->$", "\n".join(PAGES.values()), re.MULTILINE)
    assert sorted(shown) == sorted(tables.TABLES)


def test_a_figure_that_was_changed_by_hand_is_found(tmp_path, capsys):
    forged = tmp_path / "README.md"
    forged.write_text(README.replace("<!-- pruningbrief -->\n", "<!-- pruningbrief -->\n9.99\n"))
    assert tables.main(["--check", str(forged)]) == 1
    assert "README.md differs from the records" in capsys.readouterr().err


@pytest.fixture
def with_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return a function that makes a table with these records alone."""

    def make(name: str, **records: Record) -> str:
        for file, record in records.items():
            (tmp_path / f"{file.replace('_', '-')}.json").write_text(json.dumps(record))
        monkeypatch.setattr(read, "RESULTS", tmp_path)
        return tables.TABLES[name]()

    return make


def a_record(name: str) -> Record:
    return json.loads((RESULTS / f"{name}.json").read_text())


@pytest.mark.parametrize("part", [{"choice": "quick"}, {"only": ["float64"]}], ids=["quick", "only"])
@pytest.mark.parametrize("name", ["parity", "gpuparity"])
def test_a_proof_of_some_cases_is_not_shown_as_the_whole(part, name, with_records):
    with pytest.raises(SystemExit, match="is of some cases, not of `bertlite parity --all`"):
        with_records(
            name, **{file: {**a_record("parity-5.24.0"), **part} for file in ("parity_5.24.0", "parity_cuda")}
        )


def test_the_code_runs_from_top_to_bottom(tmp_path):
    names = blocks.run(ROOT / "README.md", tmp_path)
    pruned = names["smaller"].config.pruned_heads
    assert {layer: tuple(heads) for layer, heads in pruned.items()} == {0: (1, 5), 3: tuple(range(12))}


def test_the_first_lines_are_ten_at_most_and_those_of_the_documentation():
    first = blocks.blocks(ROOT / "README.md")[0]
    assert len([line for line in first.splitlines() if line]) <= 10
    assert blocks.blocks(ROOT / "notebooks" / "docs" / "index.md") == [first]


def test_the_first_lines_run_as_they_are_typed(tmp_path, capsys):
    """Into an interactive Python, with its model in the hub's cache and no network."""
    console = InteractiveConsole()
    with blocks.hub(blocks.given(tmp_path)["checkpoint"], tmp_path), contextlib.chdir(tmp_path):
        for line in [*blocks.blocks(ROOT / "README.md")[0].splitlines(), ""]:
            console.push(line)
    said = capsys.readouterr()
    assert "Error" not in said.err
    assert re.search(r"tensor\(\[\[(?:1\.0000|0\.9999)", said.out)


def test_the_table_of_parity_names_torch_where_there_are_records_of_several(with_records):
    record = a_record("parity-5.24.0")
    with_records("parity", **{"parity_5.24.0": record})
    record["environment"]["versions"]["torch"] = "99.1.0+cu999"
    both = with_records("parity", **{"parity_5.24.0_torch_99.1.0": record})
    assert "| transformers 5.24.0, torch 2.13.0 | transformers 5.24.0, torch 99.1.0 |" in both
    assert "torch" not in both.splitlines()[-1]


def test_a_claim_shows_its_worst_tensor_and_what_fails():
    claim = {"tensors": 3, "failed": 0, "max_error": 0.5, "max_ratio": None}
    assert proof.worst([claim, {**claim, "tensors": 1000, "max_error": 2e-11}]) == "1,003: 5.0e-01"
    assert proof.worst([{**claim, "max_ratio": 2.004, "failed": 1}]) == "3: ratio 2.00, 1 fail"
    assert proof.worst([{**claim, "max_error": 0}]) == "3: 0"


def test_the_tables_of_a_gpu_need_only_its_records(with_records):
    names = ("parity-cuda", "speed-cuda", "checkpointing-cuda-base", "checkpointing-cuda-large")
    records = {name.replace("-", "_"): a_record(name) for name in names}
    said = [with_records(name, **records) for name in tables.TABLES if name.startswith("gpu")]
    assert sum(", driver " in each for each in said) == 4


def test_a_table_names_the_commits_of_its_records_and_why_a_version_is_older():
    def made(commit: str, version: str) -> Record:
        return {"environment": {"versions": {"transformers": version}, "git": {"commit": commit, "dirty": False}}}

    one, other = made("1" * 40, "5.24.0"), made("2" * 40, "5.6.0")
    page = "Commit 1111111, 2026-11-26."  # where the day stands, if git lacks the commit
    assert origin.commits({"speed": one}, page) == page
    assert origin.commits({"speed": one | {"commits": ["a", "b", "c"]}}, page) == page.replace(".", ", the last of 3.")
    found = origin.commits({"speed": one, "pruning/sst2": other}, page)
    assert found == "Commits: 1111111, 2026-11-26 (speed); 2222222 (sst2)."
    newest = origin.newest_version([{"speed": one}, {"speed-under": other}])
    assert origin.older({"speed": one}, newest) == ""
    assert origin.older({"soak": other}, newest) == "Not measured again since transformers 5.6.0."
    assert "optimum-onnx" in origin.older({"speed-under": other}, newest)
    where = ", ".join(origin.KERNELS)
    assert [*origin.stale({"speed": one})] == [f"stale: speed, of 1111111: git lacks it, in {where}"]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs the history of a checkout")
def test_a_record_is_stale_once_its_code_has_changed():
    def lines(commit: str) -> list[str]:
        return [*origin.stale({"speed": {"environment": {"git": {"commit": commit, "dirty": False}}}})]

    (line,) = lines("4b825dc642cb6eb9a060e54bf8d69288fbee4904")  # git's own name of a tree without files
    assert re.match(r"stale: speed, of 4b825dc.*: \d+ files changed, \d+ insertions", line, re.S)
    assert lines(run_git("rev-parse", "HEAD").strip()) == []


def test_records_that_are_older_than_their_code_are_listed(capsys):
    assert tables.main(["--stale"]) == 0
    assert all(line.startswith(("stale: ", "no record")) for line in capsys.readouterr().out.splitlines())
    assert {path for paths in origin.MEASURES.values() for path in paths if not (ROOT / path).exists()} == set()
    assert {*tables.headlines()} >= {"speed", "parity-4.57.6", "native_accuracy", "pruning/draws"}


def test_no_loss_has_a_minus_sign():
    """The heading says points lost, or the words loses and gains."""
    assert pruning.give({"tasks": 12, "lost": -0.04, "lost_within": 2.1}, "lost") == "0.0 ±2.1"
    shown = re.findall(r"^- \*\*(?:int8|pruning)\*\*.*$", README, re.MULTILINE)
    assert len(shown) == 2
    assert not [line for line in shown if re.search(r"(?<!\[)[-−]\d(?!,)", line) or "cost" in line]
