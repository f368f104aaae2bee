"""How commands speak of what went wrong: one line on stderr that names the option, exit code 2 for bad usage."""

from __future__ import annotations

import argparse
import reprlib
from collections.abc import Callable
from typing import Any, NoReturn

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80
_short.maxlong = 30


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that leaves the usage text to --help."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def whole_number(least: int, most: int) -> Callable[[str], int]:
    """The `type=` of an option that takes an integer from `least` to `most`."""

    def convert(text: str) -> int:
        if not text.isdecimal() or len(text) > 4000 or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{shown(text)} is not a whole number from {least} to {most}")
        return int(text)

    return convert


def out_of_range(key: str, value: float, least: float, most: float) -> str | None:
    """What is wrong with a number that has to lie between two others, themselves included; None: nothing."""
    if least <= value <= most:
        return None
    limit = f"at most {most}" if value > most else f"at least {least}"
    return f"{key}: must be {limit}, got {shown(value)}"


def shown(value: Any) -> str:
    """A value as a message shows it: as in Python, but never longer than a line, however large or deep it is."""
    try:
        return _short.repr(value)
    except ValueError:  # Python writes no number of more than 4300 digits
        return "a number of thousands of digits"


def one_line(error: BaseException) -> str:
    """The message of an exception without line breaks; its type where it has no message."""
    return " ".join(str(error).split()) or type(error).__name__


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, where the others are advice for programmers."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
