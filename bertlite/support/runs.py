"""Folders of experiments, written as they go, so that a killed run can be read up to its last step.

A `Run` is the folder of one experiment::

    run.json            command, config, seed, environment, results,
                        hashes of data and model, wall seconds, and
                        status: running, finished or failed
    metrics.jsonl       one line per step
    predictions.jsonl   one line per example
    *.json              other files of the experiment, such as masks
"""

import json
import shlex
import shutil
import sys
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from bertlite.support.environment import environment
from bertlite.support.files import check_is_folder, program_name, read_json_lines, to_json, write_json, write_text

RUN, METRICS, PREDICTIONS = "run.json", "metrics.jsonl", "predictions.jsonl"


class Run:
    """The folder of one run of an experiment, written step by step: a killed run can be read up to its last step.

    The run is finished when the `with` block ends, failed when an error ends it; a killed run stays "running".

    Args:
        name: kind of experiment, such as "prune".
        config: all settings of the run; JSON-ready.
        folder: the folder of the run; an unfinished run in it is replaced.
        seed: the seed of all random draws.
        data, model: {name: sha256} of the data and models that were read; see `sha256_of`.
        kept: names of files to keep when an unfinished run is replaced, to continue its work.

    Raises:
        FileExistsError: `folder` holds a finished run, or something that is not a run.
    """

    def __init__(
        self,
        name: str,
        config: Mapping[str, Any],
        *,
        folder: str | Path,
        seed: int | None = None,
        data: Mapping[str, str] | None = None,
        model: Mapping[str, str] | None = None,
        device: str = "cpu",
        kept: Collection[str] = (),
    ) -> None:
        self.kept = kept
        self.folder = Path(folder).expanduser()
        self.results: dict[str, Any] = {}
        self.facts = {
            "name": name,
            "command": shlex.join([program_name(), *sys.argv[1:]]),
            "config": dict(config),
            "seed": seed,
            "data": dict(data or {}),
            "model": dict(model or {}),
            "environment": environment(device),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
        }

    def __enter__(self) -> Self:
        check_is_folder(self.folder)
        if self.folder.exists():
            # a killed process may have left a half-written .run.json.XXXX
            written = [path for path in self.folder.iterdir() if not path.name.startswith(f".{RUN}.")]
            if written and not (self.folder / RUN).exists():
                raise FileExistsError(f"{self.folder} is there already and is not a run: name another folder")
            if run_is_finished(self.folder):
                raise FileExistsError(f"{self.folder} holds a finished run: delete it, or name another folder")
            replaced = [path for path in written if path.name not in self.kept]
            for path in sorted(replaced, key=lambda path: path.name == RUN):  # last, as it marks the folder as a run
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        self.clock = time.perf_counter()
        self.write_facts("running")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        failure = {} if kind is None else {"error": f"{kind.__name__}: {error}"}
        self.write_facts("failed" if failure else "finished", **failure)

    def write_facts(self, status: str, **more: Any) -> None:
        """Write run.json."""
        seconds = round(time.perf_counter() - self.clock, 3)
        facts = {**self.facts, "status": status, "wall_seconds": seconds, "results": self.results, **more}
        write_json(self.folder / RUN, facts)

    def log(self, **metrics: Any) -> None:
        """Add one line to metrics.jsonl."""
        with (self.folder / METRICS).open("a", encoding="utf-8") as file:
            file.write(to_json(metrics) + "\n")

    def save(self, name: str, value: Any) -> None:
        """Write a JSON file into the folder."""
        write_json(self.folder / name, value)

    def save_predictions(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Write predictions.jsonl, one line per example."""
        write_text(self.folder / PREDICTIONS, "".join(to_json(line) + "\n" for line in lines))


@dataclass(frozen=True)
class Record:
    """A run, read from its folder."""

    folder: Path
    facts: dict[str, Any]

    @property
    def finished(self) -> bool:
        return self.facts["status"] == "finished"

    @property
    def config(self) -> dict[str, Any]:
        return self.facts["config"]

    @property
    def results(self) -> dict[str, Any]:
        return self.facts["results"]

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        return read_json_lines(self.folder / METRICS)

    @cached_property
    def predictions(self) -> list[dict[str, Any]]:
        return read_json_lines(self.folder / PREDICTIONS)

    def load(self, name: str) -> Any:
        """Read a JSON file of the folder."""
        return json.loads((self.folder / name).read_text(encoding="utf-8"))


def read_runs(root: str | Path = "runs", *, name: str | None = None, unfinished: bool = False) -> list[Record]:
    """Read the runs under a folder, at any depth, in the order of their paths.

    Args:
        name: only runs with this name.
        unfinished: also runs that failed, were killed or are still running.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    root = Path(root).expanduser()
    if not root.is_dir():
        raise FileNotFoundError(f"there is no folder {root}")
    found = [Record(path.parent, json.loads(path.read_text(encoding="utf-8"))) for path in sorted(root.rglob(RUN))]
    return [run for run in found if (unfinished or run.finished) and name in (None, run.facts["name"])]


def run_is_finished(folder: Path) -> bool:
    path = folder / RUN
    return path.exists() and json.loads(path.read_text(encoding="utf-8"))["status"] == "finished"
