"""README.md: its code runs, and its figures are those of the records."""

import json
import re
from pathlib import Path

import blocks
import pytest

from scripts.make import tables

ROOT = Path(__file__).resolve().parents[1]

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_figures_are_those_of_the_records() -> None:
    filled, outdated = tables.filled(README)
    assert filled == README, "run python -m scripts.make.tables"
    assert outdated == []


def test_every_table_is_in_the_readme() -> None:
    """Those of a GPU once there are records of one."""
    on_gpu = any(tables.RESULTS.glob("*-cuda*.json"))
    wanted = {name for name in tables.TABLES if on_gpu or not name.startswith("gpu")}
    assert {name for name in tables.TABLES if f"<!-- {name} -->" in README} == wanted


def test_a_figure_that_was_changed_by_hand_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forged = tmp_path / "README.md"
    forged.write_text(README.replace("<!-- parity -->\n", "<!-- parity -->\n9.99\n"))
    assert tables.main(["--check", "--readme", str(forged)]) == 1
    assert "README.md differs from the records" in capsys.readouterr().err


def test_no_ratio_is_printed_without_its_spread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table stays as it is while its record is too old, and the record is named."""
    record = json.loads((tables.RESULTS / "startup.json").read_text())
    for section in record["sections"].values():
        section["ratios"] = dict.fromkeys(section["ratios"], 1.25)
    (tmp_path / "startup.json").write_text(json.dumps(record))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    page = "<!-- startup -->\nas it was\n<!-- /startup -->\n"
    same, outdated = tables.filled(page)
    assert same == page
    assert outdated == ["startup: bertlite / torch has no spread; make the record again"]
    for section in record["sections"].values():
        section["ratios"] = {pair: {"low": 1.2, "median": 1.25, "high": 1.5} for pair in section["ratios"]}
    (tmp_path / "startup.json").write_text(json.dumps(record))
    new, outdated = tables.filled(page)
    assert "bertlite / torch = 1.25 (1.20–1.50)" in new
    assert outdated == []
    (tmp_path / "README.md").write_text(page)
    assert tables.main(["--readme", str(tmp_path / "README.md")]) == 0
    assert (tmp_path / "README.md").read_text() == new


def test_the_code_runs_from_top_to_bottom(tmp_path: Path) -> None:
    names = blocks.run(ROOT / "README.md", tmp_path)
    pruned = names["same"].config.pruned_heads
    assert {layer: tuple(heads) for layer, heads in pruned.items()} == {0: (1, 5), 3: tuple(range(12))}


def test_the_files_it_names_exist() -> None:
    for path in re.findall(r"(?:scripts|tests|bertlite|notebooks)/[\w./-]*\w", README):
        assert (ROOT / path).exists(), f"README.md names {path}"


def test_the_table_of_parity_names_torch_where_there_are_records_of_several(tmp_path, monkeypatch):
    record = json.loads((tables.RESULTS / "parity-5.23.0.json").read_text())
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    (tmp_path / "parity-5.23.0.json").write_text(json.dumps(record))
    page = "<!-- parity -->\n<!-- /parity -->\n"
    said, _ = tables.filled(page)
    assert said.count("torch") == 1
    record["environment"]["versions"]["torch"] = "99.1.0+cu999"
    (tmp_path / "parity-5.23.0-torch-99.1.0.json").write_text(json.dumps(record))
    both, _ = tables.filled(page)
    lines = said.splitlines()[3:]
    claims = sum(line.startswith("| 5.23.0 |") for line in lines)
    assert both.count("| 5.23.0, torch 99.1.0 |") == both.count("| 5.23.0, torch 2.") == claims > 0
    assert "torch" not in both.splitlines()[-2]


def test_the_tables_of_a_gpu_need_only_its_records(tmp_path, monkeypatch):
    """Made here of the CPU's, with what a GPU's have beside that."""
    found = {
        "parity-cuda": "parity-5.23.0",
        "speed-cuda": "speed",
        "checkpointing-cuda-base": "checkpointing",
        "checkpointing-cuda-large": "checkpointing",
    }
    spread = {"low": 0.4, "median": 0.5, "high": 0.625}
    for name, like in found.items():
        record = json.loads((tables.RESULTS / f"{like}.json").read_text())
        record["environment"] |= {"gpu": "a GPU", "driver": "570.1"}
        for section in record.get("sections", {}).values():
            section["demands"] = {engine: {"kernels per layer": 7.5, "waits": 1} for engine in section["seconds"]}
            section["ratios"] = dict.fromkeys(section["ratios"], spread)
            section["of_limit"] = dict.fromkeys(section["seconds"], spread)
            section["peak_bytes"] = dict.fromkeys(section["seconds"], 3 * 2**30)
        for kind in ("full", "ragged"):
            if kind in record:
                record[kind]["ratios"] = {f"{each} / transformers, plain": spread for each in record[kind]["rows"]}
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    names = [name for name in tables.TABLES if name.startswith("gpu")]
    said, outdated = tables.filled("".join(f"<!-- {name} -->\n<!-- /{name} -->\n" for name in names))
    assert outdated == []
    assert said.count("a GPU, driver 570.1") == 4
    assert "| 1 x 16 | bertlite optimised float32 | 7.5 | 1 | 3,072 |" in said
    assert "| bertlite sdpa float32 | 50% (40%–62%) |" in said
    assert "| bertlite sdpa float32 | 0.50 (0.40–0.62) |" in said
