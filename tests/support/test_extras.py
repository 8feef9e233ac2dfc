"""Optional packages: every hint names a command that works, and every extra that is named exists and is enough."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from bertlite.cli import main
from bertlite.support import extras
from bertlite.support.extras import import_optional, install_hint

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
SOURCES = sorted((ROOT / "bertlite").rglob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "notebooks" / "docs").rglob("*.md"))]


def test_the_hint_is_for_the_checkout_else_for_what_is_installed(monkeypatch, tmp_path) -> None:
    assert install_hint("embed") == "pip install '.[embed]' in the checkout"
    assert install_hint("embed", elsewhere=True).startswith("pip install 'bertlite[embed] @ git+URL', with the URL")
    monkeypatch.setattr(extras, "ROOT", tmp_path)
    assert install_hint("embed") == "pip install 'bertlite[embed]'"


def test_a_package_that_is_missing_is_named_with_the_hint() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"^a plot needs no_such_package, which is not installed: pip inst"):
        import_optional("no_such_package.part", "a plot", "plot")


def test_a_command_whose_package_is_missing_gives_the_hint(monkeypatch, capsys) -> None:
    def work(*args: object, **options: object) -> int:
        import no_such_package  # type: ignore[import-not-found]

        return no_such_package.status

    monkeypatch.setattr("bertlite.parity.command.parity", work)
    assert main(["parity"]) == 2
    assert capsys.readouterr().err == f"bertlite parity: No module named 'no_such_package': {install_hint('cli')}\n"


def test_every_extra_that_is_named_exists() -> None:
    named = {("pyproject.toml", extra) for each in EXTRAS.values() for extra in extras_in("\n".join(each))}
    for path in (*SOURCES, *PAGES):
        text = path.read_text(encoding="utf-8")
        named |= {(path.name, extra) for extra in extras_in(text)}
        calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)] if path in SOURCES else []
        for call in calls:
            name = getattr(call.func, "id", "")
            if name in ("install_hint", "import_optional") and isinstance(call.args[-1], ast.Constant):
                named.add((path.name, call.args[-1].value))
    assert len(named) > 15
    assert {each for each in named if each[1] not in EXTRAS} == set()


def extras_in(text: str) -> list[str]:
    """Return the extras of bertlite that a text names in brackets."""
    groups = re.findall(r"(?:bertlite|'\.)\[([a-z,]+)\]", text)
    return [extra for group in groups for extra in group.split(",")]


def test_no_other_place_spells_a_hint() -> None:
    """Packages that are installed without their dependencies are no extras."""
    spelled = [
        path.name
        for path in SOURCES
        if path.name != "extras.py" and re.search(r"pip install (?!--no-deps)|bertlite\[", path.read_text("utf-8"))
    ]
    assert spelled == []


def test_no_page_takes_bertlite_from_an_index() -> None:
    for path in PAGES:
        lines = path.read_text(encoding="utf-8").splitlines()
        assert [line for line in lines if re.search(r"pip install '?bertlite(?!\[[a-z,]+\] @)", line)] == [], path.name


def test_bertlite_hf_without_transformers_gives_the_hint() -> None:
    code = "import sys; sys.modules['transformers'] = None; import bertlite.hf"
    child = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    said = f"`bertlite.hf` needs transformers, which is not installed: {install_hint('hf')}"
    assert child.stderr.splitlines()[-1] == f"ModuleNotFoundError: {said}"
