"""Build a wheel that holds the compiled kernels, so that its users need no compiler.

    python -m scripts.make.wheel                        # dist/bertlite-….whl, for Linux on x86-64

The kernels are compiled for every kind of processor but those with AMX, whose products are torch's own and fit one
version of torch alone; there they are compiled when they are first used.  Compile with the oldest system that the
wheel is for: it needs that system's libstdc++ or a newer one.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bertlite.inference.native.library import INSTRUCTION_SETS, PREBUILT, compile_kernels, file_name

ROOT = Path(__file__).parents[2]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the wheel (default: %(default)s)")
    args = parser.parse_args(argv)
    built = [each for each in INSTRUCTION_SETS.values() if not each.uses_torch]
    PREBUILT.mkdir(exist_ok=True)
    try:
        for each in built:
            compile_kernels(each, PREBUILT / file_name(each))
        command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(args.out), str(ROOT)]
        return subprocess.run(command).returncode
    finally:
        for path in PREBUILT.iterdir():
            path.unlink()
        PREBUILT.rmdir()


if __name__ == "__main__":
    raise SystemExit(main())
