"""Experiments with pruned heads: fine-tune, score, prune, repair, retrain, evaluate, compare, export, measure.

    python scripts/prune_heads.py finetune CHECKPOINT --train train.tsv --dev dev.tsv --out runs/sst2
    python scripts/prune_heads.py curve runs/sst2/model --train train.tsv --dev dev.tsv --root runs/curve
    torchrun --nproc-per-node 2 scripts/prune_heads.py finetune CHECKPOINT …

The same as `bertlite prune`, from a checkout without installation.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bertlite.cli import main as bertlite  # the checkout is on the path only now


def main(argv: Sequence[str] | None = None) -> int:
    return bertlite(["prune", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    raise SystemExit(main())
