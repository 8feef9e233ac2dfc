"""The memory of this process: its peak, and blocks given back to the system."""

import ctypes
import sys
from contextlib import suppress


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


def map_large_blocks(size: int = 2**24) -> None:
    """Let glibc map each block of this size or more on its own: a freed one goes back to the system at once.

    A mapped block costs time, since the system clears it: states of a batch should be smaller.
    """
    with suppress(AttributeError, OSError, TypeError):  # other C libraries
        ctypes.CDLL(None).mallopt(-3, size)  # M_MMAP_THRESHOLD
