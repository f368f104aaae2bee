"""The manifest of a checkpoint directory: what it is, and the size and checksum of every file in it.

    {"format_version": 1, "step": 60, "world_size": 2, "torch_version": "...", "identity": {...},
     "numbers": {...}, "state": {...}, "model_config": {...}, "tokenizer": {...},
     "files": {"shard-00001-model-00001-of-00001.safetensors": {"bytes": 123, "sha256": "..."}},
     "sha256": "..."}

The last entry is the checksum of all others. The manifest is written last, so a directory that has one was
complete when it was written, and reading it is plain JSON. A directory becomes a checkpoint by one rename
(`commit`); before that it has a temporary name that no reader looks at, and a checkpoint that is to go gets such
a name again before its files are removed.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from thinwire.train.files import sha256, sync_directory, write_synced

JSON = Any  # None, bool, int, float, str, and lists and string-keyed dictionaries of these

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
_COMMITTED = re.compile(r"step-(\d{8,})(?:-(\d+))?")  # step-00000060; step-00000060-1 is its second writing
_TEMPORARY = ".unfinished-"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, read or used; one line that names the file or key."""


class Damaged(Exception):
    """This directory is not a usable checkpoint; the message names the file and what is wrong with it."""


@dataclass(frozen=True)
class Manifest:
    step: int
    world_size: int
    torch_version: str
    identity: dict[str, JSON]  # what the run is: a checkpoint of another run is refused
    numbers: dict[str, JSON]  # the trainer's own: position, tokens, skipped_steps, ...
    state: dict[str, JSON]  # what is not a tensor in the optimizer's and the link's state
    model_config: dict[str, JSON] | None  # the Hugging Face config, and
    tokenizer: dict[str, JSON] | None  # its name and fingerprint: for export
    files: dict[str, dict[str, JSON]] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    @property
    def model_type(self) -> str:
        return str((self.model_config or {}).get("model_type"))

    def write(self, directory: Path) -> None:
        content = {"format_version": self.format_version, **asdict(self)}
        write_synced(directory / MANIFEST, json.dumps({**content, "sha256": checksum(content)}, indent=1))

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Raises `Damaged` where there is none or it was changed, `CheckpointError` for a newer format."""
        path = directory / MANIFEST
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise Damaged(f"{MANIFEST} is missing") from None
        except (OSError, ValueError, RecursionError) as error:
            raise Damaged(f"{MANIFEST} cannot be read ({error})") from None
        if not isinstance(content, dict) or "sha256" not in content:
            raise Damaged(f"{MANIFEST} is not one of a checkpoint (it has no checksum)")
        if content.pop("sha256") != checksum(content):
            raise Damaged(f"{MANIFEST} has another checksum than when it was written")
        version = content.get("format_version")
        if isinstance(version, int) and version > FORMAT_VERSION:
            raise CheckpointError(
                f"{path} has format_version {version}, this thinwire reads up to {FORMAT_VERSION}: use a newer one"
            )
        try:
            manifest = cls(**content)
            manifest._check_types()
            sizes = [
                (str(name), int(entry["bytes"]), str(entry["sha256"])) for name, entry in manifest.files.items()
            ]
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise Damaged(f"{MANIFEST} is not one of a checkpoint ({error})") from None
        if version != FORMAT_VERSION or not sizes or any(Path(name).name != name for name, _, _ in sizes):
            raise Damaged(f"{MANIFEST} is not one of a checkpoint (format_version {version}, {len(sizes)} files)")
        named = _COMMITTED.fullmatch(directory.name)  # a copy to export from may have any name
        if named and int(named[1]) != manifest.step:
            raise Damaged(f"{MANIFEST} is of step {manifest.step}, its directory is not")
        return manifest

    def _check_types(self) -> None:
        """Raise TypeError, naming the entry, where one is of another type than `write` writes."""
        for key in ("step", "world_size"):
            if type(getattr(self, key)) is not int:
                raise TypeError(f"{key} is no whole number")
        for key in ("identity", "numbers", "state", "model_config", "tokenizer", "files"):
            absent = key in ("model_config", "tokenizer") and getattr(self, key) is None
            if not absent and not isinstance(getattr(self, key), dict):
                raise TypeError(f"{key} is no table")

    def verify(self, directory: Path, *, part: int = 0, parts: int = 1) -> None:
        """Raise `Damaged` unless every file is there with its size, and every `parts`-th has its checksum."""
        present = {path.name for path in directory.glob("*.safetensors")}
        for name in sorted(present - set(self.files)):
            raise Damaged(f"{name} is not in {MANIFEST}")
        for number, (name, entry) in enumerate(sorted(self.files.items())):
            try:
                size = (directory / name).stat().st_size
                if size != entry["bytes"]:
                    raise Damaged(f"{name} has {size} bytes instead of {entry['bytes']}")
                if number % parts == part and sha256(directory / name) != entry["sha256"]:
                    raise Damaged(f"{name} has another checksum than when it was written")
            except FileNotFoundError:
                raise Damaged(f"{name} is missing") from None
            except OSError as error:
                raise Damaged(f"{name} cannot be read ({error})") from None


def checksum(content: Mapping[str, JSON]) -> str:
    """sha256 of a manifest without its own checksum, however it is laid out: keys sorted, no white space."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def differences(saved: JSON, present: JSON, key: str = "") -> list[str]:
    """`key: saved X, now Y` for every leaf in which two JSON values differ."""
    if isinstance(saved, Mapping) and isinstance(present, Mapping):
        names = [*saved, *(name for name in present if name not in saved)]
        return [
            line
            for name in names
            for line in differences(
                saved.get(name, "(absent)"),
                present.get(name, "(absent)"),
                f"{key}.{name}" if key else str(name),
            )
        ]
    return [] if saved == present else [f"{key}: saved {saved!r}, now {present!r}"]


# -- directories -------------------------------------------------------------------------------------------


def order(directory: Path) -> tuple[int, int]:
    """(step, writing) of a committed checkpoint directory."""
    match = _COMMITTED.fullmatch(directory.name)
    if match is None:
        raise ValueError(f"{directory} is not named like a checkpoint (step-00000060)")
    return int(match[1]), int(match[2] or 0)


def checkpoints_in(directory: Path) -> list[Path]:
    """The committed checkpoints under `directory`, newest first, not verified.

    A run that does not resume should refuse a directory where this is not empty: a later resume would take
    the other run's.
    """
    if not directory.is_dir():
        return []
    found = [path for path in directory.iterdir() if _COMMITTED.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=order, reverse=True)


def temporary(directory: Path, step: int) -> Path:
    return directory / f"{_TEMPORARY}step-{step:08d}"


def commit(written: Path, step: int) -> Path:
    """Give a complete directory its final name: the one instant at which it becomes a checkpoint."""
    directory = written.parent
    sync_directory(written)
    taken = [order(path)[1] for path in checkpoints_in(directory) if order(path)[0] == step]
    # A checkpoint of this step is there already when a run fell back past it: it is not touched.
    suffix = f"-{max(taken) + 1}" if taken else ""
    final = directory / f"step-{step:08d}{suffix}"
    written.rename(final)
    sync_directory(directory)
    sync_directory(directory.parent)
    return final


def remove(checkpoint: Path) -> None:
    """Remove a committed checkpoint so that a kill in between leaves no half of one."""
    doomed = checkpoint.parent / f"{_TEMPORARY}removed-{checkpoint.name}"
    checkpoint.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def sweep(directory: Path) -> None:
    """Remove what an earlier kill left half written or half removed."""
    for path in directory.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(path, ignore_errors=True)
