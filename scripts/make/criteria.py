"""Write the table of criteria into notebooks/docs/pruning.md, from the table that the library uses.

python -m scripts.make.criteria            # after a criterion was added or changed
python -m scripts.make.criteria --check    # exits 1 if the page is not up to date
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from bertlite.importance.criteria import CRITERIA, Criterion

PAGE = Path(__file__).resolve().parents[2] / "notebooks" / "docs" / "pruning.md"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the table of criteria into notebooks/docs/pruning.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is not up to date")
    args = parser.parse_args(argv)
    text = PAGE.read_text(encoding="utf-8")
    if args.check:
        if with_table(text) != text:
            print(f"{PAGE.name} does not have the criteria of the library", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(with_table(text), encoding="utf-8")
    return 0


def with_table(text: str) -> str:
    """Return a page with the table of criteria made anew between its marks."""
    return re.sub(
        r"<!-- criteria -->\n.*?<!-- /criteria -->",
        lambda mark: f"<!-- criteria -->\n\n{table()}\n\n<!-- /criteria -->",
        text,
        flags=re.DOTALL,
    )


def table() -> str:
    head = "| criterion | score | of | needs | mean over |\n|---|---|---|---|---|"
    return "\n".join([head, *(f"| {' | '.join(cells(each))} |" for each in CRITERIA.values())])


def cells(criterion: Criterion) -> list[str]:
    source = f" ({criterion.source})" if criterion.source else ""
    needs = "nothing"
    if criterion.needs_data:
        needs = 'batches, and labels or `target="kl"`' if criterion.needs_loss else "batches"
    if criterion.kl_needs_teacher:
        needs += " with a `teacher`"
    return [
        f"`{criterion.name}`",
        (criterion.description + source).replace("|", "\\|"),
        " and ".join(f"{unit}s" for unit in criterion.units),
        needs,
        ", ".join(criterion.reductions()) if criterion.needs_data else "",
    ]


if __name__ == "__main__":
    raise SystemExit(main())
