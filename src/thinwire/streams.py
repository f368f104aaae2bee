"""Standard streams that are closed or go away: `thinwire train >&-`, `| head`, a terminal that hangs up."""

from __future__ import annotations

import os
import sys
from typing import Any, TextIO


def open_closed_ones() -> None:
    """Put the null device in the place of a closed stream: else the next file or socket gets its number."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def is_read(stream: TextIO) -> bool:
    """Whether what was written there so far found a reader, or a place."""
    try:
        stream.flush()
    except OSError:
        return False
    return True


def discard(stream: TextIO) -> None:
    """Drop what is written there from now on, and what waits to be written: nobody reads it."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def end_progress_bar(stream: TextIO) -> None:
    """Erase the bar and show the cursor, which a killed process leaves hidden. Nothing where no bar was left."""
    if stream.isatty():
        stream.write("\r\x1b[K\x1b[?25h")
        stream.flush()


class Lasting:
    """A stream for telling what goes on, in a process that must outlive whoever listens."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            discard(self._stream)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            discard(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
