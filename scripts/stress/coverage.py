"""List the lines of bertlite/ that the tests do not run.  All lines count, those that raise errors too.

    python -m scripts.stress.coverage                      # all tests, on every core: minutes
    python -m scripts.stress.coverage tests/test_model.py  # what pytest is given instead
    python -m scripts.stress.coverage --out scripts/results/coverage.json

Child processes count, however they are started, unless they are killed.  Lines that only a skipped test would run, for
want of a GPU or a library, count as not run.  Prints every file of which a line is not run, with those lines, and
exits 1 if a test failed or fewer than --least percent of all lines ran.
Needs pip install coverage pytest-xdist.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RULES = """
[run]
source = {root}/bertlite
parallel = true
patch = subprocess, _exit
sigterm = true
data_file = {folder}/data
[report]
exclude_lines =
"""  # the last of these: nothing is left out, not even what says "pragma: no cover"


def measure(tests: Sequence[str], folder: Path, workers: str) -> tuple[int, dict[str, Any]]:
    """Run the tests; return their exit status and coverage's report as a dictionary."""
    rules, report = folder / "rules", folder / "report.json"
    rules.write_text(RULES.format(root=ROOT, folder=folder))
    env = {"OMP_NUM_THREADS": "1", **os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), env.get("PYTHONPATH"))))
    tool = [sys.executable, "-m", "coverage"]
    pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", workers, *tests]
    status = subprocess.run([*tool, "run", f"--rcfile={rules}", *pytest], cwd=ROOT, env=env, check=False).returncode
    missing = ["report", "--show-missing", "--skip-covered"]
    for command in (["combine", "-q"], missing, ["json", "-q", "-o", str(report)]):
        subprocess.run([*tool, command[0], f"--rcfile={rules}", *command[1:]], cwd=ROOT, env=env, check=True)
    return status, json.loads(report.read_text())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", default=["tests"], help="what pytest is given (tests)")
    parser.add_argument("--workers", default="auto", help="of pytest-xdist (auto)")
    parser.add_argument("--least", type=float, default=95.0, metavar="PERCENT")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write a record (default: nowhere)")
    args = parser.parse_args(argv)
    if absent := [name for name in ("coverage", "xdist") if find_spec(name) is None]:
        parser.error(f"{' and '.join(absent)} not installed: pip install coverage pytest-xdist")
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
