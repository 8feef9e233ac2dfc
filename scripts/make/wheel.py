"""Build a wheel that holds the compiled kernels, so that its users need no compiler.

    python -m scripts.make.wheel                            # dist/bertlite-….whl, for Linux on this machine
    python -m scripts.make.wheel --platform linux-aarch64   # compiled by CXX, or else by aarch64-linux-gnu-g++
    python -m scripts.make.wheel --runtime                  # bertlite_runtime-….whl, which needs no torch
    python -m scripts.make.wheel --runtime --platform macos-arm64   # compiled by CXX, or else by PyPI's ziglang

The kernels are compiled for every kind of processor.  auditwheel, where it is installed, checks that they need no
newer system than the wheel's tag says.  Wheels for macOS and Windows say that they have not been run.
"""

import argparse
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bertlite import __version__
from bertlite.runtime.library import INSTRUCTION_SETS, PREBUILT, compile_kernels, file_name

ROOT = Path(__file__).parents[2]
ON_ARM, NOT_LINUX = ("neon_bf16", "neon_dot", "baseline"), ("avx2", "baseline", "baseline_exact")
SETS = {  # by platform
    "linux-x86_64": ("amx", "avx512_bf16", "avx512_vnni", "avx512", "avx_vnni", "avx2", "baseline", "baseline_exact"),
    "linux-aarch64": ON_ARM,
    "macos-arm64": ON_ARM,
    "macos-x86_64": NOT_LINUX,
    "windows-x86_64": NOT_LINUX,
}
ZIG = (sys.executable, "-m", "ziglang", "c++", "-target")
COMPILERS = {  # of platforms other than this machine's, where CXX names none
    "linux-x86_64": ["x86_64-linux-gnu-g++"],
    "linux-aarch64": ["aarch64-linux-gnu-g++"],
    "macos-arm64": [*ZIG, "aarch64-macos.13.0-none"],
    "macos-x86_64": [*ZIG, "x86_64-macos.13.0-none"],
    "windows-x86_64": [*ZIG, "x86_64-windows-gnu"],
}
HERE = f"linux-{platform.machine()}"
LARGEST, LARGEST_RUNTIME = 2 * 2**20, 10 * 2**20  # bytes
PROJECT = """\
[build-system]
requires = ["hatchling>=1.27"]
build-backend = "hatchling.build"

[project]
name = "bertlite-runtime"
version = "{version}"
description = "BERT encoders, rerankers, classifiers and taggers that bertlite packed, without torch.{note}"
license = "Apache-2.0"
requires-python = ">=3.11"
dependencies = ["numpy>=1.26", "tokenizers>=0.22"]

[tool.hatch.build.targets.wheel]
packages = ["bertlite_runtime"]

[tool.hatch.build.targets.wheel.hooks.custom]
path = "wheel_hook.py"
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the wheel (default: %(default)s)")
    parser.add_argument("--platform", choices=SETS, default=HERE, help="(default: %(default)s)")
    parser.add_argument("--runtime", action="store_true", help="build bertlite-runtime (default: bertlite)")
    args = parser.parse_args(argv)
    linux = args.platform.startswith("linux")
    if not (linux or args.runtime):
        parser.error(f"for {args.platform} there is a wheel of the runtime alone: add --runtime")
    if args.platform != HERE:
        os.environ.setdefault("CXX", shlex.join(COMPILERS[args.platform]))
    if args.runtime:
        build_runtime(args.out, SETS[args.platform], "" if linux else " On this platform it has not been run.")
    else:
        PREBUILT.mkdir()
        try:
            add_kernels(PREBUILT, SETS[args.platform])
            python("build", "--wheel", "--no-isolation", "--outdir", str(args.out), str(ROOT))
        finally:
            shutil.rmtree(PREBUILT)
    wheel = max(args.out.glob("*.whl"), key=lambda path: path.stat().st_mtime)
    most = LARGEST_RUNTIME if args.runtime else LARGEST
    if wheel.stat().st_size > most:
        sys.exit(f"{wheel} has {wheel.stat().st_size:,} bytes, of {most:,} allowed")
    if not linux:
        print(f"{wheel}: not run, as it was compiled on another system", file=sys.stderr)
    elif importlib.util.find_spec("auditwheel") is None:
        print(f"{wheel}: auditwheel is not installed, so that the tag is not checked", file=sys.stderr)
    elif newest_system(found := python("auditwheel", "show", str(wheel))) > newest_system(wheel.name):
        sys.exit(found)
    return 0


def build_runtime(out: Path, sets: Sequence[str], note: str = "") -> None:
    """Build the wheel of `bertlite_runtime`: the room of bertlite by another name, so that both can be installed.

    Args:
        note: added to its description.
    """
    with tempfile.TemporaryDirectory(prefix="bertlite-runtime-") as name:
        project = Path(name)
        ignored = shutil.ignore_patterns("__pycache__", PREBUILT.name)
        shutil.copytree(ROOT / "bertlite" / "runtime", project / "bertlite_runtime", ignore=ignored)
        (project / "bertlite_runtime" / "py.typed").touch()
        shutil.copy(Path(__file__).with_name("wheel_hook.py"), project)
        shutil.copy(ROOT / "LICENSE", project)
        (project / "pyproject.toml").write_text(PROJECT.format(version=__version__, note=note), encoding="utf-8")
        (project / "bertlite_runtime" / PREBUILT.name).mkdir()
        add_kernels(project / "bertlite_runtime" / PREBUILT.name, sets)
        python("build", "--wheel", "--no-isolation", "--outdir", str(out), name)


def add_kernels(folder: Path, sets: Sequence[str]) -> None:
    """Compile the kernels of sets of instructions into a folder, with the compiler that CXX names."""
    by_zig = "ziglang" in os.environ.get("CXX", "")  # it names an architecture by -mcpu
    for name in sets:
        wanted = INSTRUCTION_SETS[name]
        flags = (each.replace("-march=armv8.2-a", "-mcpu=generic+v8_2a") if by_zig else each for each in wanted.flags)
        compile_kernels(replace(wanted, flags=tuple(flags)), folder / file_name(wanted))


def newest_system(text: str) -> int:
    """Return the number of the tag manylinux_2_NUMBER in a text; a huge one if there is none."""
    found = re.search(r"manylinux_2_(\d+)_", " ".join(text.split()).rpartition("platform tag")[2])
    return int(found[1]) if found else sys.maxsize


def python(module: str, *arguments: str) -> str:
    """Run a module of Python; return its output."""
    return subprocess.run(
        [sys.executable, "-m", module, *arguments], check=True, capture_output=True, text=True
    ).stdout


if __name__ == "__main__":
    raise SystemExit(main())
