"""Check bertlite against transformers, case by case.

    python scripts/check_parity.py                                    # both demo checkpoints, minutes
    python scripts/check_parity.py CHECKPOINT --only float32 --json FILE
    python scripts/check_parity.py CHECKPOINT --device cuda

The same as `bertlite parity`, from a checkout without installation.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bertlite.cli import main as bertlite  # the checkout is on the path only now


def main(argv: Sequence[str] | None = None) -> int:
    return bertlite(["parity", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    raise SystemExit(main())
