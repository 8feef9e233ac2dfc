"""Errors about checkpoints: all faults of a file at once, or damage to the file itself."""

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
        raise ValueError(f"{path} is not UTF-8, so that weights cannot be read or written there: rename it") from None
