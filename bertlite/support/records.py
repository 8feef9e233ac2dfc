"""Records of experiments: figures, with the commit and the machine that they were measured on.

A record is a JSON file with an "environment": versions, processor, and under "git" the commit of the code.
A `Run` is the folder of one experiment::

    run.json            command, config, seed, environment, hashes of data and model, wall seconds, results, and its
                        status: running, finished or failed
    metrics.jsonl       one line per step
    predictions.jsonl   one line per example
    *.json              other files that the experiment saves, such as its masks
"""

import ctypes
import hashlib
import json
import math
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, cached_property
from importlib import metadata
from pathlib import Path
from typing import Any, Self

PACKAGES = ("bertlite", "torch", "transformers", "accelerate", "safetensors", "tokenizers", "huggingface_hub", "numpy")
RUN, METRICS, PREDICTIONS = "run.json", "metrics.jsonl", "predictions.jsonl"
ROOT = Path(__file__).resolve().parents[2]  # the checkout, if this is one
RESULTS = "scripts/results"  # the folder of the checkout's records


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
        warn_untraceable(self.facts)
        self.write_facts("running")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if kind is None:
            self.write_facts("finished")
        else:
            self.write_facts("failed", error=f"{kind.__name__}: {error}")

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


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read the objects of a .jsonl file; an incomplete last line, of a killed process, is skipped."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines(True) if line.endswith("\n")]


def sha256(part: str | bytes | memoryview | Path) -> str:
    """Return the SHA-256 of a text in UTF-8, of bytes or of a file's contents, in hexadecimal digits."""
    if isinstance(part, Path):
        with part.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    return hashlib.sha256(part.encode() if isinstance(part, str) else part).hexdigest()


def sha256_of(*parts: str | bytes | memoryview | Path) -> str:
    """Return one hash of several texts, bytes and files, in this order: the SHA-256 of their SHA-256s."""
    return sha256(b"".join(bytes.fromhex(sha256(part)) for part in parts))


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Return the median of two or more values, and the quartiles "low" and "high"."""
    low, median, high = statistics.quantiles(values, n=4)
    return {"low": low, "median": median, "high": high}


def program_name() -> str:
    """Return the name that this program was started by."""
    path = Path(sys.argv[0])
    return path.parent.name if path.name == "__main__.py" else path.name


def run_git(*words: str) -> str:
    """Return the output of a git command, run in the checkout of this package.

    Raises:
        OSError, subprocess.CalledProcessError: git is not installed, this is not a checkout, or the command fails.
    """
    return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=True).stdout


def git_state() -> dict[str, Any] | None:
    """Return the commit that this package is checked out at, and whether any file differs from it ("dirty").

    Records in scripts/results do not count, or the second of two new records would always be dirty.  Outside a
    checkout, such as in an installed package, it is the commit that BERTLITE_COMMIT names, or None.
    """
    named = os.environ.get("BERTLITE_COMMIT")  # set for an archive, which has no git
    outside = {"commit": named, "dirty": False} if named else None
    try:
        if Path(run_git("rev-parse", "--show-toplevel").rstrip("\n")).resolve() != ROOT:
            return outside  # installed in a folder of another repository
        changed = run_git("status", "--porcelain", "--", ".", f":(exclude){RESULTS}")
        return {"commit": run_git("rev-parse", "HEAD").strip(), "dirty": bool(changed.strip())}
    except (OSError, subprocess.CalledProcessError):
        return outside


def commit_of(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the "commit" that a record was made from, and whether its tree was "dirty"; None if it names none.

    Older records and runs have it outside the environment.
    """
    found: dict[str, Any] | None = record.get("environment", {}).get("git") or record.get("git")
    return found


# variables that keep torch, oneDNN, MKL and the native kernels from a processor's newer instructions
LIMITS = (
    "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "BERTLITE_NATIVE",
)  # fmt: skip


def peak_memory() -> int | None:
    """Return the most bytes of memory that this process has had; None if the system does not say."""
    try:
        import resource
    except ModuleNotFoundError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def release_memory() -> None:
    """Give freed memory back to the system; glibc would keep it in the gaps between blocks in use."""
    with suppress(AttributeError, OSError, TypeError):  # other C libraries
        ctypes.CDLL(None).malloc_trim(0)


def map_large_blocks(size: int = 2**20) -> None:
    """Let glibc map each block of this size or more on its own: a freed one goes back to the system at once."""
    with suppress(AttributeError, OSError, TypeError):  # other C libraries
        ctypes.CDLL(None).mallopt(-3, size)  # M_MMAP_THRESHOLD


def environment(device: str = "cpu") -> dict[str, Any]:
    """Return the machine, the versions and the commit that a figure is measured with; JSON-ready."""
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
        "git": git_state(),
    }
    if limited := {name: os.environ[name] for name in LIMITS if name in os.environ}:
        facts["limits"] = limited
    if device.startswith("cuda"):
        memory = torch.cuda.get_device_properties(device).total_memory
        facts |= {
            "gpu": torch.cuda.get_device_name(device),
            "gpu_memory": memory,
            "cuda": torch.version.cuda,
            "driver": nvidia_driver(),
        }
    return facts


def nvidia_driver() -> str | None:
    """Return the version of NVIDIA's driver; None if nvidia-smi is missing."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


def version_of(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    """Return the processor's name with its vector extensions; virtual machines often hide the name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines) if value}
    wanted = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "asimd")
    has = [flag for flag in wanted if flag in (facts.get("flags") or facts.get("Features") or "").split()]
    return f"{facts.get('model name', platform.processor())} ({' '.join(has)})"


def write_record(path: str | Path, record: Mapping[str, Any]) -> None:
    """Write a record, which has an "environment"; print a warning if it cannot be traced to a commit.

    Raises:
        KeyError: the record has no environment.
    """
    warn_untraceable({"environment": record["environment"]})
    write_json(path, record)


def warn_untraceable(record: Mapping[str, Any]) -> None:
    """Print a warning on standard error if a record's code is neither committed nor an installed version."""
    found = commit_of(record)
    if found is None:
        if (ROOT / "pyproject.toml").exists():  # or else it is installed, and the record names the version
            print_warning("this record names no commit, since the code is not in a git checkout")
    elif found["dirty"]:
        print_warning("this record cannot be traced: files differ from the commit that it names; commit first")


@cache  # a sweep warns once, not at every run
def print_warning(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr)


def to_json(value: Any, **options: Any) -> str:
    """Return a value as JSON, with null for nan and infinities; options go to json.dumps."""
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError:
        return json.dumps(finite_or_none(value), allow_nan=False, **options)


def finite_or_none(value: Any) -> Any:
    """Return a value with None for numbers that are not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: finite_or_none(each) for name, each in value.items()}
    return [finite_or_none(each) for each in value] if isinstance(value, list | tuple) else value


def write_json(path: str | Path, value: Any) -> None:
    """Write a JSON file atomically; see `to_json`."""
    write_text(path, to_json(value, indent=1) + "\n")


def write_text(path: str | Path, text: str) -> None:
    """Write a text file atomically."""
    write_bytes(path, text.encode())


def write_bytes(path: str | Path, content: bytes) -> None:
    """Write a file atomically."""
    path = Path(path).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    with naming(path):
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock a folder against other commands that write to it; a process that is killed loses its lock.

    The locked file, `.NAME.lock` next to the folder, says who holds it.

    Raises:
        BlockingIOError: another process holds it; the message says which.
        OSError: nothing can be written there.
    """
    import fcntl  # which Windows lacks

    folder = folder.expanduser().absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    path = folder.parent / f".{folder.name}.lock"
    with path.open("a+", encoding="utf-8", errors="backslashreplace") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not (path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())):
                raise BlockingIOError  # its holder has just removed it
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise BlockingIOError(f"{holder} is writing to {folder}: wait for it, or name another folder") from None
        file.truncate(0)
        file.write(f"process {os.getpid()} ({shlex.join([program_name(), *sys.argv[1:]])})")
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def check_is_folder(folder: Path) -> None:
    """Raise NotADirectoryError if a folder to write is a file."""
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file: name a folder to write")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name this path in errors of the system that name a temporary file, `.NAME.…`, or no file, as for a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is None or (error.filename is not None and f".{path.name}." not in str(error)):
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from None
