"""Send a terminal no control characters from names in files, and only characters that it knows."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import Any

CONTROLS = "\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff"  # and marks that reverse a line, and surrogates
DRAWING = re.compile(r"(?:\x1b\[A)+\Z|\r(?:\x1b\[K)?(?: *\r)?")  # how bars move the cursor before they write
PLAIN = {ord("\N{EN DASH}"): "-", ord("\N{HORIZONTAL ELLIPSIS}"): "..."}  # for terminals that lack these


def printable(text: object, but: str = "") -> str:
    """Return a text with JSON's escapes, such as \\u001b, for control characters that are not in `but`."""
    return re.sub(f"[{CONTROLS}]", lambda c: c[0] if c[0] in but else f"\\u{ord(c[0]):04x}", str(text))


class Screen:
    """A stream that shows control characters, and characters that its encoding lacks, as escapes."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        drawing = DRAWING.match(text)
        start = drawing[0] if drawing else ""
        shown = start + printable(text[len(start) :], but="\n\t")
        encoding = getattr(self.stream, "encoding", None) or "utf-8"
        try:
            shown.encode(encoding)
        except UnicodeEncodeError:
            shown = shown.translate(PLAIN).encode(encoding, "backslashreplace").decode(encoding)
        self.stream.write(shown)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def screens() -> Iterator[None]:
    """Print on screens; drop the output of a closed stream."""
    with ExitStack() as stack:
        for stream, redirect in ((sys.stdout, redirect_stdout), (sys.stderr, redirect_stderr)):
            if stream is None:  # take its number, or C code would write into the next file that is opened
                stream = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")
            stack.enter_context(redirect(Screen(stream)))
        yield
