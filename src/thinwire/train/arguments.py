"""From a TOML file and flags to a `TrainConfig`, and back to TOML.

    defaults  <-  --config FILE.toml, or the config.toml of the run to resume  <-  --key value flags

The same keys everywhere: `[data] sequence_length = 512` in the file is `--data.sequence-length 512`. An unknown
key, a wrong type or a missing file is a `ConfigError` of one line that names the key.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import tomllib
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from thinwire.train.config import ConfigError, TrainConfig
from thinwire.train.output import CONFIG, started
from thinwire.usage import first_line, shown

T = TypeVar("T")

DESCRIPTION = """Train a language model on several workers, averaging over a thin wire.

Also: --config FILE.toml reads a configuration file, which the flags below override; --print-config prints the
resulting configuration as TOML and stops; --debug shows tracebacks. --resume --out DIR takes up the settings of
the run in DIR; flags given with it override them."""


@dataclass(frozen=True)
class Arguments:
    config: TrainConfig
    """The job."""
    print_config: bool = False
    """Only print the configuration."""
    debug: bool = False
    """Show tracebacks of expected errors too."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def parse(argv: Sequence[str]) -> Arguments:
    """The configuration that the command line asks for; not yet checked."""
    for word in argv:
        if not _is_utf8(word):
            raise ConfigError(f"{shown(word)} is not UTF-8, which config.toml and logs are written in")
    first = _Parser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", type=Path)
    first.add_argument("--print-config", action="store_true")
    first.add_argument("--debug", action="store_true")
    own, rest = first.parse_known_args(list(argv))
    path = own.config or _config_of_resumed(rest)
    config = TrainConfig() if path is None else read_toml(path)
    return Arguments(_override(config, rest), own.print_config, own.debug)


def _is_utf8(word: str) -> bool:
    try:
        word.encode()
    except UnicodeEncodeError:  # Python passes other bytes on as lone surrogates
        return False
    return True


def _config_of_resumed(flags: Sequence[str]) -> Path | None:
    """`--resume --out DIR` takes up the settings that the run in DIR was started with; never just the defaults.

    It is the first file that a run writes, so where a run has begun and it is not there, it was lost.
    """
    look = _Parser(add_help=False, allow_abbrev=False)
    look.add_argument("--resume", action="store_true")
    look.add_argument("--out", type=Path)
    found, _ = look.parse_known_args(list(flags))
    if not found.resume or found.out is None or not started(found.out):
        return None
    path: Path = found.out / CONFIG
    if not path.is_file() or not path.stat().st_size:
        raise ConfigError(
            f"resume: {path} is {'empty' if path.is_file() else 'missing'}, so the settings of this run are not "
            "known; give them with --config FILE"
        )
    return path


def read_toml(path: Path) -> TrainConfig:
    """The configuration in a file; keys that it leaves out have their defaults."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config: cannot read {path}: {error}") from error
    except (ValueError, RecursionError) as error:  # of a number too long or tables too deep, as Python puts it
        raise ConfigError(f"config: {path} is not valid TOML: {first_line(error)}") from error
    return from_table(TrainConfig, table, where=str(path))


def to_toml(config: TrainConfig) -> str:
    """The configuration as a file that `--config` reads back to an equal one."""
    import tomli_w

    return tomli_w.dumps(to_table(config))


def to_table(value: Any) -> Any:
    """A configuration as nested dicts, lists and plain values; what is not set (None) is left out."""
    if is_dataclass(value):
        items = ((f.name, getattr(value, f.name)) for f in fields(value))
        return {name: to_table(item) for name, item in items if item is not None}
    if isinstance(value, tuple):
        return [to_table(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def from_table(cls: type[T], table: Mapping[str, Any], *, where: str, prefix: str = "") -> T:
    """Build a configuration dataclass from nested dicts, strictly: every key known, every type right."""
    hints = get_type_hints(cls)
    for key in table:
        if key not in hints:
            close = difflib.get_close_matches(key, hints, n=1)
            hint = f"did you mean {prefix}{close[0]}?" if close else f"known here: {', '.join(sorted(hints))}"
            raise ConfigError(f"{prefix}{key}: unknown key in {where}; {hint}")
    values = {key: _convert(item, hints[key], key=f"{prefix}{key}", where=where) for key, item in table.items()}
    return cls(**values)


def _convert(value: Any, kind: Any, *, key: str, where: str) -> Any:
    """A TOML value as the declared type."""
    if is_dataclass(kind) and isinstance(kind, type) and isinstance(value, dict):
        return from_table(kind, value, where=where, prefix=f"{key}.")
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        kind = next(a for a in arguments if a is not types.NoneType)
        return _convert(value, kind, key=key, where=where)
    if origin is Literal:
        if value in arguments:
            return value
        known = ", ".join(map(str, arguments))
        raise ConfigError(f"{key}: expected one of {known}, got {shown(value)} in {where}")
    if origin is tuple and isinstance(value, list):
        return tuple(_convert(item, arguments[0], key=key, where=where) for item in value)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ConfigError(f"{key}: {shown(value)} in {where} is not a number that TOML can hold")
    if isinstance(value, str) and "\0" in value:
        raise ConfigError(f"{key}: {shown(value)} in {where} holds a zero byte")
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is Path and isinstance(value, str):
        return Path(value)
    if isinstance(kind, type) and isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    name = (
        "a table" if is_dataclass(kind) else "a list" if origin is tuple else getattr(kind, "__name__", str(kind))
    )
    raise ConfigError(f"{key}: expected {name}, got {shown(value)} in {where}")


def _override(config: TrainConfig, flags: Sequence[str]) -> TrainConfig:
    """The configuration with the flags applied by tyro, whose boxed complaints become one line."""
    import tyro

    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(
                TrainConfig, default=config, args=list(flags), prog="thinwire train", description=DESCRIPTION
            )
    except SystemExit as end:
        if end.code in (0, None):
            raise  # --help
        raise ConfigError(_one_line(complaint.getvalue())) from None


def _one_line(box: str) -> str:
    """The first section of tyro's box (drawn in Unicode or in ASCII) and, for an unknown flag, the likeliest."""
    sections: list[list[str]] = [[]]
    for row in box.splitlines():
        text = row.strip("│| ")
        if row.startswith(("╭", "╰")) or (text and not text.strip("─-")):
            sections.append([])
        elif text:
            sections[-1].append(text)
    if not box.startswith("╭"):
        del sections[0]  # in ASCII the title is a section of its own
    complaint, *others = [section for section in sections if section] or [["arguments not understood"]]
    offered = [row.split()[0].rstrip(",") for section in others for row in section if row.startswith("--")]
    words = " ".join(complaint)
    unknown = next((word.rstrip(",") for word in words.split() if word.startswith("--")), None)
    if not words.startswith("Unrecognized") or not offered or unknown is None:
        return words
    return f"{words} (did you mean {difflib.get_close_matches(unknown, offered, n=1, cutoff=0)[0]}?)"
