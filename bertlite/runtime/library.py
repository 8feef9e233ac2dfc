"""The compiled kernels: found in the package or in the cache, or else compiled once with the user's compiler.

A processor may have several sets of instructions.  The best is taken whose kernels load and pass a self-test, and
whose bfloat16 is not slow.  Times are measured once and kept in a file next to the kernels.

Only functions that start programs import `subprocess`, `shutil` and `tempfile`, and none `hashlib`: they take 5 MB.
"""

import contextlib
import copyreg
import ctypes
import json
import logging
import os
import platform
import shlex
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from .self_test import find_fault, seconds_of_numbers
from .structs import Kernels

SOURCES = Path(__file__).parent / "kernels"
PREBUILT = Path(__file__).parent / "prebuilt"  # compiled kernels of a wheel that has them
MAIN = "native.cpp"
FLAGS = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-ffp-contract=off",  # join a product and a sum only where the source says so, on every processor
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
)
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma")
VNNI, BF16 = "-mavx512vnni", "-mavx512bf16"
AVX2 = ("-mavx2", "-mfma", "-falign-loops=64")  # without alignment int8 can be 5 % slower, by chance
ON_MAC = {"FEAT_DotProd": "asimddp", "FEAT_I8MM": "i8mm", "FEAT_BF16": "bf16"}  # as Linux names them
ON_MAC |= {"avx2_0": "avx2", "fma": "fma"}
ON_X86 = platform.machine() in ("x86_64", "AMD64")
AVX2_ON_WINDOWS = 40  # PF_AVX2_INSTRUCTIONS_AVAILABLE; every processor that has it has fma
MACHINES = {"linux": ("x86_64", "aarch64"), "darwin": ("x86_64", "arm64"), "win32": ("AMD64",)}
log = logging.getLogger("bertlite")
CHECKSUM_SIZE = 4


class NativeKernelsError(RuntimeError):
    """Raised if the native kernels are not available, with the reason and the way out."""


class CompilationError(NativeKernelsError):
    """Raised if a compiler has failed."""


compiler_failures: dict[tuple[str, ...], str] = {}  # {`compiler_settings`: message} in this process


@dataclass(frozen=True)
class InstructionSet:
    """A kind of processor that the kernels are compiled for.

    Args:
        needs: flags of the processor, as in Linux's /proc/cpuinfo.
        flags: options for the compiler.
        rounds_once: whether a product and a sum are rounded once, as on every other processor.
    """

    name: str
    needs: frozenset[str]
    flags: tuple[str, ...]
    rounds_once: bool = True

    @property
    def multiplies_bfloat16(self) -> bool:
        """Whether it has an instruction for bfloat16, which some processors run slowly."""
        return bool(self.needs & {"avx512_bf16", "bf16"}) and "amx_bf16" not in self.needs


HAS_AVX512 = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma"})
INSTRUCTION_SETS = {  # from the best to the most common
    each.name: each
    for each in (
        InstructionSet(
            "amx",
            HAS_AVX512 | {"avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8"},
            (*AVX512, VNNI, BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8", "-DBERTLITE_AMX"),
        ),
        InstructionSet("avx512_bf16", HAS_AVX512 | {"avx512_vnni", "avx512_bf16"}, (*AVX512, VNNI, BF16)),
        InstructionSet("avx512_vnni", HAS_AVX512 | {"avx512_vnni"}, (*AVX512, VNNI)),
        InstructionSet("avx512", HAS_AVX512, AVX512),
        InstructionSet("avx_vnni", frozenset({"avx2", "fma", "avx_vnni"}), (*AVX2, "-mavxvnni")),
        InstructionSet("avx2", frozenset({"avx2", "fma"}), AVX2),
        InstructionSet("neon_bf16", frozenset({"asimddp", "i8mm", "bf16"}), ("-march=armv8.2-a+dotprod+i8mm+bf16",)),
        InstructionSet("neon_dot", frozenset({"asimddp"}), ("-march=armv8.2-a+dotprod",)),
        InstructionSet("baseline", frozenset(), (), rounds_once=not ON_X86),  # SSE2 or NEON
        InstructionSet("baseline_exact", frozenset(), ("-DBERTLITE_ROUNDS_ONCE",)),
    )
}


@cache
def processor_flags() -> frozenset[str]:
    """Return the flags of this processor, as in Linux's /proc/cpuinfo."""
    if sys.platform == "darwin":
        import subprocess

        features = subprocess.run(["sysctl", "hw.optional"], capture_output=True, text=True).stdout
        return frozenset(flag for feature, flag in ON_MAC.items() if f".{feature}: 1" in features)
    if sys.platform == "win32":
        has_avx2 = ctypes.windll.kernel32.IsProcessorFeaturePresent(AVX2_ON_WINDOWS)
        return frozenset({"avx2", "fma"} if has_avx2 else ())

    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("flags", "Features")):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def processor_name() -> str:
    """Return a name that tells this kind of processor from others with the same flags."""
    known = ("vendor_id", "cpu family", "model", "model name", "CPU implementer", "CPU part")
    with contextlib.suppress(OSError):
        lines = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines()]
        found = {key.strip(): value.strip() for key, _, value in lines}
        return " ".join(found.get(key, "") for key in known)
    return platform.processor()


def missing_platform() -> str | None:
    """Return the reason why the kernels cannot run on this kind of machine; None if they can."""
    machine = platform.machine()
    if machine in MACHINES.get(sys.platform, ()):
        return None
    known = "Linux and macOS on x86-64 or ARM, and Windows on x86-64"
    return f"native kernels are for {known}, not for {sys.platform} on {machine}"


def usable_sets(*, reproducible: bool = False) -> list[InstructionSet]:
    """Return the sets that this processor has, the best first, or only the one that BERTLITE_NATIVE names.

    Args:
        reproducible: return only sets that round like all others.
    """
    chosen = os.environ.get("BERTLITE_NATIVE")
    if chosen and chosen not in INSTRUCTION_SETS:
        raise NativeKernelsError(f"BERTLITE_NATIVE={chosen!r} is unknown; have: {', '.join(INSTRUCTION_SETS)}")
    if not chosen:
        found = [each for each in INSTRUCTION_SETS.values() if each.needs <= processor_flags()]
        return [each for each in found if each.rounds_once or not reproducible]

    # A set that the user names is taken or refused, never replaced.
    missing = sorted(INSTRUCTION_SETS[chosen].needs - processor_flags())
    if missing:
        raise NativeKernelsError(f"BERTLITE_NATIVE={chosen!r} needs a processor with {', '.join(missing)}; unset it")
    if reproducible and not INSTRUCTION_SETS[chosen].rounds_once:
        raise NativeKernelsError(f"BERTLITE_NATIVE={chosen!r} rounds twice, so nothing is reproducible; unset it")
    return [INSTRUCTION_SETS[chosen]]


def load_kernels(reproducible: bool = False, *, retry: bool = True) -> Kernels:
    """Return the kernels for this processor, compiling them the first time.

    Args:
        reproducible: compute the same float32 and int8 as on every processor.
        retry: run a compiler that has failed in this process again, with the same settings.

    Raises:
        NativeKernelsError: they are not compiled and cannot be; the message says what to install.
    """
    reason = missing_platform()
    if reason is not None:
        raise NativeKernelsError(reason)
    settings = compiler_settings()
    if not retry and settings in compiler_failures:
        raise CompilationError(compiler_failures[settings])
    try:
        return best_kernels(settings, reproducible)
    except CompilationError as error:
        compiler_failures[settings] = str(error)
        raise


@cache
def best_kernels(settings: tuple[str, ...], reproducible: bool = False) -> Kernels:
    """Return the kernels of the first usable set that has any; log a warning if it is not the best set.

    A set whose bfloat16 is slower than its float32 on this processor is taken only if no other has kernels.

    Args:
        settings: from `compiler_settings`; if they change, the compiler is tried again.
        reproducible: as for `load_kernels`.

    Raises:
        NativeKernelsError: no set has kernels; the message is a compiler's, or else the best set's.
    """
    failures: list[NativeKernelsError] = []
    slow, usable = [], usable_sets(reproducible=reproducible)

    # A set fails for a compiler that is too old, or for a fault of its kernels; the next one may still do.
    for wanted in usable:
        try:
            kernels = kernels_for(wanted.name, reproducible)
        except NativeKernelsError as error:
            failures.append(error)
            continue

        # Some processors run these instructions slowly.  A set that nothing can replace is not worth a measurement.
        if wanted.multiplies_bfloat16 and len(usable) > 1 and is_bfloat16_slow(kernels):
            slow.append(kernels)
            continue

        # Slower kernels would pass unnoticed, so the log names the reason.
        if failures:
            log.warning("the native kernels are for %s, not %s: %s", wanted.name, usable[0].name, failures[0])
        return kernels

    # A compiler's message says what to install, so it goes before any other.
    if slow:
        return slow[0]
    raise next((each for each in failures if isinstance(each, CompilationError)), failures[0])


copyreg.pickle(Kernels, lambda kernels: (load_kernels, (kernels.reproducible,)))  # compiled for one machine


def is_bfloat16_slow(kernels: Kernels) -> bool:
    """Return whether a layer in bfloat16 takes longer than in float32; measured once for each kind of processor."""
    key = {"kernels": Path(kernels.path).name, "processor": [processor_name(), *sorted(processor_flags())]}
    seconds = measured_once(key, ("bfloat16", "float32"), lambda: seconds_of_numbers(kernels))
    return seconds["bfloat16"] > seconds["float32"]


def measured_once(
    key: Mapping[str, Any], ways: Sequence[str], measure: Callable[[], dict[str, float]]
) -> dict[str, float]:
    """Return the seconds of one layer in several ways, kept in a file next to the kernels.

    Args:
        key: names everything that they depend on.
    """
    name = f"speed-{crc_of(repr(key).encode()).hex()}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, NativeKernelsError):  # none, or damaged
        found = json.loads((cache_folder() / name).read_text(encoding="utf-8"))["seconds"]
        return {way: float(found[way]) for way in ways}

    seconds = measure()
    of = "".join(f", {name}: {key[name]}" for name in ("dtype", "threads") if name in key)

    # A choice between kernels should be explained somewhere, so the times are in the log.
    milliseconds = ", ".join(f"{way} {1000 * each:.2f} ms" for way, each in seconds.items())
    log.info("one layer%s, measured once: %s", of, milliseconds)

    with contextlib.suppress(OSError, NativeKernelsError):  # the next process measures again
        path = own_folder(cache_folder()) / name
        written = path.with_suffix(f".{os.getpid()}")
        written.write_text(json.dumps({**key, "seconds": seconds}), encoding="utf-8")
        written.replace(path)
    return seconds


def compiler_settings() -> tuple[str, ...]:
    """Return the settings that a user can change to make a failed compiler succeed."""
    names = ("CXX", "PATH", "BERTLITE_NATIVE", "BERTLITE_CACHE", "XDG_CACHE_HOME", "HOME")
    return tuple(os.environ.get(name, "") for name in names)


@cache
def kernels_for(name: str, reproducible: bool = False) -> Kernels:
    """Return the kernels for one set of instructions, given by its name in INSTRUCTION_SETS.

    Raises:
        NativeKernelsError: they are not compiled and cannot be, or do not load, or compute something else.
    """
    wanted = INSTRUCTION_SETS[name]
    path = PREBUILT / file_name(wanted)

    # Kernels of a wheel come first; without them, or if the file is cut short, the cache is used and filled.
    try:
        if not is_whole(path):
            path = own_folder(cache_folder()) / path.name
            compile_once(wanted, path)
        kernels = Kernels(str(path), reproducible)
    except (OSError, AttributeError) as error:
        # The way out depends on whether the file or its folder is at fault.
        if is_whole(path):  # not a library, or one without the functions
            raise NativeKernelsError(f"{path} cannot be loaded: {error}; delete it") from error
        raise NativeKernelsError(
            f"the compiled kernels cannot be written or read: {error}; set BERTLITE_CACHE to another folder"
        ) from error

    # Kernels that load can still compute wrong numbers, from a fault of the compiler or of the processor.
    fault = find_fault(kernels)
    if fault is not None:
        raise NativeKernelsError(f"{path} failed its self-test: {fault}; set BERTLITE_NATIVE to another set")
    return kernels


def file_name(wanted: InstructionSet) -> str:
    """Return a name that is unique to these sources and flags."""
    sources = b"".join(source.name.encode() + source.read_bytes() for source in sorted(SOURCES.iterdir()))
    return f"{wanted.name}-{crc_of(repr((FLAGS, wanted.flags)).encode() + sources).hex()}.so"


def crc_of(data: bytes) -> bytes:
    return zlib.crc32(data).to_bytes(CHECKSUM_SIZE, "big")


def cache_folder() -> Path:
    """Return the folder of compiled kernels: in BERTLITE_CACHE, or in the user's cache folder."""
    own = os.environ.get("BERTLITE_CACHE")
    try:
        return Path(own or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bertlite") / "native"
    except RuntimeError as error:
        raise NativeKernelsError(f"there is no folder for compiled kernels: {error}; set BERTLITE_CACHE") from error


def own_folder(folder: Path) -> Path:
    """Return a folder that only this user can write to, since code is loaded from it; make it if it is not there.

    Raises:
        NativeKernelsError: it is another user's, or others can write to it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if hasattr(os, "geteuid") and (found.st_uid != os.geteuid() or found.st_mode & 0o022):
        raise NativeKernelsError(
            f"{folder} belongs to user {found.st_uid} and has mode {found.st_mode & 0o777:o}: others may have put code"
            f" there. Run `chmod 700 {folder}` if it is yours, or set BERTLITE_CACHE to another folder"
        )
    return folder


def is_whole(path: Path) -> bool:
    """Return whether a compiled library is there and complete: it ends in the checksum of everything before."""
    found = path.read_bytes() if path.exists() else b""
    return len(found) > CHECKSUM_SIZE and found[-CHECKSUM_SIZE:] == crc_of(found[:-CHECKSUM_SIZE])


def compile_once(wanted: InstructionSet, path: Path) -> None:
    """Compile the kernels to a path unless they are there; if another process is compiling them, wait for it."""
    if is_whole(path):
        return
    if sys.platform == "win32":
        raise NativeKernelsError(f"on Windows kernels come with a wheel, and none for {wanted.name} are installed")
    import fcntl

    lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released if this process dies
        if not is_whole(path):
            compile_kernels(wanted, path)
    finally:
        os.close(lock)


def compile_kernels(wanted: InstructionSet, path: Path, sources: Path = SOURCES) -> None:
    """Compile the kernels to a path, which appears when they are complete."""
    import subprocess
    import tempfile

    compiler = find_compiler()
    announce(compiler[0])

    # The library is built next to its place and moved there when it is complete, so no process loads half of one.
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / path.name
        command = [*compiler, *FLAGS, *wanted.flags, str(sources / MAIN), "-o", str(built)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        except OSError as error:
            raise NativeKernelsError(f"{compiler[0]} cannot be run: {error}; set CXX to GCC 11 or newer") from error

        # A compiler may print hundreds of errors: the first one is the message, and the log has all of them.
        if done.returncode or not built.exists():
            log.debug("%s\n%s", shlex.join(command), done.stderr)
            lines = done.stderr.splitlines() or ["no output"]
            first = next((line for line in lines if "error" in line), lines[0])[:200]
            raise CompilationError(
                f"{compiler[0]} cannot compile the CPU kernels for {wanted.name}: {first};"
                " set CXX to GCC 11 or newer, or log 'bertlite' at DEBUG to see all errors"
            )

        # The checksum tells a complete library from one that a crash or a full disk has cut short.
        with built.open("rb+") as file:
            file.write(crc_of(file.read()))  # the loader does not look at the end
            file.flush()
            os.fsync(file.fileno())
        os.replace(built, path)


@cache
def announce(compiler: str) -> None:
    """Log that kernels are being compiled; once for all sets of instructions that a compiler is tried with."""
    log.warning("compiling the CPU kernels with %s, once; this takes some seconds", compiler)


def find_compiler() -> list[str]:
    """Return the command of the user's C++ compiler: CXX, or c++, g++ or clang++."""
    import shutil

    try:
        own = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise NativeKernelsError(f"CXX is {os.environ['CXX']!r}: {error}; set it to GCC 11 or newer") from error
    for command in [own] if own else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command
    tried = own[0] if own else "c++, g++ or clang++"
    raise NativeKernelsError(
        f"no C++ compiler was found ({tried}): install one, such as with `apt-get install g++` or `conda install gxx`"
    )
