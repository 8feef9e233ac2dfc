"""Run the tests of the native kernels with AMX emulated, on a processor with AVX-512 but without AMX.

    python -m scripts.stress.amx                                              # tests/inference/native
    python -m scripts.stress.amx --out scripts/results/amx.json
    python -m scripts.stress.amx tests/inference/native/test_native_numbers.py -k int8

emulator.c is compiled and preloaded in all processes; it executes the tile instructions, ours and oneDNN's, and counts
them.  This tests the results of AMX, not its speed.  Tests of other sets of instructions are left out, and tests of
float16: oneDNN computes it with AVX512-FP16, which is not emulated.  Needs gcc, nm and objdump, and Linux on x86-64.
"""

import argparse
import os
import re
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import torch

from bertlite.runtime.library import INSTRUCTION_SETS
from bertlite.support.environment import environment
from bertlite.support.files import write_json

EMULATOR = Path(__file__).with_name("emulator.c")
FLAGS = ("-O3", "-march=x86-64-v4", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter", "-shared", "-fPIC")
COUNTED = re.compile(r"enum Counted \{(.*?)\}", re.DOTALL)
ASKING = re.compile(r"^(\w+) (\w+) [tTwW] \w*(?:5Xbyak4util3Cpu|4dnnl4impl3cpu3x643amx)\w*$", re.MULTILINE)
ASKED = re.compile(r"^ *(\w+):\s+(cpuid|xgetbv)", re.MULTILINE)
OTHERS = ("torch.float16", *(name for name in INSTRUCTION_SETS if name != "amx"))
TESTS = ("tests/inference/native", "-m", "not slow", "-k", " and ".join(f"not {name}" for name in OTHERS))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the record goes; none by default")
    args, options = parser.parse_known_args(argv)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        counts, report = Path(folder) / "counts", Path(folder) / "report.xml"
        names = [name.strip() for name in COUNTED.findall(EMULATOR.read_text(encoding="utf-8"))[0].split(",")]
        counts.write_bytes(bytes(8 * len(names)))
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:faulthandler",
            f"--junitxml={report}",
            *(options or TESTS),
        ]
        variables = {**os.environ, **emulated(Path(folder)), "AMX_COUNTS": str(counts)}
        status = subprocess.run(command, env=variables).returncode
        executed = dict(zip(names, struct.unpack(f"{len(names)}q", counts.read_bytes()), strict=True))
        suite = next(ElementTree.parse(report).iter("testsuite"))
    tests = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    print(", ".join(f"{name} {count:,}" for name, count in {**tests, **executed}.items()))
    if args.out is not None:
        minutes = round((time.monotonic() - start) / 60, 1)
        record = {"minutes": minutes, "results": tests, "instructions": executed, "environment": environment()}
        write_json(args.out, {"what": "scripts/stress/amx", **record})
    return status or int(not executed["TDPBF16PS"])


def emulated(folder: Path) -> dict[str, str]:
    """Compile the emulator into a folder; return the environment variables by which a process runs with AMX."""
    library = str(folder / "libamx.so")
    subprocess.run(["gcc", *FLAGS, str(EMULATOR), "-o", library], check=True)
    torch_library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    return {"LD_PRELOAD": library, "AMX_SITES": ",".join(places(torch_library))}


def places(library: Path) -> list[str]:
    """Return where oneDNN asks the processor whether it has AMX: the instruction's first letter, then its offset."""
    found = []
    for start, size in sorted(set(ASKING.findall(output("nm", "-S", "--defined-only", str(library))))):
        limits = (f"--start-address=0x{start}", f"--stop-address={int(start, 16) + int(size, 16)}")
        listing = output("objdump", "-d", "--no-show-raw-insn", *limits, str(library))
        found += [instruction[0] + offset for offset, instruction in ASKED.findall(listing)]
    return found


def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    raise SystemExit(main())
