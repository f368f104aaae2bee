"""What was damaged on the disk is named, skipped and left alone; nothing in it is executed."""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks import run_ranks
from tests.train.checkpoint.spoil import flip_a_byte, names, rewrite_manifest, tree, truncate
from tests.train.small_run import content, fresh, load, save_steps
from thinwire.train.checkpoint.checkpointer import Checkpointer, CheckpointError
from thinwire.train.checkpoint.manifest import Damaged, Manifest
from thinwire.train.files import sha256

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_after_falling_back_the_damaged_one_is_neither_overwritten_nor_counted(tmp_path: Path) -> None:
    save_steps(tmp_path, [1, 2, 3], keep=3)
    damaged = flip_a_byte(tmp_path / "step-00000003")
    state = fresh()
    checkpointer = Checkpointer(tmp_path, keep=2)
    assert checkpointer.load_latest(state) == 2
    checkpointer.save(3, state)
    checkpointer.wait()
    assert names(tmp_path) == ["step-00000002", "step-00000003", "step-00000003-1"]
    assert tree(tmp_path / "step-00000003") == damaged
    assert load(tmp_path) == (3, content(state))
    checkpointer.save(4, state)
    checkpointer.wait()
    assert names(tmp_path) == ["step-00000003-1", "step-00000004"]


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a flipped bit": (flip_a_byte, r"shard-00002-model-00001-of-00001.safetensors has another checksum"),
    "a truncated file": (truncate, r"shard-00001-\S+ has \d+ bytes instead of \d+"),
    "a lost file": (lambda d: sorted(d.glob("*.safetensors"))[1].unlink(), r"shard-00002-\S+ is missing"),
    "a file too many": (lambda d: shutil.copy(*_twin(d)), r"shard-00009.safetensors is not in manifest.json"),
    "no manifest": (lambda d: (d / "manifest.json").unlink(), r"manifest.json is missing"),
    "half a manifest": (lambda d: _halve(d / "manifest.json"), r"manifest.json cannot be read \(.*\)"),
    "an empty manifest": (
        lambda d: (d / "manifest.json").write_text("{}"),
        r"manifest.json is not one of a check",
    ),
    "a foreign manifest": (
        lambda d: (d / "manifest.json").write_text("[1]"),
        r"manifest.json is not one of a check",
    ),
    "a manifest of brackets": (
        lambda d: (d / "manifest.json").write_text("[" * 100_000),
        r"manifest.json cannot be read \(.*recursion.*\)",
    ),
    "an edited manifest": (lambda d: _edit(d, position=7), r"manifest.json has another checksum than when it was"),
    "the manifest of another step": (
        lambda d: shutil.copy(d.parent / "step-00000001" / "manifest.json", d),
        r"manifest.json is of step 1, its directory is not",
    ),
    "an empty directory": (lambda d: [path.unlink() for path in d.iterdir()], r"manifest.json is missing"),
}


def _halve(path: Path) -> None:
    path.write_text(path.read_text()[: path.stat().st_size // 2])


def _edit(directory: Path, **numbers: Any) -> None:
    path = directory / "manifest.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"numbers": content["numbers"] | numbers}))


def _twin(directory: Path) -> tuple[Path, Path]:
    return sorted(directory.glob("*.safetensors"))[0], directory / "shard-00009.safetensors"


def _load_and_listen(directory: Path) -> tuple[int | None, dict[str, Any], list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("thinwire.train").addHandler(handler)
    return (*load(directory), lines)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_skipped_and_left_alone(
    tmp_path: Path, two_steps: tuple[Path, list[dict[int, Any]]], damage: str
) -> None:
    shutil.copytree(two_steps[0], tmp_path, dirs_exist_ok=True)
    spoil, line = DAMAGES[damage]
    spoil(tmp_path / "step-00000002")
    before = tree(tmp_path)
    results = run_ranks(_load_and_listen, 2, tmp_path)
    for kept, (step, found, _) in zip(two_steps[1], results):
        assert (step, found) == (1, kept[1])
    assert len(results[0][2]) == 1
    assert re.search(rf"skipping the damaged checkpoint .*step-00000002: {line}", results[0][2][0])
    assert results[1][2] == [], "rank 0 speaks"
    assert tree(tmp_path) == before
    assert (tmp_path / "step-00000002").is_dir()


def test_if_all_are_damaged_that_is_one_error_and_not_a_fresh_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_steps(tmp_path, [1, 2])
    truncate(tmp_path / "step-00000001")
    (tmp_path / "step-00000002" / "manifest.json").unlink()
    with pytest.raises(
        CheckpointError,
        match=r"no usable checkpoint in .*step-00000002: manifest.json is missing; step-00000001: shard",
    ):
        load(tmp_path)
    assert "skipping the damaged" not in caplog.text, "each is named once"


def test_no_entry_of_a_manifest_can_be_edited_unnoticed(tmp_path: Path) -> None:
    save_steps(tmp_path, [1])
    directory, path = tmp_path / "step-00000001", tmp_path / "step-00000001" / "manifest.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content, sort_keys=True))
    assert Manifest.read(directory).step == 1, "how it is laid out is no part of what it says"
    for key in set(content) - {"sha256"}:
        for value in (None, 7, [1], {"position": "seven"}):
            path.write_text(json.dumps(content | {key: value}))
            if value != content[key]:
                with pytest.raises(Damaged, match=r"manifest.json has another checksum than when it was written"):
                    Manifest.read(directory)
    path.write_text(json.dumps({key: value for key, value in content.items() if key != "sha256"}))
    with pytest.raises(Damaged, match=r"manifest.json is not one of a checkpoint \(it has no checksum\)"):
        Manifest.read(directory)


def test_a_newer_format_is_refused_and_not_fallen_back_from(tmp_path: Path) -> None:
    save_steps(tmp_path, [1, 2])
    rewrite_manifest(tmp_path / "step-00000002", format_version=2)
    with pytest.raises(
        CheckpointError, match=r"step-00000002/manifest.json has format_version 2, .* up to 1: use a newer"
    ):
        load(tmp_path)


def test_a_manifest_cannot_point_outside_its_directory(tmp_path: Path) -> None:
    save_steps(tmp_path, [1])
    rewrite_manifest(tmp_path / "step-00000001", files={"../shard-00001": {"bytes": 1, "sha256": ""}})
    with pytest.raises(CheckpointError, match=r"manifest.json is not one of a checkpoint"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"step": True}, "step is no whole number"),
        ({"world_size": "2"}, "world_size is no whole number"),
        ({"state": None}, "state is no table"),
        ({"model_config": ["llama"]}, "model_config is no table"),
        ({"files": [1]}, "files is no table"),
    ],
)
def test_entries_of_another_type_are_damage_whatever_the_checksum(
    tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    save_steps(tmp_path, [1])
    rewrite_manifest(tmp_path / "step-00000001", **changes)
    with pytest.raises(Damaged, match=rf"manifest.json is not one of a checkpoint \({why}\)"):
        Manifest.read(tmp_path / "step-00000001")


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b"\xff" * 100], ids=["empty", "zeros", "ones"])
def test_a_file_of_something_else_is_one_line_whatever_its_checksum(tmp_path: Path, content: bytes) -> None:
    save_steps(tmp_path, [1])
    directory = tmp_path / "step-00000001"
    path = next(directory.glob("*.safetensors"))
    path.write_bytes(content)
    rewrite_manifest(directory, files={path.name: {"bytes": len(content), "sha256": sha256(path)}})
    with pytest.raises(
        CheckpointError, match=r"step-00000001 has a file that this storage did not write: [^\n]+$"
    ):
        load(tmp_path)


def test_another_torch_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_steps(tmp_path, [1])
    rewrite_manifest(tmp_path / "step-00000001", torch_version="1.0")
    assert load(tmp_path)[0] == 1
    assert f"was written with torch 1.0, this is {torch.__version__}" in caplog.text


_unpickled: list[str] | None = None


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "pickle.find_class" and _unpickled is not None:
        _unpickled.append(str(arguments))


def test_nothing_that_is_read_from_disk_is_unpickled(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (os.mkdir, (str(tmp_path / "executed"),))

    held = save_steps(tmp_path / "c", [1])
    for name in (".metadata", "extra.pt", "__0_0.distcp"):
        (tmp_path / "c" / "step-00000001" / name).write_bytes(pickle.dumps(Evil()))
    global _unpickled
    sys.addaudithook(_audit)
    _unpickled = []
    try:
        assert load(tmp_path / "c") == (1, held[1])
        assert _unpickled == []
        pickle.loads(pickle.dumps(Path("x")))
        assert _unpickled, "the hook sees unpickling"
    finally:
        _unpickled = None
    assert not (tmp_path / "executed").exists()
