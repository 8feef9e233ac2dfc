"""Do the tests notice?  Change one operator, number, condition or statement of a module at a time and run its tests.

    python scripts/mutation.py attention                             # every mutant: an hour or more
    python scripts/mutation.py pruning --slice 3/20                  # each 20th, from the third
    python scripts/mutation.py checkpoint --lines 400-460 --minutes 5
    python scripts/mutation.py attention --list                      # what would be changed; nothing is run

The package is copied, the copy is changed, and a fork of this process, which has torch already, runs the tests on it
up to the first that fails.  Prints every mutant that no test noticed, and how many were; writes all with --json.  What
is left out: annotations, docstrings, the text of errors, decorators.  Exits 1 if a mutant survived.
"""

import argparse
import ast
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TESTS = {  # the fastest first
    "attention": ("attention", "model", "packed", "decoder"),
    "pruning": ("pruning", "neurons", "checkpoint"),
    "checkpoint": ("checkpoint", "hostile_files"),
}
SECONDS = 240  # a mutant that takes longer has been noticed: it loops
OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


@dataclass(frozen=True)
class Mutant:
    line: int
    start: int  # bytes of the source
    end: int
    old: str
    new: str
    status: str = "not run"

    def __str__(self) -> str:
        old, new = (" ".join(text.split())[:60] for text in (self.old, self.new))
        return f"line {self.line}: {old} -> {new}"


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """What a node could wrongly be."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in OPERATORS:
        yield ast.Compare(node.left, [OPERATORS[type(node.ops[0])](), *node.ops[1:]], node.comparators)  # type: ignore[list-item]
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        yield ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)  # type: ignore[arg-type]
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(OPERATORS[type(node.op)](), node.values)  # type: ignore[arg-type]
    elif isinstance(node, ast.UnaryOp):
        yield node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield ast.Constant(node.value + 1)
    elif isinstance(node, ast.Return) and node.value is not None and ast.unparse(node.value) != "None":
        yield ast.Return(ast.Constant(None))
    elif isinstance(node, ast.Raise | ast.AugAssign | ast.Continue | ast.Break) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ):
        yield ast.Pass()
    for name in ("test", "ifs"):  # of if, while, a conditional expression and a comprehension
        for test in [getattr(node, name, [])] if name == "test" else getattr(node, name, []):
            if isinstance(test, ast.expr) and not isinstance(test, ast.Compare | ast.UnaryOp | ast.Constant):
                yield ast.copy_location(ast.UnaryOp(ast.Not(), test), test)


def nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of a module that do something."""
    yield node
    if isinstance(node, ast.Raise):
        return  # or the texts of errors
    for name, held in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_comment", "type_params"):
            continue
        for part in held if isinstance(held, list) else [held]:
            if isinstance(part, ast.AST) and not isinstance(part, ast.JoinedStr):
                yield from nodes(part)


def mutants(source: str) -> list[Mutant]:
    """Every change of a module, in the order of its lines."""
    starts, whole = [0], source.encode()
    for line in whole.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for node in nodes(ast.parse(source)):
        for new in changes(node):
            place: Any = new.operand if isinstance(new, ast.UnaryOp) and hasattr(new, "lineno") else node
            if not hasattr(place, "lineno"):
                continue
            start = starts[place.lineno - 1] + place.col_offset
            end = starts[place.end_lineno - 1] + place.end_col_offset
            text = ast.unparse(ast.fix_missing_locations(new))
            text = text if isinstance(new, ast.stmt) else f"({text})"
            old = whole[start:end].decode()
            found.append(Mutant(place.lineno, start, end, old, text))
    return sorted(set(found), key=lambda each: (each.start, each.end, each.new))


def verdict(files: Sequence[Path], folder: Path) -> str:
    """What the tests say of the package in a folder, in a fork of this process."""
    pid = os.fork()
    if pid == 0:
        status = 3
        try:
            signal.alarm(SECONDS)
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            sys.path.insert(0, str(folder))
            os.environ["PYTHONPATH"] = str(folder)
            import pytest

            options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow"]
            status = int(pytest.main([*options, *map(str, files)]))
        finally:
            os._exit(status)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return "survived" if code == 0 else "killed" if code > 0 else "looped or crashed"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("module", choices=TESTS)
    parser.add_argument("--slice", default="1/1", help="K/N: each N-th mutant, from the K-th")
    parser.add_argument("--lines", default="1-1000000", help="FROM-TO of the module")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no mutant after so many")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    path = ROOT / "bertlite" / f"{args.module}.py"
    source = path.read_text(encoding="utf-8")
    (first, step), (low, high) = (map(int, args.slice.split("/")), map(int, args.lines.split("-")))
    chosen = [each for each in mutants(source) if low <= each.line <= high][first - 1 :: step]
    if args.list:
        print(*chosen, sep="\n")
        return 0
    sys.dont_write_bytecode = True  # a second is too coarse to tell one mutant from the next
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    import torch

    torch.set_num_threads(1)  # threads do not survive a fork
    files = [ROOT / "tests" / f"test_{name}.py" for name in TESTS[args.module]]
    done: list[Mutant] = []
    with tempfile.TemporaryDirectory() as place:
        folder, begun = Path(place), time.monotonic()
        shutil.copytree(ROOT / "bertlite", folder / "bertlite", ignore=shutil.ignore_patterns("__pycache__"))
        copy, whole = folder / "bertlite" / path.name, source.encode()
        if verdict(files, folder) != "survived":
            sys.exit(f"the tests fail without a mutant: run pytest {' '.join(map(str, files))}")
        for each in chosen:
            if time.monotonic() - begun > args.minutes * 60:
                break
            copy.write_bytes(whole[: each.start] + each.new.encode() + whole[each.end :])
            done.append(Mutant(**{**asdict(each), "status": verdict(files, folder)}))
            if done[-1].status != "killed":
                print(f"{done[-1].status}: {path.name}, {each}", flush=True)
    counts = Counter(each.status for each in done)
    print(f"{len(done)} of {len(chosen)} mutants: {', '.join(f'{n} {status}' for status, n in counts.items())}")
    if args.json:
        from bertlite.record import write_json

        write_json(args.json, {"module": args.module, "mutants": [asdict(each) for each in done]})
    return int(counts["survived"] > 0)


if __name__ == "__main__":
    sys.exit(main())
