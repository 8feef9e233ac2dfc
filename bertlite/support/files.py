"""Files written atomically, JSON without nan, hashes, and the lock of a folder."""

import hashlib
import json
import math
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


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


def program_name() -> str:
    """Return the name that this program was started by."""
    path = Path(sys.argv[0])
    return path.parent.name if path.name == "__main__.py" else path.name


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

    # The lock stands next to the folder, which may itself be replaced meanwhile.
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

        # Whoever is refused reads here who holds the lock.
        file.truncate(0)
        file.write(f"process {os.getpid()} ({shlex.join([program_name(), *sys.argv[1:]])})")
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def check_is_folder(folder: Path) -> None:
    """Raise NotADirectoryError if a folder to write is a file, or would be in one."""
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not there.is_dir():
        raise NotADirectoryError(f"{there} is a file: name a folder to write")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name this path in errors of the system that name a temporary file, `.NAME.…`, or no file, as for a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is None or (error.filename is not None and f".{path.name}." not in str(error)):
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from None
