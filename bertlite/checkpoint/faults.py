"""Errors about checkpoints: all faults of a file at once, or damage to the file itself."""

import sys
from collections.abc import Sequence
from pathlib import Path

from bertlite.support.screen import printable

MOST_SHOWN = 20  # the most faults, or names of files, in a message


def raise_faults(title: str, faults: Sequence[str]) -> None:
    """Raise ValueError if there are faults; the message lists them, or the first of very many."""
    if faults:
        more = [f"… and {len(faults) - MOST_SHOWN} more"] if len(faults) > MOST_SHOWN else []
        raise ValueError("\n  ".join(map(printable, [title, *faults[:MOST_SHOWN], *more])))


def damaged_file(path: Path, error: Exception) -> ValueError:
    reason = f"{type(error).__name__}: {error}".partition("\n")[0]
    return ValueError(f"{path} is damaged or cut short ({reason}): fetch it again")


def check_utf8(path: Path) -> None:
    """Raise ValueError for a path that is not UTF-8: the libraries that read and write weights cannot open it."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        fault, way_out = "UTF-8", "rename it"
        if (reads := sys.getfilesystemencoding()) != "utf-8":  # the locale's, unless Python is told to read UTF-8
            fault, way_out = f"{reads}, as this Python reads it", "set PYTHONUTF8=1 or rename it"
        message = f"{path} is not {fault}, so that weights cannot be read or written there: {way_out}"
        raise ValueError(message) from None
