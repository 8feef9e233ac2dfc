"""Change one operator, number, condition or statement of a module at a time and check that its tests notice.

    python -m scripts.stress.mutation stack/attention                     # every mutant of bertlite/stack/attention.py
    python -m scripts.stress.mutation checkpoint/checks --lines 40-90     # those of some lines
    python -m scripts.stress.mutation stack/masks --list                  # print the mutants; nothing is run
    python -m scripts.stress.mutation config --tests tests/test_config.py # other tests than those of TESTS
    python -m scripts.stress.mutation pruning --out scripts/results/mutation-pruning.json

The package is copied, the copy is changed, and a fork of this process, which has imported torch already, runs the
tests on it up to the first that fails: first those that reach the changed lines, and of these first the quick.
Annotations, docstrings, the text of errors and decorators are not changed.

Prints every mutant that no test noticed, and how many were noticed.  scripts/stress/mutants.toml lists the mutants
that no test should notice, with the reason: they mean the same or change only time or memory.  Exits 1 if another
survived.
"""

import argparse
import ast
import contextlib
import json
import os
import shlex
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
TESTS = {  # {module or room: the files of tests/ that must notice its mutants}
    "stack": ("stack/test_attention.py", "test_model.py", "stack/test_packed.py", "stack/test_decoder.py"),
    "pruning": ("test_pruning.py", "test_compact.py", "checkpoint/test_checkpoint.py"),
    "checkpoint": ("checkpoint/test_checkpoint.py", "checkpoint/test_hostile_files.py", "checkpoint/test_faults.py"),
}
SEEN = "seen.json"
LOOPS = 3  # times as long as without a mutant: it has been noticed
PAIRS: tuple[tuple[type[ast.AST], type[ast.AST]], ...] = (
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)),
    *((ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.BitAnd, ast.BitOr), (ast.And, ast.Or)),
)
OPERATORS = {a: b for pair in PAIRS for a, b in (pair, pair[::-1])}
OPERATORS |= dict.fromkeys((ast.FloorDiv, ast.Mod, ast.Pow), ast.Mult)


@dataclass(frozen=True)
class Mutant:
    """One change of a module's source."""

    line: int
    start: int  # bytes of the source
    end: int
    old: str
    new: str
    code: str  # the whole of the line

    @property
    def key(self) -> tuple[str, str, str]:
        """Return what identifies a mutant, wherever its line moves."""
        return self.code, " ".join(self.old.split()), " ".join(self.new.split())

    def __str__(self) -> str:
        return f"line {self.line}: {self.key[1][:60]} -> {self.key[2][:60]}"


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what a node could wrongly be."""
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
    """Yield the parts of a module that do something."""
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
    """Return every mutant of a module, in the order of its lines."""
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


def source_of(module: str) -> Path:
    """Return the file of a module that is named by its path in bertlite, such as "stack/attention"."""
    return ROOT / "bertlite" / f"{module}.py"


def explanations(module: str) -> dict[tuple[str, str, str], str]:
    """Return {key of a mutant: why no test should notice it} of a module."""
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


def verdict(files: Sequence[Path], folder: Path, plugin: Watch | Order, seconds: float = 0) -> str:
    """Run the tests on the package in a folder, in a fork of this process; 0 seconds are no limit."""
    pid = os.fork()
    if pid == 0:
        status = 3
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            os.environ["PYTHONPATH"] = str(folder)  # of the processes that tests start
            path = f"pythonpath={shlex.join(map(str, (folder, ROOT)))}"  # the copy before the checkout
            options = ["-x", "-q", "--assert=plain", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow"]
            status = int(pytest.main([*options, "-o", path, *map(str, files)], plugins=[plugin]))
            if isinstance(plugin, Watch):
                (folder / SEEN).write_text(json.dumps(plugin.seen))
        finally:
            os._exit(status)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return "survived" if code == 0 else "killed" if code > 0 else "looped or crashed"


def run(module: str, chosen: Sequence[Mutant], files: Sequence[Path]) -> dict[str, list[Mutant]]:
    """Run the tests on one mutant after the other, on a copy of the package; print those that are not killed."""
    sys.dont_write_bytecode = True  # a second is too coarse to tell one mutant from the next
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    import torch

    torch.set_num_threads(1)  # threads do not survive a fork
    with contextlib.suppress(ImportError):  # a fork then has it too
        import transformers.modeling_utils  # noqa: F401
    done: dict[str, list[Mutant]] = {"killed": [], "survived": [], "looped or crashed": []}
    reasons, whole = explanations(module), source_of(module).read_bytes()
    with tempfile.TemporaryDirectory() as place:
        folder, start = Path(place), time.monotonic()
        shutil.copytree(ROOT / "bertlite", folder / "bertlite", ignore=shutil.ignore_patterns("__pycache__"))
        copy = folder / "bertlite" / f"{module}.py"
        if verdict(files, folder, Watch(copy)) != "survived":
            sys.exit(f"the tests fail without a mutant: run pytest {' '.join(map(str, files))}")
        seen = json.loads((folder / SEEN).read_text())
        limit = LOOPS * (time.monotonic() - start)
        for each in chosen:
            copy.write_bytes(whole[: each.start] + each.new.encode() + whole[each.end :])
            order = Order(seen, range(each.line, each.line + each.old.count("\n") + 1))
            found = verdict(files, folder, order, limit)
            done[found].append(each)
            if found != "killed":
                why = f" ({reasons[each.key]})" if each.key in reasons else ""
                print(f"{found}: {module}.py, {each}{why}", flush=True)
    return done


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("module", help="its path in bertlite without .py: stack/attention")
    parser.add_argument(
        "--tests", type=lambda text: text.split(","), metavar="A,B", help="instead of the files that TESTS names"
    )
    parser.add_argument("--lines", default="1-1000000", help="FROM-TO of the module")
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write a record")
    args, start = parser.parse_args(argv), time.monotonic()
    module = args.module.removesuffix(".py")
    if not source_of(module).is_file():
        parser.error(f"there is no {source_of(module).relative_to(ROOT)}")
    tests = args.tests or [f"tests/{name}" for name in TESTS.get(module.split("/")[0], ())]
    if not tests:
        parser.error(f"TESTS names no tests of {module}: give --tests; it has {', '.join(TESTS)}")
    every, reasons = mutants(source_of(module).read_text(encoding="utf-8")), explanations(module)
    low, high = map(int, args.lines.split("-"))
    chosen = [each for each in every if low <= each.line <= high]
    if args.list:
        print(*chosen, sep="\n")
        return 0
    done = run(module, chosen, [ROOT / path for path in tests])
    unexplained = [each for each in done["survived"] if each.key not in reasons]
    counts = {"mutants": len(every), "run": len(chosen)}
    counts |= {name: len(each) for name, each in done.items()} | {"unexplained": len(unexplained)}
    print(", ".join(f"{n} {what}" for what, n in counts.items()))
    if args.out:
        from bertlite.records import environment, write_record  # not before: the forks import the copy

        record: dict[str, Any] = {"module": module, "tests": tests, **counts}
        for name, which in (("survivors", "survived"), ("loops", "looped or crashed")):
            record[name] = [
                dict(zip(("line", "old", "new"), each.key, strict=True), why=reasons.get(each.key))
                for each in done[which]
            ]
        record["minutes"] = round((time.monotonic() - start) / 60, 1)
        write_record(args.out, {**record, "environment": environment()})
    return int(bool(unexplained))


if __name__ == "__main__":
    sys.exit(main())
