"""Build a wheel that holds the compiled kernels, so that its users need no compiler.

    python -m scripts.make.wheel                        # dist/bertlite-….whl, for Linux on this machine
    python -m scripts.make.wheel --machine aarch64      # compiled by CXX, or else by aarch64-linux-gnu-g++

The kernels are compiled for every kind of processor but those with AMX, whose products are torch's own and fit one
version of torch alone: there they are compiled when they are first used, or else the next best are taken.
auditwheel, where it is installed, checks that the kernels need no newer system than the wheel's tag says.
"""

import argparse
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bertlite.runtime.library import INSTRUCTION_SETS, PREBUILT, compile_kernels, file_name

ROOT = Path(__file__).parents[2]
SETS = {  # by machine
    "x86_64": ("avx512_bf16", "avx512_vnni", "avx512", "avx_vnni", "avx2", "baseline", "baseline_exact"),
    "aarch64": ("neon_bf16", "neon_dot", "baseline"),
}
LARGEST = 2 * 2**20  # bytes


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the wheel (default: %(default)s)")
    parser.add_argument("--machine", choices=SETS, default=platform.machine(), help="(default: %(default)s)")
    args = parser.parse_args(argv)
    if args.machine != platform.machine():
        os.environ.setdefault("CXX", f"{args.machine}-linux-gnu-g++")
    PREBUILT.mkdir()
    try:
        for name in SETS[args.machine]:
            compile_kernels(INSTRUCTION_SETS[name], PREBUILT / file_name(INSTRUCTION_SETS[name]))
        python("build", "--wheel", "--no-isolation", "--outdir", str(args.out), str(ROOT))
    finally:
        shutil.rmtree(PREBUILT)
    wheel = max(args.out.glob("*.whl"), key=lambda path: path.stat().st_mtime)
    if wheel.stat().st_size > LARGEST:
        sys.exit(f"{wheel} has {wheel.stat().st_size:,} bytes, of {LARGEST:,} allowed")
    if importlib.util.find_spec("auditwheel") is None:
        print(f"{wheel}: auditwheel is not installed, so that the tag is not checked", file=sys.stderr)
    elif newest_system(found := python("auditwheel", "show", str(wheel))) > newest_system(wheel.name):
        sys.exit(found)
    return 0


def newest_system(text: str) -> int:
    """Return the number of the tag manylinux_2_NUMBER in a text; a huge one if there is none."""
    found = re.search(r"manylinux_2_(\d+)_", " ".join(text.split()).rpartition("platform tag")[2])
    return int(found[1]) if found else sys.maxsize


def python(module: str, *arguments: str) -> str:
    """Run a module of Python; return what it prints."""
    return subprocess.run(
        [sys.executable, "-m", module, *arguments], check=True, capture_output=True, text=True
    ).stdout


if __name__ == "__main__":
    raise SystemExit(main())
