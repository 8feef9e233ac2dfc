"""Run the libraries that people use BERT through, with bertlite's classes and with transformers' own.

    python -m scripts.measure.clients                            # every check; two minutes
    python -m scripts.measure.clients --only Trainer,PEFT        # those whose client or name contains a word
    python -m scripts.measure.clients --out FILE

Each check is a function of tests/clients/checks, where the tests find it too.  Prints one line per check, and exits 1
if bertlite fails one; what stock fails at is recorded with its error.  Without --only the record goes to
scripts/results/clients-VERSION.json, VERSION being transformers', unless --out names another file.
"""

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import TYPE_CHECKING, Any

from bertlite.cli.parts import names
from bertlite.support.environment import environment, version_of
from bertlite.support.files import write_json

if TYPE_CHECKING:  # it imports transformers, which --help need not wait for
    from tests.clients.checks.common import Check, Observed, Side

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = ("accelerate", "sentence-transformers", "peft", "datasets", "opacus")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=names, default=("",), metavar="A,B", help="checks of a client or name (all)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write the record (default: see above)")
    args = parser.parse_args(argv)
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")  # the libraries' own, about each other
    import transformers

    from tests.clients.checks.common import CHECKS

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    chosen = [c for c in CHECKS.values() if any(word in c.client or word in c.name for word in args.only)]
    if not chosen:
        sys.exit(f"no check matches {' or '.join(args.only)}; have: {', '.join(CHECKS)}")
    print(f"bertlite.hf and stock, transformers {transformers.__version__}")
    results = [compare(check) for check in chosen]
    path = args.out
    if path is None and args.only == ("",):
        path = ROOT / "scripts" / "results" / f"clients-{transformers.__version__}.json"
    if path is not None:
        where = environment()
        where["versions"] |= {name: version_of(name) for name in CLIENTS}
        write_json(path, {"what": "scripts/measure/clients.py", "environment": where, "checks": results})
        print(f"record: {path}")
    failed = [line["name"] for line in results if line["bertlite.hf"]["result"] == "fails"]
    print(f"{len(results)} checks; bertlite.hf fails {', '.join(failed) or 'none'}")
    return int(bool(failed))


def compare(check: "Check") -> dict[str, Any]:
    """Run a check with either library, print a line, and return it with the largest difference between the two."""
    from tests.clients.checks.common import OURS, STOCK, gap

    line: dict[str, Any] = {"client": check.client, "claim": check.claim, "name": check.name}
    observed = {}
    for side in (OURS, STOCK):
        line[side.name], observed[side.name] = attempt(check, side)
    results = [line[name]["result"] for name in observed]
    if results == ["passes", "passes"]:
        line["difference"] = gap(*observed.values())
    difference = f"difference {line['difference']:.1e}" if "difference" in line else ""
    print(f"{check.client:<24} {check.claim:<85} {results[0]:<8} {results[1]:<8} {difference}")
    for name in observed:
        if "error" in line[name]:
            print(f"    {name}: {line[name]['error']:.150}")
    return line


def attempt(check: "Check", side: "Side") -> tuple[dict[str, Any], "Observed | None"]:
    """Run a check with one library; return the result, JSON-ready, and what the check observed."""
    from tests.clients.checks.common import MissingError, first_line

    start = perf_counter()
    with TemporaryDirectory(prefix="bertlite-clients-") as folder:
        try:
            observed = check.run(side, Path(folder) / "run")
        except MissingError as missing:
            return {"result": "not run", "error": first_line(missing)}, None
        except Exception as error:
            return {"result": "fails", "error": first_line(error).replace(folder, "FOLDER")}, None
    return {"result": "passes", "seconds": round(perf_counter() - start, 1)}, observed


if __name__ == "__main__":
    raise SystemExit(main())
