"""Commands on a real terminal: each runs in a process of its own, on a pseudo-terminal of its own.

To import torch and the libraries once for all commands, a process that has imported them is forked for each: run as a
program, this file is that process.  It reads a line of JSON for each command, and writes one with what came of it.
"""

import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import tomllib
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, Self

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
WORK = (  # what the commands import when they run
    "bertlite.attention_view",
    "bertlite.embed.command",
    "bertlite.inspection",
    "bertlite.bench.command",
    "bertlite.bench.runs",
    "bertlite.experiments.command",
    "bertlite.parity.command",
    "bertlite.shipping.command",
    "accelerate",
    "matplotlib.pyplot",
    "pyarrow.parquet",
)
COLUMNS, LINES = 100, 40


@dataclass(frozen=True)
class Result:
    """What came of a command: its exit status, and what the terminal was sent, or the log."""

    status: int
    output: str


class Terminal:
    """Runs `bertlite` in a folder, on terminals or into logs."""

    def __init__(self, folder: Path, extras: Sequence[str] | None = None) -> None:
        """Hide, with `extras`, every package that an installation with these extras alone does not have."""
        self.folder, self.extras = folder, extras

    def __enter__(self) -> Self:
        self.server = subprocess.Popen(
            [sys.executable, "-c", f"from tests.terminal import serve; serve({self.extras!r})"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "HF_HUB_OFFLINE": "1",
                "TRANSFORMERS_OFFLINE": "1",
                "OMP_NUM_THREADS": "1",
                "MPLBACKEND": "Agg",
                "PYTHONPATH": str(ROOT),
            },
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self.server.stdin is not None
        self.server.stdin.close()
        self.server.wait()

    def run(self, *words: str, log: bool = False, **more: Any) -> Result:
        """Run a command on a terminal, or with `log` on a pipe.

        Args:
            interrupt: a pattern; when the terminal has shown it, Ctrl-C is typed.
            between: seconds between two lines of progress in a log.
        """
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        request = {"words": words, "folder": str(self.folder), "log": log, **more}
        self.server.stdin.write(json.dumps(request) + "\n")
        self.server.stdin.flush()
        return Result(**json.loads(self.server.stdout.readline()))


def serve(extras: Sequence[str] | None) -> None:
    """Run the commands that standard input names, line by line."""
    if extras is not None:
        hide_all_but(needed_packages(extras))
    import torch

    torch.set_num_threads(1)  # threads of OpenMP do not survive a fork
    for name in WORK:
        try:
            import_module(name)
        except ImportError:
            continue  # the command that needs it says so
    for line in sys.stdin:
        status, output = run(**json.loads(line))
        print(json.dumps({"status": status, "output": output.decode()}), flush=True)


def needed_packages(extras: Sequence[str]) -> set[str]:
    """Return the names of all packages that bertlite with these extras brings here."""
    facts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    todo = [*facts["dependencies"], f"bertlite[{','.join(extras)}]"]
    found: set[str] = set()
    seen: set[str] = set()
    while todo:
        wanted = Requirement(todo.pop())
        name = canonicalize_name(wanted.name)
        if str(wanted) in seen:
            continue
        seen.add(str(wanted))
        if name == "bertlite":
            todo += [each for extra in wanted.extras for each in facts["optional-dependencies"][extra]]
            continue
        with suppress(metadata.PackageNotFoundError):
            kinds = [{"extra": extra} for extra in ("", *wanted.extras)]
            needs = [Requirement(each) for each in metadata.requires(name) or ()]
            todo += [str(each) for each in needs if each.marker is None or any(map(each.marker.evaluate, kinds))]
            found.add(name)
    return found


def hide_all_but(packages: set[str]) -> None:
    """Let Python find no module of another package, but for those that every environment has."""
    hidden = {
        module
        for module, owners in metadata.packages_distributions().items()
        if not {canonicalize_name(owner) for owner in owners} & {*packages, "bertlite", "pip", "setuptools"}
    }

    class Visible(PathFinder):
        @classmethod
        def find_spec(cls, name: str, *more: Any) -> ModuleSpec | None:
            return None if name.partition(".")[0] in hidden else PathFinder.find_spec(name, *more)

    sys.meta_path = [Visible if each is PathFinder else each for each in sys.meta_path]


def run(words: list[str], folder: str, log: bool, interrupt: str = "", between: float = 30.0) -> tuple[int, bytes]:
    """Run a command in a fork of this process; return its exit status and what it wrote."""
    if log:
        reader, writer = os.pipe()
        process = os.fork()
        if process == 0:
            for descriptor in (1, 2):
                os.dup2(writer, descriptor)
        else:
            os.close(writer)
    else:
        process, reader = pty.fork()
    if process == 0:
        become_command(words, folder, between)
    output, typed = b"", False
    while True:
        try:
            part = os.read(reader, 65536)
        except OSError:  # Linux says so when the last process has closed a terminal
            part = b""
        if not part:
            break
        output += part
        if interrupt and not typed and re.search(interrupt.encode(), output):
            typed = True
            os.write(reader, b"\x03")
    os.close(reader)
    _, how = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(how), output


def become_command(words: list[str], folder: str, between: float) -> None:
    """Run `bertlite` with these words in this process, and end the process."""
    import fcntl
    import termios

    status = 99
    try:
        if os.isatty(1):
            fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", buffering=1), open(2, "w", buffering=1)  # noqa: SIM115
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
        os.chdir(folder)
        sys.argv = ["bertlite", *words]
        from bertlite import progress
        from bertlite.cli import main

        progress.SECONDS_BETWEEN_LINES = between
        status = main()
        sys.stdout.flush()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)
