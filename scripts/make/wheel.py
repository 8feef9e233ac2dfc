"""Build a wheel that holds the compiled kernels, so that its users need no compiler.

    python -m scripts.make.wheel                            # dist/bertlite-….whl, for Linux on this machine
    python -m scripts.make.wheel --platform linux-aarch64   # compiled by CXX, or else by aarch64-linux-gnu-g++
    python -m scripts.make.wheel --runtime                  # bertlite_runtime-….whl, which needs no torch
    python -m scripts.make.wheel --runtime --here           # kernels for this kind of processor alone, in a minute
    python -m scripts.make.wheel --runtime --platform macos-arm64   # compiled by CXX, or else by PyPI's ziglang

It needs `pip install build hatchling lief`, and a C++ compiler.  The kernels are compiled for every kind of processor,
as many at once as there are cores: some minutes on two.  A wheel is written only if they are all there and need no
more of a system than its tag says.  Wheels for macOS and Windows say that they have not been run.
"""

import argparse
import inspect
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path, PurePath
from typing import Any

from bertlite import __version__
from bertlite.runtime.library import (
    CHECKSUM_SIZE,
    INSTRUCTION_SETS,
    PREBUILT,
    compile_kernels,
    crc_of,
    file_name,
    log,
    usable_sets,
)
from bertlite.runtime.structs import Kernels
from bertlite.support.progress import Progress

ROOT = Path(__file__).parents[2]
ON_ARM, NOT_LINUX = ("neon_bf16", "neon_dot", "baseline"), ("avx2", "baseline", "baseline_exact")
SETS = {  # by platform
    "linux-x86_64": ("amx", "avx512_bf16", "avx512_vnni", "avx512", "avx_vnni", "avx2", "baseline", "baseline_exact"),
    "linux-aarch64": ON_ARM,
    "macos-arm64": ON_ARM,
    "macos-x86_64": NOT_LINUX,
    "windows-x86_64": NOT_LINUX,
}
PACKAGES = ("build", "hatchling", "lief")  # that build a wheel and look into it
ZIG = (sys.executable, "-m", "ziglang", "c++", "-target")
COMPILERS = {  # of platforms other than this machine's, where CXX names none
    "linux-x86_64": ["x86_64-linux-gnu-g++"],
    "linux-aarch64": ["aarch64-linux-gnu-g++"],
    "macos-arm64": [*ZIG, "aarch64-macos.13.0-none"],
    "macos-x86_64": [*ZIG, "x86_64-macos.13.0-none"],
    "windows-x86_64": [*ZIG, "x86_64-windows-gnu"],
}
TAGS = {
    "linux-x86_64": "manylinux_2_27_x86_64",
    "linux-aarch64": "manylinux_2_27_aarch64",
    "macos-arm64": "macosx_13_0_arm64",
    "macos-x86_64": "macosx_13_0_x86_64",
    "windows-x86_64": "win_amd64",
}
Versions = dict[str, tuple[int, ...]]
SYSTEMS: dict[str, tuple[str, Versions]] = {  # libraries that a tag promises, and the newest version of interfaces
    "linux": (
        r"lib(c|m|dl|pthread|gcc_s|stdc\+\+)\.so\.\d|ld-linux-[\w-]+\.so\.\d",
        {"GLIBC": (2, 27), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)},  # Ubuntu 18.04, as PEP 600
    ),
    "macos": (r"/usr/lib/libSystem\.B\.dylib", {"macOS": (13, 0)}),
    "windows": (r"(?i)(kernel32|api-ms-win-crt-[\w-]+)\.dll", {}),
}
FUNCTIONS = {*re.findall(r"library\.(bertlite_\w+)", inspect.getsource(Kernels))}  # that Python looks up
OLDER_GLIBC = """\
#if defined(__linux__)
#include <features.h>
#if __GLIBC_PREREQ(2, 34)  // which has these under two versions: that of its release, and that of the first
#if defined(__x86_64__)
#define FIRST "GLIBC_2.2.5"
#else
#define FIRST "GLIBC_2.17"
#endif
__asm__(".symver dlsym, dlsym@" FIRST);
__asm__(".symver pthread_create, pthread_create@" FIRST);
__asm__(".symver pthread_detach, pthread_detach@" FIRST);
__asm__(".symver pthread_mutex_trylock, pthread_mutex_trylock@" FIRST);
#endif
#include <vector>
#if defined(__GLIBCXX__)  // GCC 11's calls this, which older ones lack
void std::__throw_bad_array_new_length() { throw std::bad_alloc(); }
#endif
#endif
"""
HERE = f"linux-{platform.machine()}"
LARGEST = 10 * 2**20  # bytes of a wheel
NOT_RUN = "On this platform it has not been run."
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
    parser.add_argument("--here", action="store_true", help="compile only for this processor (default: for all)")
    args = parser.parse_args(argv)
    linux = args.platform.startswith("linux")
    if not (linux or args.runtime):
        parser.error(f"for {args.platform} there is a wheel of the runtime alone: add --runtime")
    if args.here and args.platform != HERE:
        parser.error(f"--here is for {HERE}, not for {args.platform}: leave out one of them")
    sets = SETS[args.platform]
    if args.here:
        sets = tuple(dict.fromkeys(usable_sets(reproducible=each)[0].name for each in (False, True)))
    if args.platform != HERE:
        os.environ.setdefault("CXX", shlex.join(COMPILERS[args.platform]))
    zig = ("ziglang",) if "ziglang" in os.environ.get("CXX", "") else ()
    if missing := [name for name in (*PACKAGES, *zig) if find_spec(name) is None]:
        parser.error(f"{', '.join(missing)} must be installed: pip install {' '.join(missing)}")
    with tempfile.TemporaryDirectory(prefix="bertlite-wheel-") as name:
        if args.runtime:
            build_runtime(Path(name), sets, "" if linux else f" {NOT_RUN}")
        else:
            build(Path(name), sets)
        [wheel] = Path(name).glob("*.whl")
        if faults := [*find_faults(wheel, args.platform, sets)]:
            sys.exit("\n  ".join([f"{wheel.name} is not written:", *faults]))
        args.out.mkdir(parents=True, exist_ok=True)
        print(shutil.copy(wheel, args.out))
    if not linux:
        print(f"{wheel.name}: {NOT_RUN}", file=sys.stderr)
    return 0


def build(out: Path, sets: Sequence[str]) -> None:
    """Build the wheel of `bertlite`, from the checkout."""
    PREBUILT.mkdir()
    try:
        add_kernels(PREBUILT, sets)
        python("build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT))
    finally:
        shutil.rmtree(PREBUILT)


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
        first = project / "bertlite_runtime" / "__init__.py"  # its example gets the name of the wheel
        text = re.sub("from bertlite import runtime  #.*: ", "", first.read_text(encoding="utf-8"))
        first.write_text(f'{text}__version__ = "{__version__}"\n', encoding="utf-8")
        shutil.copy(Path(__file__).with_name("wheel_hook.py"), project)
        shutil.copy(ROOT / "LICENSE", project)
        (project / "pyproject.toml").write_text(PROJECT.format(version=__version__, note=note), encoding="utf-8")
        (project / "bertlite_runtime" / PREBUILT.name).mkdir()
        add_kernels(project / "bertlite_runtime" / PREBUILT.name, sets)
        python("build", "--wheel", "--no-isolation", "--outdir", str(out), name)


def add_kernels(folder: Path, sets: Sequence[str]) -> None:
    """Compile the kernels of sets of instructions into a folder, side by side, with the compiler that CXX names."""
    by_zig = "ziglang" in os.environ.get("CXX", "")  # it names an architecture by -mcpu
    with tempfile.TemporaryDirectory() as name:
        header = Path(name, "older_glibc.h")
        header.write_text(OLDER_GLIBC, encoding="utf-8")

        def compile_set(name: str) -> None:
            wanted = INSTRUCTION_SETS[name]
            flags = [
                each.replace("-march=armv8.2-a", "-mcpu=generic+v8_2a") if by_zig else each for each in wanted.flags
            ]
            compile_kernels(replace(wanted, flags=(*flags, "-include", str(header))), folder / file_name(wanted))

        log.addFilter(is_no_announcement)  # of a compilation in some seconds
        count = min(len(sets), os.cpu_count() or 1)
        print(f"compiling for {', '.join(sets)}, {count} at once; this takes minutes", file=sys.stderr, flush=True)
        with ThreadPoolExecutor(count) as pool, Progress(len(sets), "sets", what="compiling") as progress:
            for done in as_completed([pool.submit(compile_set, each) for each in sets]):
                done.result()
                progress.advance()
        log.removeFilter(is_no_announcement)


def is_no_announcement(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("compiling the CPU kernels")


def find_faults(wheel: Path, platform: str, sets: Sequence[str] = ()) -> Iterator[str]:
    """Yield the faults of a wheel for a platform: its size, its tag, kernels that it lacks, and faults of others.

    Args:
        sets: the sets of instructions that it must have; by default all of the platform.
    """
    if wheel.stat().st_size > LARGEST:
        yield f"it has {wheel.stat().st_size:,} bytes, of {LARGEST:,} allowed"
    if not wheel.stem.endswith(f"-{TAGS[platform]}"):
        yield f"it is not for {TAGS[platform]}"
    wanted = {file_name(INSTRUCTION_SETS[name]) for name in sets or SETS[platform]}
    with zipfile.ZipFile(wheel) as archive:
        kernels = {PurePath(name).name: name for name in archive.namelist() if name.endswith(".so")}
        if different := sorted(wanted ^ kernels.keys()):
            yield f"it lacks kernels, or has others: {', '.join(different)}"
        for name, path in kernels.items():
            yield from (f"{name} {fault}" for fault in faults_of(archive.read(path), platform))


def faults_of(code: bytes, platform: str) -> Iterator[str]:
    """Yield the faults of compiled kernels for a platform."""
    from scripts.make.wheel_hook import platform_of  # which needs hatchling

    tag, library = TAGS[platform], read_library(code)
    known, newest = SYSTEMS[platform.partition("-")[0]]
    if platform_of(code) != tag:
        yield f"is for {platform_of(code)}"
    if code[-CHECKSUM_SIZE:] != crc_of(code[:-CHECKSUM_SIZE]):
        yield "has another checksum"
    if missing := sorted(FUNCTIONS - functions_of(library)):
        yield f"lacks {', '.join(missing)}"
    if foreign := sorted(name for name in libraries_of(library) if not re.fullmatch(known, name)):
        yield f"needs {', '.join(foreign)}, which not every system has"
    for interface, version in versions_of(library):
        if version > newest.get(interface, ()):
            yield f"needs {interface} {'.'.join(map(str, version))}, which {tag} does not promise"
    if platform == "macos-arm64" and not library.has_code_signature:
        yield "is not signed, as macOS asks on ARM"


def read_library(code: bytes) -> Any:
    """Return a compiled library as lief reads it, without its messages."""
    import lief

    lief.logging.disable()
    return lief.parse(code)


def libraries_of(library: Any) -> set[str]:
    """Return the names of the libraries that a library needs; Mach-O lists its own name among them."""
    if hasattr(library, "build_version"):
        return {each.name for each in library.libraries if each.command.name != "ID_DYLIB"}
    return {*library.libraries} if hasattr(library, "dynamic_entries") else {each.name for each in library.imports}


def functions_of(library: Any) -> set[str]:
    """Return the names of the functions that a library read by lief offers."""
    if hasattr(library, "build_version"):  # Mach-O: symbols of a section that are external, and not to it alone
        return {each.name.removeprefix("_") for each in library.symbols if each.raw_type & 0x1F == 0xF}
    return {each.name for each in library.exported_functions}


def versions_of(library: Any) -> set[tuple[str, tuple[int, ...]]]:
    """Return the versions of interfaces that a library read by lief needs: of ELF's libraries, or of macOS."""
    if hasattr(library, "build_version"):
        return {("macOS", tuple(library.build_version.minos[:2]))}
    needed = getattr(library, "symbols_version_requirement", ())
    names = [each.name.rpartition("_") for one in needed for each in one.get_auxiliary_symbols()]
    return {
        (name, tuple(int(part) if part.isdigit() else sys.maxsize for part in version.split(".")))
        for name, _, version in names
    }


def python(module: str, *arguments: str) -> str:
    """Run a module of Python; return its output."""
    return subprocess.run(
        [sys.executable, "-m", module, *arguments], check=True, capture_output=True, text=True
    ).stdout


if __name__ == "__main__":
    raise SystemExit(main())
