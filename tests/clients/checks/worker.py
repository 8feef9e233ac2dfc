"""Run every job of distributed.py, one after the other, under torchrun; each writes a file.

python -m torch.distributed.run --nproc-per-node=2 -m tests.clients.checks.worker SIDE FOLDER
"""

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import transformers

from tests.clients.checks.common import clean
from tests.clients.checks.distributed import JOBS, SIDES


def main() -> None:
    side, folder = SIDES[sys.argv[1]], Path(sys.argv[2])
    rank = int(os.environ["RANK"])
    transformers.logging.set_verbosity_error()
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=60))  # once: a second time it may hang
    for name, job in JOBS.items():
        own = folder / f"{name}-{rank}"
        own.mkdir()
        try:
            with clean():
                seen = job(side, own, rank)
        except Exception as error:
            seen = {"error": f"{type(error).__name__}: {error}"}
        torch.save(seen, folder / f"{name}-{rank}.tmp")
        os.replace(folder / f"{name}-{rank}.tmp", folder / f"{name}-{rank}.pt")
        print(rank, name, seen.get("error", "ok"), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
