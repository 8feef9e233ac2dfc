"""Write tests/clients/apart-4.57.6.safetensors: what transformers 4.57.6 gives in the checks that take BERT apart.

    .venv-4.57.6/bin/python -m scripts.make.apart [FILE]    # seconds

The checks are those of tests/clients/checks/apart.py, run with transformers' own classes.  bertlite must give the same
under every transformers.  Exits 1 under any other version.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

VERSION = "4.57.6"
FILE = Path(__file__).resolve().parents[2] / "tests" / "clients" / f"apart-{VERSION}.safetensors"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", default=FILE)
    args = parser.parse_args(argv)
    import transformers
    from safetensors.torch import save_file

    if transformers.__version__ != VERSION:
        sys.exit(f"this is transformers {transformers.__version__}; the file holds what {VERSION} gives")
    from tests.clients.checks import apart
    from tests.clients.checks.common import CHECKS, STOCK

    found: dict[str, Any] = {}
    for check in CHECKS.values():
        if check.function.func.__module__ == apart.__name__:  # type: ignore[attr-defined]  # a partial
            with TemporaryDirectory(prefix="bertlite-apart-") as folder:
                observed = check.run(STOCK, Path(folder) / "run")
            found |= {f"{check.name}.{key}": x.contiguous() for key, x in observed.items()}
    save_file(found, args.file)
    print(f"{args.file}: {len(found)} tensors")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
