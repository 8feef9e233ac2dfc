"""Pages, notebooks and code are read once: short sentences (nine of ten within 25 words), none around a noun."""

import ast
import io
import json
import re
import tokenize
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "notebooks" / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md")), *sorted((ROOT / ".github").glob("*.md"))]
ROOMS = sorted(
    path for path in (ROOT / "bertlite").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
)
NOT_PROSE = re.compile(
    r"^```.*?^```$|^<!-- ([a-z]+) -->$.*?^<!-- /\1 -->$|<!--.*?-->|^(?:\||#|!\[).*?$", re.MULTILINE | re.DOTALL
)
WRITTEN_AROUND_A_NOUN = re.compile(
    r"\bwhat (?:is|was|are|were|it|they)\b|\bbeside\b|^(?:Of|Where|What|By(?! default| hand)|Other than)\b"
    r"|\bth(?:at|ose) of\b|\bthe others\b|\bis said\b|\bnobody\b|\bbut for\b",
    re.IGNORECASE,
)


def sentences(page: str) -> list[str]:
    """Return the sentences of paragraphs and lists, without code, tables, headings and generated blocks."""
    prose = re.sub(r"\]\([^)]*\)", "]", NOT_PROSE.sub("\n\n", page))
    blocks = re.split(r"\n\s*\n|^\s*(?:[-*]|\d+\.)\s", prose, flags=re.MULTILINE)
    found = [part.strip() for block in blocks for part in re.split(r"(?<=[.?!])\s+", " ".join(block.split()))]
    return [sentence for sentence in found if sentence]


def without_names(text: str) -> str:
    """Return a text with "name: text" of arguments apart, and without examples."""
    return re.sub(r"^ *(?:\*?\*?\w+(?:, )?)+: ?|^ *>>>.*$", "\n\n", text, flags=re.MULTILINE)


def docstrings(module: Path) -> Iterator[str]:
    """Yield the docstrings of a module."""
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield without_names(ast.get_docstring(node) or "")


def strings(code: str, value: str = "x") -> Iterator[str]:
    """Yield the strings of a module, with something in place of the values in them."""
    tree = list(ast.walk(ast.parse(code)))
    inner = {part for node in tree if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in tree:
        parts = node.values if isinstance(node, ast.JoinedStr) else [node] if node not in inner else []
        if any(isinstance(getattr(part, "value", None), str) for part in parts):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else value for part in parts)


def prose(module: Path) -> Iterator[str]:
    """Yield the docstrings of a module, its strings of four words or more, and its comments."""
    code = module.read_text(encoding="utf-8")
    yield from (without_names(text) for text in strings(code) if len(text.split()) >= 4)
    tokens = tokenize.generate_tokens(io.StringIO(code).readline)
    comments = [token for token in tokens if token.type == tokenize.COMMENT]
    alone = enumerate(token for token in comments if token.line.lstrip().startswith("#"))
    yield from (token.string.lstrip("#: ") for token in comments if not token.line.lstrip().startswith("#"))
    for _, lines in groupby(alone, key=lambda each: each[1].start[0] - each[0]):  # comments of several lines
        yield "\n".join(token.string.lstrip("#: ") for _, token in lines)


def test_sentences_are_found_and_counted() -> None:
    page = "# Of it\n\nOne `a.b`\ntwo. Three:\n\n- four\n- [five](x.md). Six\n\n```\nwhat is\n```\n\n| beside |\n"
    assert sentences(page) == ["One `a.b` two.", "Three:", "four", "[five].", "Six"]
    assert sentences("<!-- speed -->\n\nno\n\n<!-- /speed -->\nyes") == ["yes"]
    for bad in ("it has what it needs", "Where it fits", "a bound and those of BERT", "this is said"):
        assert WRITTEN_AROUND_A_NOUN.search(bad)
    assert not WRITTEN_AROUND_A_NOUN.search("the page where it says what to install")


def test_docstrings_messages_and_comments_are_found(tmp_path: Path) -> None:
    code = """def f(x):
    'Return one of them.  It is two.\\n\\n  Args:\\n    x: what is given to\\n      another one.'
    raise ValueError(f"it is {x}: no name")  # of three
    # two
    # lines
"""
    (module := tmp_path / "module.py").write_text(code)
    found = [sentence for text in prose(module) for sentence in sentences(text)]
    assert found[:2] == ["Return one of them.", "It is two."]
    assert set(found[2:]) == {"what is given to another one.", "it is x: no name", "of three", "two lines"}


def check(found: list[tuple[str, str]]) -> None:
    """Check sentences, each with the place where it stands."""
    assert [each for each in found if WRITTEN_AROUND_A_NOUN.search(each[1])] == []
    long = [each for each in found if len(each[1].split()) > 25]
    assert len(long) <= len(found) / 10, long


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_are_plain(page: Path) -> None:
    check([(page.name, sentence) for sentence in sentences(page.read_text(encoding="utf-8"))])


def test_notebooks_are_plain() -> None:
    found = []
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            if cell["cell_type"] == "markdown":
                found += [(path.name, each) for each in sentences("".join(cell["source"])) if not each.endswith("?")]
    check(found)


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_docstrings_messages_and_comments_are_plain(room: Path) -> None:
    modules = sorted(room.rglob("*.py")) if room.is_dir() else [room]
    check([(module.name, sentence) for module in modules for text in prose(module) for sentence in sentences(text)])


def test_docstrings_of_scripts_are_plain() -> None:
    modules = sorted((ROOT / "scripts").rglob("*.py"))
    check([(module.name, each) for module in modules for text in docstrings(module) for each in sentences(text)])


def test_comments_of_kernels_are_plain() -> None:
    """Comments behind code are notes, not sentences."""
    found = []
    for path in sorted((ROOT / "bertlite" / "runtime" / "kernels").iterdir()):
        lines = path.read_text(encoding="utf-8").splitlines()
        for alone, block in groupby(lines, key=lambda line: line.lstrip().startswith("//")):
            text = "\n".join(line.lstrip(" /") for line in block) if alone else ""
            found += [(path.name, sentence) for sentence in sentences(text)]
    assert len(found) > 100
    check(found)
