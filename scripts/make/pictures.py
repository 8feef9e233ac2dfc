"""Draw the pictures of README.md and of the pages anew, from the records; nothing is measured.

python -m scripts.make.pictures
"""

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from scripts.make.tables.read import RESULTS, record
from scripts.measure.budgets import pareto, picture
from scripts.measure.curves import curves, save
from scripts.measure.speed.__main__ import plot


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(argv)
    plot(record("speed"), RESULTS / "speed.png")
    picture.draw(record("pruning/budgets")["rows"], RESULTS / "pruning" / "budgets.png")
    pareto.draw(record("pruning/pareto")["rows"], RESULTS / "pruning" / "pareto.png")
    heads = record("pruning/sst2")
    with TemporaryDirectory(prefix="bertlite-pictures-") as name:
        drawn = curves(heads["rows"], heads["headline"], heads["dense"][heads["headline"]])
        shutil.copy(save(drawn, Path(name, "sst2"))[0], RESULTS / "pruning" / "sst2.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
