"""README.md: its code runs, and its figures are those of the records."""

import re
import sys
from pathlib import Path

import blocks
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import tables  # noqa: E402  # scripts is on the path only now

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_figures_are_those_of_the_records() -> None:
    assert tables.filled(README) == README, "run scripts/tables.py"


def test_every_table_is_in_the_readme() -> None:
    assert {name for name in tables.TABLES if f"<!-- {name} -->" in README} == set(tables.TABLES)


def test_a_figure_that_was_changed_by_hand_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forged = tmp_path / "README.md"
    forged.write_text(README.replace("<!-- startup -->\n", "<!-- startup -->\n9.99\n"))
    assert tables.main(["--check", "--readme", str(forged)]) == 1
    assert "is not what the records say" in capsys.readouterr().err


def test_the_code_runs_from_top_to_bottom(tmp_path: Path) -> None:
    names = blocks.run(ROOT / "README.md", tmp_path)
    pruned = names["same"].config.pruned_heads
    assert {layer: tuple(heads) for layer, heads in pruned.items()} == {0: (1, 5), 3: tuple(range(12))}


def test_the_files_it_names_exist() -> None:
    for path in re.findall(r"(?:scripts|tests|bertlite|notebooks)/[\w./-]*\w", README):
        assert (ROOT / path).exists(), f"README.md names {path}"
