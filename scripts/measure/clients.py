"""Run the libraries that people use BERT through, with bertlite's classes and with transformers' own.

    python -m scripts.measure.clients                            # every check; two minutes
    python -m scripts.measure.clients --only Trainer PEFT        # those whose client or name contains a word
    python -m scripts.measure.clients --json FILE

Each check is a function of tests/clients/checks, where the tests find it too.  Prints one line per check, and exits 1
if bertlite fails one; what stock fails at is recorded with its error.  Without --only the record goes to
scripts/results/clients-VERSION.json, VERSION being transformers', unless --json names another file.
"""

import argparse
import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from bertlite.records import environment, version_of, write_record

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = (
    *("accelerate", "sentence-transformers", "peft", "datasets"),
    *("onnx", "onnxruntime", "onnxscript", "torchao", "captum", "bertviz", "textpruner"),
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")  # the libraries' own, about each other
    import transformers

    checks = the_checks()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    chosen = [c for c in checks.CHECKS.values() if any(word in c.client or word in c.name for word in args.only)]
    if not chosen:
        sys.exit(f"no check matches {' or '.join(args.only)}; have: {', '.join(checks.CHECKS)}")
    print(f"bertlite.hf and stock, transformers {transformers.__version__}")
    cells = [cell(check) for check in chosen]
    path = args.json
    if path is None and args.only == [""]:
        path = ROOT / "scripts" / "results" / f"clients-{transformers.__version__}.json"
    if path is not None:
        where = environment()
        where["versions"] |= {name: version_of(name) for name in CLIENTS}
        write_record(path, {"what": "scripts/measure/clients.py", "environment": where, "checks": cells})
        print(f"record: {path}")
    failed = [line["name"] for line in cells if line["bertlite.hf"]["result"] == "fails"]
    print(f"{len(cells)} checks; bertlite.hf fails {', '.join(failed) or 'none'}")
    return int(bool(failed))


def the_checks() -> Any:
    """The package tests/clients/checks."""
    folder = str(ROOT / "tests" / "clients")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module("checks")


def cell(check: Any) -> dict[str, Any]:
    """One line of the matrix: what came of a check with either library, and how far what they saw lies apart."""
    checks = the_checks()
    line: dict[str, Any] = {"client": check.client, "claim": check.claim, "name": check.name}
    seen = {}
    for side in (checks.OURS, checks.STOCK):
        line[side.name], seen[side.name] = attempt(check, side)
    results = [line[name]["result"] for name in seen]
    if results == ["passes", "passes"]:
        line["difference"] = checks.gap(*seen.values())
    apart = f"difference {line['difference']:.1e}" if "difference" in line else ""
    print(f"{check.client:<24} {check.claim:<85} {results[0]:<8} {results[1]:<8} {apart}")
    for name in seen:
        if "error" in line[name]:
            print(f"    {name}: {line[name]['error']:.150}")
    return line


def attempt(check: Any, side: Any) -> tuple[dict[str, Any], Any]:
    """What came of one run, JSON-ready, and what it saw."""
    checks, start = the_checks(), perf_counter()
    with TemporaryDirectory(prefix="bertlite-clients-") as folder:
        try:
            seen = check.run(side, Path(folder) / "run")
        except checks.MissingError as missing:
            return {"result": "not run", "error": checks.told(missing)}, None
        except Exception as error:
            return {"result": "fails", "error": checks.told(error).replace(folder, "FOLDER")}, None
    return {"result": "passes", "seconds": round(perf_counter() - start, 1)}, seen


if __name__ == "__main__":
    raise SystemExit(main())
