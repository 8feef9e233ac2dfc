"""Pages are read once: nine of ten sentences have at most 25 words, and none is written around a noun."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "notebooks" / "docs"
PAGES = [
    ROOT / "README.md",
    *(
        DOCS / f"{name}.md"
        for name in (
            "index",
            "quickstart",
            "clients",
            "runtime",
            "embed",
            "serving",
            "families",
            "native",
            "budget",
            "pruning",
            "shipping",
            "performance",
            "commands",
            "proof",
            "own_data",
            "security",
        )
    ),
]
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


def test_sentences_are_found_and_counted() -> None:
    page = "# Of it\n\nOne `a.b`\ntwo. Three:\n\n- four\n- [five](x.md). Six\n\n```\nwhat is\n```\n\n| beside |\n"
    assert sentences(page) == ["One `a.b` two.", "Three:", "four", "[five].", "Six"]
    assert sentences("<!-- speed -->\n\nno\n\n<!-- /speed -->\nyes") == ["yes"]
    for bad in ("it has what it needs", "Where it fits", "a bound and those of BERT", "this is said"):
        assert WRITTEN_AROUND_A_NOUN.search(bad)
    assert not WRITTEN_AROUND_A_NOUN.search("the page where it says what to install")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_sentences_are_short_and_plain(page: Path) -> None:
    found = sentences(page.read_text(encoding="utf-8"))
    assert [sentence for sentence in found if WRITTEN_AROUND_A_NOUN.search(sentence)] == []
    long = [sentence for sentence in found if len(sentence.split()) > 25]
    assert len(long) <= len(found) / 10, long
