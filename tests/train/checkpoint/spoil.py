"""Ways to die while a checkpoint is written and to damage one, and what a directory holds."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from thinwire.train.checkpoint.manifest import checksum


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def tree(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def die_before(owner: Any, name: str) -> None:
    setattr(owner, name, lambda *args, **options: die())


def die_after(owner: Any, name: str) -> None:
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **options: (original(*args, **options), die()))


def flip_a_byte(directory: Path) -> dict[str, bytes]:
    path = sorted(directory.glob("*.safetensors"))[-1]
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    return tree(directory)


def truncate(directory: Path) -> None:
    path = sorted(directory.glob("*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:-100])


def rewrite_manifest(directory: Path, **changes: Any) -> None:
    """Change a manifest as one that knows its checksum would."""
    path = directory / "manifest.json"
    content = json.loads(path.read_text()) | changes
    del content["sha256"]
    path.write_text(json.dumps(content | {"sha256": checksum(content)}))
