"""Run transformers' own tests of BERT, once with its classes and once with bertlite's in their place.

    git clone --depth 1 --branch v5.23.0 https://github.com/huggingface/transformers CHECKOUT
    python -m scripts.stress.hf_suites CHECKOUT                        # tests of the model and of its configuration
    python -m scripts.stress.hf_suites CHECKOUT --only meta,mismatched # tests with one of these in their name

The checkout must be of the version of transformers that this Python has installed, since its tests hold for no other;
run it beside each version that is supported.  Needs pytest, and `parameterized`, which those tests import.  A test
counts against bertlite if it passes with transformers' classes and not with bertlite's; it is printed with its error,
and the exit status is then 1.  Nothing is installed and the checkout is not changed.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bertlite.cli.parts import names

ROOT = Path(__file__).resolve().parents[2]
TESTS = "tests/models/bert/test_modeling_bert.py"
PLUGIN = "scripts.stress.hf_suites"  # this module is also the plugin of the pytest that it starts
OURS, OUT = "BERTLITE_HF_SUITES_OURS", "BERTLITE_HF_SUITES_OUT"  # its settings: whose classes, and a file
Outcomes = dict[str, str]  # of each test that was not skipped: "passed", or its error
outcomes: Outcomes = {}


def put_ours_in_place() -> None:
    """Make every name by which transformers knows a BERT class mean bertlite's, in this process."""
    import transformers
    from transformers.models.bert import modeling_bert

    from bertlite import hf

    for name in hf.__all__:
        ours = getattr(hf, name)
        if isinstance(ours, type) and issubclass(ours, transformers.PreTrainedModel):
            for module in (transformers, transformers.models.bert, modeling_bert):
                setattr(module, name, ours)
    hf.register()


def pytest_configure() -> None:
    if os.environ.get(OURS):
        put_ours_in_place()


def pytest_runtest_logreport(report: Any) -> None:
    if report.failed:  # a subtest that fails reports under the name of its test
        lines = [line for line in report.longreprtext.splitlines() if line.startswith("E  ")]
        outcomes[report.nodeid] = lines[0][1:].strip() if lines else "failed"
    elif report.when == "call" and report.passed:
        outcomes.setdefault(report.nodeid, "passed")


def pytest_sessionfinish() -> None:
    Path(os.environ[OUT]).write_text(json.dumps(outcomes), encoding="utf-8")


def run(checkout: Path, only: Sequence[str], ours: bool) -> Outcomes:
    """Run the tests in a process of their own and return what came of each that was not skipped."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "outcomes.json"
        env = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        env |= {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", PLUGIN, TESTS]
        done = subprocess.run(
            [*command, *(["-k", " or ".join(only)] if only else [])],
            cwd=checkout,
            env={**os.environ, **env, OURS: "1" if ours else "", OUT: str(path)},
            capture_output=True,
            text=True,
            check=False,
        )
        found: Outcomes = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if done.returncode not in (0, 1) or not found:  # 1: tests failed
        sys.exit(f"the tests did not run:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a git checkout of transformers; other sources have no tests")
    parser.add_argument("--only", type=names, default=(), help="parts of names (default: all)")
    args = parser.parse_args(argv)
    source = args.checkout / "src" / "transformers" / "__init__.py"
    if not source.is_file() or not (args.checkout / TESTS).is_file():
        sys.exit(f"{args.checkout} is no git checkout of transformers, with {TESTS}")
    theirs = re.findall(r'^__version__ = "([^"]+)"', source.read_text(encoding="utf-8"), re.MULTILINE)
    if theirs != [version("transformers")]:
        sys.exit(f"{args.checkout} is {theirs} and {version('transformers')} is installed: check out that version")
    stocks, ours = (run(args.checkout, args.only, ours) for ours in (False, True))
    passed = [name for name, outcome in stocks.items() if outcome == "passed"]
    worse = {name: ours.get(name, "skipped") for name in passed if ours.get(name) != "passed"}
    for name, error in worse.items():
        print(f"only with bertlite: {name}\n    {error}")
    for name in stocks.keys() - passed:
        print(f"with transformers' own classes too: {name}\n    {stocks[name]}")
    print(
        f"transformers {version('transformers')}, torch {version('torch')}: {len(passed)} of {len(stocks)} tests pass"
        f" with its own classes, and {len(passed) - len(worse)} of these with bertlite's"
    )
    return int(bool(worse))


if __name__ == "__main__":
    raise SystemExit(main())
