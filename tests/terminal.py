"""Run a command of bertlite on a pseudo-terminal, in this process."""

import _thread
import fcntl
import os
import pty
import re
import struct
import termios
import threading
from contextlib import redirect_stderr, redirect_stdout

from bertlite.cli import main

COLUMNS, LINES = 100, 40


def on_terminal(*words: str, interrupt: str = "") -> tuple[object, str]:
    """Return the exit status of a command and what the terminal was sent.

    Args:
        interrupt: a pattern; when the terminal has shown it, Ctrl-C is typed.
    """
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    output = b""

    def read() -> None:
        nonlocal output
        typed = False
        while True:
            try:
                part = os.read(reader, 65536)
            except OSError:  # Linux says so when a terminal is closed
                return
            output += part
            if interrupt and not typed and re.search(interrupt.encode(), output):
                typed = True
                _thread.interrupt_main()

    screen = threading.Thread(target=read)
    screen.start()
    status: object = None
    try:
        with open(writer, "w", buffering=1) as terminal, redirect_stdout(terminal), redirect_stderr(terminal):
            try:
                status = main(words)
            except SystemExit as end:
                status = end.code
    finally:
        screen.join()
        os.close(reader)
    return status, output.decode()
