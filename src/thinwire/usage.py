"""How commands refuse bad usage: one line on stderr that names the option, exit code 2."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that leaves the usage text to --help."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def whole_number(least: int, most: int) -> Callable[[str], int]:
    """The `type=` of an option that takes an integer from `least` to `most`."""

    def convert(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to {most}")
        return int(text)

    return convert
