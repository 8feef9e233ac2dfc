"""List the lines of bertlite/ that the tests do not run.  All lines count, those that raise errors too.

    python -m scripts.stress.coverage                      # all tests, on every core: minutes
    python -m scripts.stress.coverage tests/test_model.py  # what pytest is given instead
    python -m scripts.stress.coverage --out scripts/results/coverage.json

Child processes count, however they are started, unless they are killed.  Lines that only a skipped test would run, for
want of a GPU or a library, count as not run.  Prints every file of which a line is not run, with those lines, and
exits 1 if a test failed or fewer than --least percent of all lines ran.
[tool.coverage] of pyproject.toml says what is measured.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def measure(tests: Sequence[str], folder: Path, workers: str) -> tuple[int, dict[str, Any]]:
    """Run the tests; return their exit status and coverage's report as a dictionary."""
    env = {"OMP_NUM_THREADS": "1", **os.environ, **OFFLINE, "COVERAGE_FILE": str(folder / "data")}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), env.get("PYTHONPATH"))))

    def coverage(*words: str) -> int:
        return subprocess.run([sys.executable, "-m", "coverage", *words], cwd=ROOT, env=env, check=False).returncode

    status = coverage("run", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", workers, *tests)
    coverage("combine", "-q")
    coverage("report", "--show-missing", "--skip-covered")
    coverage("json", "-q", "-o", str(folder / "report.json"))
    return status, json.loads((folder / "report.json").read_text())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", default=["tests"], help="what pytest is given (tests)")
    parser.add_argument("--workers", default="auto", help="of pytest-xdist (auto)")
    parser.add_argument("--least", type=float, default=95.0, metavar="PERCENT")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write a record (default: nowhere)")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as place:
        status, report = measure(args.tests, Path(place), args.workers)
    files = {
        name: {"lines": held["summary"]["num_statements"], "run": held["summary"]["covered_lines"]}
        for name, held in sorted(report["files"].items())
    }
    lines, run = (sum(held[what] for held in files.values()) for what in ("lines", "run"))
    if args.out:
        from bertlite.records import environment, write_record

        record = {"what": "scripts/stress/coverage.py", "tests": args.tests, "passed": status == 0}
        record |= {"lines": lines, "run": run, "percent": round(100 * run / lines, 2), "files": files}
        write_record(args.out, {**record, "environment": environment()})
    return int(status != 0 or run / lines < args.least / 100)


if __name__ == "__main__":
    sys.exit(main())
