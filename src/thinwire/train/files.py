"""Files that a kill or a power cut leaves whole: written beside their place, synced, put there by one rename."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def replace(path: Path, text: str) -> None:
    """Write a file that is at every instant either the old one or the whole new one."""
    temporary = path.with_name(path.name + ".tmp")
    write_synced(temporary, text)
    os.replace(temporary, path)
    sync_directory(path.parent)


def write_synced(path: Path, text: str) -> None:
    """Write a file and wait until it is on the disk."""
    with path.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def sync_directory(directory: Path) -> None:
    """Wait until the names in a directory are on the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """The checksum of a file's bytes, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
