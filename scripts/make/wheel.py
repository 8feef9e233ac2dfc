"""Build a wheel that holds the compiled kernels, so that its users need no compiler.

    python -m scripts.make.wheel                        # dist/bertlite-….whl, for Linux on x86-64

The kernels are compiled for every kind of processor but those with AMX, whose products are torch's own and fit one
version of torch alone: there they are compiled when they are first used, or else the next best are taken.
auditwheel, where it is installed, checks that the kernels need no newer system than the wheel's tag says.
"""

import argparse
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bertlite.inference.native.library import INSTRUCTION_SETS, PREBUILT, compile_kernels, file_name

ROOT = Path(__file__).parents[2]
LARGEST = 2 * 2**20  # bytes


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the wheel (default: %(default)s)")
    args = parser.parse_args(argv)
    PREBUILT.mkdir()
    try:
        for each in INSTRUCTION_SETS.values():
            if not each.uses_torch:
                compile_kernels(each, PREBUILT / file_name(each))
        python("build", "--wheel", "--no-isolation", "--outdir", str(args.out), str(ROOT))
    finally:
        shutil.rmtree(PREBUILT)
    wheel = max(args.out.glob("*.whl"), key=lambda path: path.stat().st_mtime)
    if wheel.stat().st_size > LARGEST:
        sys.exit(f"{wheel} has {wheel.stat().st_size:,} bytes, of {LARGEST:,} allowed")
    if importlib.util.find_spec("auditwheel") is None:
        print(f"{wheel}: auditwheel is not installed, so that the tag is not checked", file=sys.stderr)
    elif f'"{wheel.stem.rpartition("-")[2]}"' not in (found := python("auditwheel", "show", str(wheel))):
        sys.exit(found)
    return 0


def python(module: str, *arguments: str) -> str:
    """Run a module of Python; return what it prints."""
    return subprocess.run(
        [sys.executable, "-m", module, *arguments], check=True, capture_output=True, text=True
    ).stdout


if __name__ == "__main__":
    raise SystemExit(main())
