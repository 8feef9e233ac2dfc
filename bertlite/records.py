"""What a figure needs beside it to mean anything: where it was measured, with what, and a file that holds it.

A `Run` is a folder that says all of that about one experiment::

    run.json            command, config, seed, git commit, versions, machine, hashes of data and model, wall seconds,
                        results, and its status: running, finished or failed
    metrics.jsonl       one line per step
    predictions.jsonl   one line per example
    *.json              what else the experiment saves, such as its masks
"""

import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any, Self

PACKAGES = ("bertlite", "torch", "transformers", "accelerate", "safetensors", "tokenizers", "huggingface_hub", "numpy")
RUN, METRICS, PREDICTIONS = "run.json", "metrics.jsonl", "predictions.jsonl"


class Run:
    """A folder for one run of an experiment, written as it goes, so that a killed run can be read up to where it came.

    It is finished when the `with` block ends, failed when an error ends it; a run that was killed stays "running".

    Args:
        name: what it is a run of.
        config: all that it was asked to do; JSON-ready.
        root: where the folder is made, as DATE-NAME-XXXX.
        folder: the folder itself instead; what an unfinished run left there is replaced.
        seed: of whatever was drawn.
        data, model: {name: sha256} of what was read; see `sha256_of`.

    Raises:
        FileExistsError: `folder` holds a finished run, or something that is not a run.
    """

    def __init__(
        self,
        name: str,
        config: Mapping[str, Any],
        *,
        root: str | Path = "runs",
        folder: str | Path | None = None,
        seed: int | None = None,
        data: Mapping[str, str] | None = None,
        model: Mapping[str, str] | None = None,
        device: str = "cpu",
    ) -> None:
        today = datetime.now(UTC)
        made = f"{today:%Y-%m-%d}-{name}-{uuid.uuid4().hex[:4]}"
        self.folder = Path(root) / made if folder is None else Path(folder)
        self.results: dict[str, Any] = {}
        self.facts = {
            "name": name,
            "command": shlex.join([program(), *sys.argv[1:]]),
            "config": dict(config),
            "seed": seed,
            "data": dict(data or {}),
            "model": dict(model or {}),
            "git": git(),
            "environment": environment(device),
            "started": today.isoformat(timespec="seconds"),
        }

    def __enter__(self) -> Self:
        if self.folder.exists():
            written = [path for path in self.folder.iterdir() if not path.name.startswith(f".{RUN}.")]  # half
            if written and not (self.folder / RUN).exists():
                raise FileExistsError(f"{self.folder} is there already and is not a run: name another folder")
            if is_finished(self.folder):
                raise FileExistsError(f"{self.folder} holds a finished run: delete it, or name another folder")
            for path in sorted(written, key=lambda path: path.name == RUN):  # last what says that it is a run
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        self.clock = time.perf_counter()
        self.tell("running")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if kind is None:
            self.tell("finished")
        else:
            self.tell("failed", error=f"{kind.__name__}: {error}")

    def tell(self, status: str, **more: Any) -> None:
        seconds = round(time.perf_counter() - self.clock, 3)
        facts = {**self.facts, "status": status, "wall_seconds": seconds, "results": self.results, **more}
        write_json(self.folder / RUN, facts)

    def log(self, **metrics: Any) -> None:
        """Add one line to metrics.jsonl."""
        with (self.folder / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(metrics) + "\n")

    def save(self, name: str, value: Any) -> None:
        """Write a JSON file into the folder."""
        write_json(self.folder / name, value)

    def save_predictions(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Write predictions.jsonl, one line per example."""
        write_text(self.folder / PREDICTIONS, "".join(json.dumps(line) + "\n" for line in lines))


@dataclass(frozen=True)
class Record:
    """A run as its folder tells it."""

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
        return read_lines(self.folder / METRICS)

    @cached_property
    def predictions(self) -> list[dict[str, Any]]:
        return read_lines(self.folder / PREDICTIONS)

    def load(self, name: str) -> Any:
        """A JSON file of the folder."""
        return json.loads((self.folder / name).read_text(encoding="utf-8"))


def read_runs(root: str | Path = "runs", *, name: str | None = None, unfinished: bool = False) -> list[Record]:
    """The runs under a folder, at any depth, in the order of their paths.

    Args:
        name: only runs with this name.
        unfinished: those that failed, were killed or are still running too.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    root = Path(root)
    if not root.is_dir():
        raise FileNotFoundError(f"there is no folder {root}")
    found = [Record(path.parent, json.loads(path.read_text(encoding="utf-8"))) for path in sorted(root.rglob(RUN))]
    return [run for run in found if (unfinished or run.finished) and name in (None, run.facts["name"])]


def is_finished(folder: Path) -> bool:
    path = folder / RUN
    return path.exists() and json.loads(path.read_text(encoding="utf-8"))["status"] == "finished"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a .jsonl file; a last line that was being written when its process was killed is left out."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines(True) if line.endswith("\n")]


def sha256_of(*parts: str | bytes | Path) -> str:
    """One hash of texts, bytes and files' contents, in this order."""
    whole = hashlib.sha256()
    for part in parts:
        if isinstance(part, Path):
            with part.open("rb") as file:
                whole.update(hashlib.file_digest(file, "sha256").digest())
        else:
            whole.update(hashlib.sha256(part.encode() if isinstance(part, str) else part).digest())
    return whole.hexdigest()


def program() -> str:
    path = Path(sys.argv[0])
    return path.parent.name if path.name == "__main__.py" else path.name


def git() -> dict[str, Any] | None:
    """The commit that this package was checked out at, and whether anything had changed; None outside a checkout."""

    def ask(*words: str) -> str:
        here = Path(__file__).resolve().parent
        return subprocess.run(["git", "-C", here, *words], capture_output=True, text=True, check=True).stdout

    try:
        return {"commit": ask("rev-parse", "HEAD").strip(), "dirty": bool(ask("status", "--porcelain").strip())}
    except (OSError, subprocess.CalledProcessError):
        return None


def environment(device: str = "cpu") -> dict[str, Any]:
    """The machine and the versions a figure was measured with; JSON-ready."""
    import torch

    versions = {name: version_of(name) for name in PACKAGES}
    versions["torch"] = torch.__version__
    facts = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": device,
        "versions": versions,
    }
    if device.startswith("cuda"):
        memory = torch.cuda.get_device_properties(device).total_memory
        facts |= {
            "gpu": torch.cuda.get_device_name(device),
            "gpu_memory": memory,
            "cuda": torch.version.cuda,
            "driver": driver(),
        }
    return facts


def driver() -> str | None:
    """The version of NVIDIA's driver; None where its own tool is missing."""
    ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(ask, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    """The processor's features say more about a timing than its name, which virtual machines often hide."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    said = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines) if value}
    wanted = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "asimd")
    has = [flag for flag in wanted if flag in (said.get("flags") or said.get("Features") or "").split()]
    return f"{said.get('model name', platform.processor())} ({' '.join(has)})"


def write_json(path: str | Path, value: Any) -> None:
    """Write a JSON file that is never half there."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def write_text(path: str | Path, text: str) -> None:
    """Write a text file that is never half there."""
    write_bytes(path, text.encode())


def write_bytes(path: str | Path, content: bytes) -> None:
    """Write a file that is never half there."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
