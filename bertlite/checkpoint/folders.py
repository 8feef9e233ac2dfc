"""Replace a folder in one step, so that a reader finds the old one or the new one, never a mixture.

Before its work each writer asks `check_output`, so that it replaces neither its inputs nor files of another kind.
"""

import ctypes
import errno
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bertlite.support.files import check_is_folder, naming

EVERYTHING = re.compile(r"(?s:.*)")  # for a writer that empties the folder
RECORD = re.compile(
    rb'\s*(\{\s*"what": "bertlite|<!doctype html>.*<title>Attention: |$)', re.DOTALL
)  # begins such a file
LAST = "config.json"  # written last: a folder without it is not a checkpoint


def check_output(folder: str | os.PathLike[str], written: re.Pattern[str], *inputs: object, own: bool) -> None:
    """Check that a writer may replace and remove files of a folder.

    Args:
        written: the names of the entries that the writer replaces or removes.
        inputs: paths that it reads; hub ids and data in memory do not count.
        own: whether an earlier call of the same writer wrote such entries; else there must be none.

    Raises:
        ValueError: an entry was written for another purpose, or an input is the folder or in such an entry.
    """
    folder = Path(folder).expanduser().resolve()
    there = [path for path in sorted(folder.iterdir()) if written.fullmatch(path.name)] if folder.is_dir() else []
    if folder.exists() and any(map(folder.samefile, existing(inputs))):
        there = [folder]
    elif there and not own:
        raise ValueError(f"{folder} holds {there[0].name}, which is of another kind: name another folder to write")
    check_kept(there, *inputs, own=own)


def check_file_output(path: Path, *inputs: object) -> None:
    """Check that a command may write a record or a page to a file; see `check_kept`.

    Raises:
        ValueError: the file has other contents, or it is one of the inputs.
    """
    if path.is_file():
        with path.open("rb") as file:
            if not RECORD.match(file.read(4096)):
                raise ValueError(f"{path} is no record or page of bertlite's: delete it, or name another output")
    check_kept([path], *inputs)


def check_kept(replaced: Iterable[Path], *inputs: object, own: bool = False) -> None:
    """Check that no path to replace is an input, holds one or, unless it is the writer's own, lies in one.

    Raises:
        ValueError: one does, or it lies in the hub's cache, whose files belong to all programs.
    """
    for path in filter(Path.exists, replaced):
        if allowed_root(path.parent) != path.parent.resolve():
            raise ValueError(f"{path} lies in the hub's cache and would be replaced: name another output")
        for given in existing(inputs):  # compared as files, not by their names
            if lies_in(given, path) or (not own and lies_in(path, given)):
                raise ValueError(f"{path} would be replaced, and {given} is read: name another output")


def existing(inputs: Iterable[object]) -> list[Path]:
    """Return the inputs that are paths which exist."""
    paths = [Path(os.path.expanduser(each)) for each in inputs if isinstance(each, str | os.PathLike)]
    return [path for path in paths if os.path.exists(path)]  # unlike Path.exists, False for any odd name


def lies_in(path: Path, folder: Path) -> bool:
    """Return whether an existing path is another one or lies in it."""
    path = path.resolve()
    return any(map(folder.samefile, (path, *path.parents)))


def allowed_root(folder: Path) -> Path:
    """Return the folder that links must not leave: the folder itself or, as its files are links, the hub's cache."""
    for parent in folder.resolve().parents:
        if parent.name == "snapshots" and parent.parent.name.startswith("models--"):
            return parent.parent.parent
    return folder.resolve()


@contextmanager
def replacing(folder: Path, superseded: re.Pattern[str]) -> Iterator[Path]:
    """Make a folder to write into, which becomes `folder` in one step when the block ends; an error changes nothing.

    Other files of the old folder are kept, except those whose whole name matches `superseded`.  A killed process
    leaves a hidden folder, `.NAME.….new`, which nothing reads and anyone may delete.  Linux exchanges two folders at
    once (renameat2).  Elsewhere two renames are used, and a process killed between them leaves the old folder as
    `.NAME.….new.old`.

    The working directory and the folders above it are not replaced, or a shell there would be left in a deleted
    folder.  Their files are replaced one after another, config.json last.  A process killed between these renames
    leaves a folder without config.json, which nothing loads, and the remaining new files in `.NAME.….new`.  Another
    process whose working directory was replaced stays in the old folder.

    Raises:
        ValueError: the folder is a mount point, which cannot be replaced.
        OSError: it is a file, or it or the folder above it cannot be written.
    """
    folder = folder.expanduser().resolve()
    if os.path.ismount(folder):
        raise ValueError(
            f"{folder} is a mount point, which cannot be replaced in one step: save to a folder inside it"
        )

    # Errors of permission come first: after the work they would cost it.
    check_is_folder(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    for place in (folder.parent, folder):
        if place.exists() and not os.access(place, os.W_OK):
            raise PermissionError(f"{folder} cannot be replaced: {place} is not writable")

    new = folder.with_name(f".{folder.name[:100]}.{uuid.uuid4().hex}.new")
    try:
        with naming(folder):
            new.mkdir()

        # The files must be on the disk before a name points to them.
        yield new
        for path in (*new.iterdir(), new):
            sync(path)

        stays = is_at_or_above_cwd(folder)
        if not stays:
            if folder.exists():
                carry(folder, new, superseded)
                shutil.copystat(folder, new)
            swap(new, folder, superseded)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise

    # A folder that a shell is in is filled in place, outside the handler: from here on nothing can be undone.
    if stays:
        fill(new, folder, superseded)


def is_at_or_above_cwd(folder: Path) -> bool:
    try:
        return Path.cwd().is_relative_to(folder)
    except FileNotFoundError:  # the working directory is gone
        return False


def fill(new: Path, folder: Path, superseded: re.Pattern[str]) -> None:
    """Move the entries of `new` into `folder`, one by one, and remove `new`."""
    names = sorted((path.name for path in new.iterdir()), key=lambda name: name == LAST)
    if LAST in names:
        remove(folder / LAST)
    for path in folder.iterdir():
        if superseded.fullmatch(path.name) and path.name not in names:
            remove(path)
    for name in names:
        if (folder / name).is_dir() or (new / name).is_dir():  # a rename cannot replace it
            remove(folder / name)
        os.replace(new / name, folder / name)
    new.rmdir()
    sync(folder)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def swap(new: Path, folder: Path, superseded: re.Pattern[str]) -> None:
    """Replace `folder` by `new`."""
    try:
        os.rename(new, folder)  # works if there is no folder, or an empty one
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        exchange(new, folder)
        carry(new, folder, superseded)  # files added in the meantime
        shutil.rmtree(new, ignore_errors=True)
    sync(folder.parent)


def exchange(a: Path, b: Path) -> None:
    """Exchange two folders."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is not None:
        here, exchanging = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
        if renameat2(here, os.fsencode(a), here, os.fsencode(b), exchanging) == 0:
            return
        number = ctypes.get_errno()
        if number not in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):  # errors of a disk that cannot exchange
            raise OSError(number, os.strerror(number), str(b))

    # Two renames: if the second fails, the first is undone.
    aside = a.with_name(f"{a.name}.old")
    os.rename(b, aside)
    try:
        os.rename(a, b)
    except BaseException:
        os.rename(aside, b)
        raise
    os.rename(aside, a)


def carry(old: Path, new: Path, superseded: re.Pattern[str]) -> None:
    """Link the contents of a folder into another one, except superseded files and names that it has already."""
    for path in old.iterdir():
        target = new / path.name
        if superseded.fullmatch(path.name) or os.path.lexists(target):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, target, symlinks=True, copy_function=link)
        else:
            link(path, target)


def link(path: str | Path, target: str | Path) -> None:
    try:
        os.link(path, target, follow_symlinks=False)
    except (OSError, NotImplementedError):  # not every disk has hard links
        shutil.copy2(path, target, follow_symlinks=False)


def sync(path: Path) -> None:
    """Wait until the disk holds the written data: a rename must not get there first."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
