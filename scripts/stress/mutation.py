"""Do the tests notice?  Change one operator, number, condition or statement of a module at a time and run its tests.

    python -m scripts.stress.mutation attention                             # every mutant
    python -m scripts.stress.mutation pruning --slice 3/20                  # each 20th, from the third
    python -m scripts.stress.mutation checkpoint --lines 400-460 --minutes 5
    python -m scripts.stress.mutation attention --list                      # what would be changed; nothing is run
    python -m scripts.stress.mutation pruning --json scripts/results/mutation-pruning.json
    python -m scripts.stress.mutation pruning --after RECORD --json NEW  # what was not killed there, and what is new

The package is copied, the copy is changed, and a fork of this process, which has torch already, runs the tests on it
up to the first that fails: those that reach the changed lines before the others, and the quick before the slow.  What
is left out: annotations, docstrings, the text of errors, decorators.

Prints every mutant that no test noticed, and how many were.  One that none should notice, since it means the same or
changes only how long something takes, is in scripts/stress/mutants.toml with the reason.  Exits 1 if another survived.
"""

import argparse
import ast
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXPLAINED = Path(__file__).with_name("mutants.toml")
TESTS = {
    "attention": ("attention", "model", "packed", "decoder"),
    "pruning": ("pruning", "neurons", "checkpoint"),
    "checkpoint": ("checkpoint", "hostile_files"),
}
SEEN = "seen.json"
LOOPS = 3  # times as long as without a mutant: it has been noticed
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
    code: str  # the whole of the line

    @property
    def key(self) -> tuple[str, str, str]:
        """What tells it from others, wherever its line moves."""
        return self.code, " ".join(self.old.split()), " ".join(self.new.split())

    def __str__(self) -> str:
        return f"line {self.line}: {self.key[1][:60]} -> {self.key[2][:60]}"


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
            found.append(Mutant(place.lineno, start, end, old, text, source.splitlines()[place.lineno - 1].strip()))
    return sorted(set(found), key=lambda each: (each.start, each.end, each.new))


def explanations(module: str) -> dict[tuple[str, str, str], str]:
    """{key of a mutant: why no test should notice it}, of a module."""
    table = tomllib.loads(EXPLAINED.read_text(encoding="utf-8")).get(module, [])
    return {(each["line"], each["old"], each["new"]): each["why"] for each in table}


class Watch:
    """A pytest plugin that notes the lines of a file which each test runs, and the seconds that it takes."""

    def __init__(self, path: Path) -> None:
        self.path, self.lines, self.seen = str(path), set[int](), dict[str, tuple[float, list[int]]]()

    def trace(self, frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != self.path:
            return None
        self.lines.add(frame.f_lineno)
        return self.trace

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        begun = time.perf_counter()
        self.lines.clear()
        threading.settrace(self.trace)
        sys.settrace(self.trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)
            self.seen[item.nodeid] = time.perf_counter() - begun, sorted(self.lines)


class Order:
    """A pytest plugin that has the tests which reach some lines run first, and the quick before the slow."""

    def __init__(self, seen: dict[str, tuple[float, list[int]]], lines: range) -> None:
        self.seen, self.lines = seen, {*lines}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        def rank(item: pytest.Item) -> tuple[bool, float]:
            seconds, lines = self.seen.get(item.nodeid, (0.0, []))
            return self.lines.isdisjoint(lines), seconds

        items.sort(key=rank)


def killed_in(record: dict[str, Any], path: Path) -> set[tuple[str, str, str]]:
    """The keys of the mutants that a whole run killed.

    Raises:
        ValueError: it was not of the whole module.
    """
    if record["run"] != record["mutants"] or record["module"] != path.stem:
        raise ValueError(f"the record is not of all mutants of {path.name}: run without --after")
    from bertlite.records import commit_of, run_git

    made_from = commit_of(record)
    if made_from is None:
        raise ValueError("the record names no commit: run without --after")
    source = run_git("show", f"{made_from['commit']}:{path.relative_to(ROOT)}")
    left = {(each["line"], each["old"], each["new"]) for each in record["survivors"] + record["loops"]}
    return {each.key for each in mutants(source)} - left


def verdict(files: Sequence[Path], folder: Path, plugin: Watch | Order, seconds: float = 0) -> str:
    """What the tests say of the package in a folder, in a fork of this process; 0 seconds are no limit."""
    pid = os.fork()
    if pid == 0:
        status = 3
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            sys.path.insert(0, str(folder))
            os.environ["PYTHONPATH"] = str(folder)
            options = ["-x", "-q", "--assert=plain", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow"]
            status = int(pytest.main([*options, *map(str, files)], plugins=[plugin]))
            if isinstance(plugin, Watch):
                (folder / SEEN).write_text(json.dumps(plugin.seen))
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
    parser.add_argument("--after", type=Path, help="the record of a whole run: only what it did not kill, or not know")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    path = ROOT / "bertlite" / f"{args.module}.py"
    source, reasons = path.read_text(encoding="utf-8"), explanations(args.module)
    (first, step), (low, high) = (map(int, args.slice.split("/")), map(int, args.lines.split("-")))
    chosen = [each for each in mutants(source) if low <= each.line <= high][first - 1 :: step]
    before = json.loads(args.after.read_text()) if args.after else None
    killed = killed_in(before, path) if before else set()
    done = {"killed": [each for each in chosen if each.key in killed], "survived": [], "looped or crashed": []}
    chosen = [each for each in chosen if each.key not in killed]
    if args.list:
        print(*chosen, sep="\n")
        return 0
    sys.dont_write_bytecode = True  # a second is too coarse to tell one mutant from the next
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    import torch

    torch.set_num_threads(1)  # threads do not survive a fork
    with contextlib.suppress(ImportError):  # a fork then has it too
        import transformers.modeling_utils  # noqa: F401
    files = [ROOT / "tests" / f"test_{name}.py" for name in TESTS[args.module]]
    with tempfile.TemporaryDirectory() as place:
        folder, begun = Path(place), time.monotonic()
        shutil.copytree(ROOT / "bertlite", folder / "bertlite", ignore=shutil.ignore_patterns("__pycache__"))
        copy, whole = folder / "bertlite" / path.name, source.encode()
        if verdict(files, folder, Watch(copy)) != "survived":
            sys.exit(f"the tests fail without a mutant: run pytest {' '.join(map(str, files))}")
        seen = json.loads((folder / SEEN).read_text())
        limit = LOOPS * (time.monotonic() - begun)
        for each in chosen:
            if time.monotonic() - begun > args.minutes * 60:
                break
            copy.write_bytes(whole[: each.start] + each.new.encode() + whole[each.end :])
            order = Order(seen, range(each.line, each.line + each.old.count("\n") + 1))
            said = verdict(files, folder, order, limit)
            done[said].append(each)
            if said != "killed":
                why = f" ({reasons[each.key]})" if each.key in reasons else ""
                print(f"{said}: {path.name}, {each}{why}", flush=True)
    unexplained = [each for each in done["survived"] if each.key not in reasons]
    counts = {"mutants": len(mutants(source)), "run": sum(map(len, done.values()))}
    counts |= {said: len(each) for said, each in done.items()} | {"unexplained": len(unexplained)}
    print(", ".join(f"{n} {what}" for what, n in counts.items()))
    if args.json:
        from bertlite.records import commit_of, environment, write_record

        def told(found: Sequence[Mutant]) -> list[dict[str, Any]]:
            return [
                dict(zip(("line", "old", "new"), each.key, strict=True), why=reasons.get(each.key)) for each in found
            ]

        record = {"module": args.module, "tests": TESTS[args.module], **counts}
        record |= {"survivors": told(done["survived"]), "loops": told(done["looped or crashed"])}
        if before:  # the rest was not run again
            record["after"] = {
                "killed": sum(each.key in killed for each in done["killed"]),
                **(commit_of(before) or {}),
            }
            record["after"] |= {"after": before["after"]} if "after" in before else {}
        record["minutes"] = round((time.monotonic() - begun) / 60, 1)
        write_record(args.json, {**record, "environment": environment()})
    return int(bool(unexplained))


if __name__ == "__main__":
    sys.exit(main())
