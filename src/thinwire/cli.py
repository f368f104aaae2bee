"""The `thinwire` command: a table of commands, each a function that is imported when it is called.

Exit codes: 0 fine, 2 bad usage or configuration (one line that names the key), 1 anything else.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from thinwire import streams
from thinwire.usage import one_line

COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("thinwire.train.command:main", "train a language model, or continue a run"),
    "tokenize": ("thinwire.train.data.tokenize:main", "turn text into memory-mapped token shards"),
    "export": ("thinwire.train.checkpoint.export:main", "a checkpoint as a plain Hugging Face model directory"),
    "recipes": ("thinwire.recipes.table:main", "the methods: what each sends, and its paper"),
    "bench": ("thinwire.bench:main", "measure formats, collectives and recipes on this machine"),
    "doctor": ("thinwire.doctor:main", "check this machine: backends, interfaces, links"),
}

# Command -> the extra that it needs, where that is not installed.
EXTRAS = {"train": "train", "tokenize": "train", "export": "train"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    streams.open_closed_ones()
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # `thinwire recipes | head -1`: the reader has what it wanted
        streams.discard(sys.stdout)
        return 1
    except OSError as error:  # a full disk
        streams.discard(sys.stdout)
        return _complain("thinwire", f"cannot write to standard output: {error.strerror or error}", 1)


def _run(arguments: list[str]) -> int:
    """The command that these words name."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from importlib.metadata import version

        print(f"thinwire {version('thinwire')}")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        return _complain("thinwire", f"there is no command {name!r}; there are {', '.join(COMMANDS)}", 2)
    module, _, function = COMMANDS[name][0].partition(":")
    try:
        code: int = getattr(importlib.import_module(module), function)(rest)
        return code
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if name not in EXTRAS or missing in ("thinwire", "torch", ""):
            raise
        extra = EXTRAS[name]
        return _complain("thinwire", f"{name} needs the extra: pip install 'thinwire[{extra}]' (no {missing})", 2)
    except KeyboardInterrupt:
        return _complain(f"thinwire {name}", "interrupted", 1)
    except (RuntimeError, OSError) as error:
        if isinstance(error, OSError) and not streams.is_read(sys.stdout):
            raise
        if "--debug" in rest or not _one_line_is_enough(error):
            traceback.print_exc()
        return _complain(f"thinwire {name}", one_line(error), 1)


def usage() -> str:
    """The help text."""
    width = max(map(len, COMMANDS))
    rows = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    head = ["thinwire COMMAND [OPTIONS]", "", "Train large models over thin wires.", ""]
    return "\n".join([*head, *rows, "", "`thinwire COMMAND --help` explains a command."])


def _one_line_is_enough(error: BaseException) -> bool:
    """The machine's own errors, and those that thinwire raised on purpose, need no traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    own = str(Path(__file__).parent)
    return isinstance(error, OSError) or (bool(frames) and frames[-1].filename.startswith(own))


def _complain(who: str, message: str, code: int) -> int:
    print(f"{who}: {message}", file=sys.stderr)
    return code
