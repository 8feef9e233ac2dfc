"""Measure bertlite beside its peers and write a record.

    python scripts/benchmark.py --json scripts/results/speed.json          # everything; minutes
    python scripts/benchmark.py --only "forward 8 x 128" --engines OpenVINO,bertlite
    python scripts/benchmark.py --check scripts/results/speed.json         # exit 1 where a ratio of ours is worse

The same as `bertlite bench`, from a checkout without installation.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bertlite.cli import main as bertlite  # the checkout is on the path only now


def main(argv: Sequence[str] | None = None) -> int:
    return bertlite(["bench", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    raise SystemExit(main())
