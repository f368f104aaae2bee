"""What goes wrong while a checkpoint is written is one line on all ranks, and spoils nothing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.ranks import run_ranks
from tests.train.checkpoint.spoil import die_before, names
from tests.train.small_run import advance, content, fresh, load, rank
from thinwire.train.checkpoint import manifest, storage
from thinwire.train.checkpoint.checkpointer import Checkpointer, CheckpointError, checkpoints_in
from thinwire.train.checkpoint.state import TrainState

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def _one_rank_fails(directory: Path, where: str) -> tuple[str, list[str], dict[str, Any], dict[str, Any]]:
    state = fresh()
    advance(state)
    checkpointer = Checkpointer(directory)
    checkpointer.save(1, state)
    advance(state)
    held = content(state)
    checkpointer.wait()

    def fail(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    if rank() == 1 or where == "write":
        owner = {
            "write_data": storage.HuggingFaceStorageWriter,
            "_checksums": Checkpointer,
            "write": manifest.Manifest,
        }[where]
        kept = getattr(owner, where)
        setattr(owner, where, fail)
    checkpointer.save(2, state)
    with pytest.raises(CheckpointError) as raised:
        checkpointer.save(3, state)  # the previous save's error
    if rank() == 1 or where == "write":
        setattr(owner, where, kept)
    dist.barrier()
    left = names(directory)
    dist.barrier()
    after = content(state)
    checkpointer.save(2, state)  # there is room again
    checkpointer.wait()
    checkpointer.close()
    return str(raised.value), left, held, after


@pytest.mark.parametrize("where", ["write_data", "_checksums", "write"])
def test_a_failure_on_one_rank_is_raised_on_all_and_leaves_nothing_half_written(
    tmp_path: Path, where: str
) -> None:
    results = run_ranks(_one_rank_fails, 2, tmp_path, where)
    failing = 0 if where == "write" else 1
    for line, left, held, after in results:
        assert (
            f"step 2 could not be saved in {tmp_path}: rank {failing}: [Errno 28] No space left on device" in line
        )
        assert "earlier checkpoints are intact" in line
        assert "\n" not in line
        assert left == ["step-00000001"]
        assert after == held
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    assert [step for step, _ in run_ranks(load, 2, tmp_path)] == [2, 2]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 160 KiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=160k", "tmpfs", str(disk)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no small file system can be mounted here: {mounted.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def _fill_the_disk(disk: Path) -> tuple[str, list[str], bool]:
    state = fresh()
    advance(state)
    checkpointer = Checkpointer(disk / "checkpoints")
    checkpointer.save(1, state)
    checkpointer.wait()
    advance(state)
    held = content(state)
    if rank() == 0:
        free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
        (disk / "filler").write_bytes(b"x" * (free - 16384))  # one rank's file still fits, both don't
    dist.barrier()
    checkpointer.save(2, state)
    with pytest.raises(CheckpointError) as raised:
        checkpointer.wait()
    dist.barrier()
    left = names(disk / "checkpoints")
    intact = content(state) == held
    advance(state)
    dist.barrier()
    if rank() == 0:
        (disk / "filler").unlink()
    dist.barrier()
    checkpointer.save(3, state)
    checkpointer.close()
    return str(raised.value), left, intact


def test_a_full_disk_is_one_line_and_training_can_go_on(small_disk: Path) -> None:
    results = run_ranks(_fill_the_disk, 2, small_disk)
    for line, left, intact in results:
        assert "step 2 could not be saved" in line
        assert "No space left on device" in line
        assert "\n" not in line
        assert left == ["step-00000001"]
        assert intact
    assert names(small_disk / "checkpoints") == ["step-00000001", "step-00000003"]
    assert [step for step, _ in run_ranks(load, 2, small_disk / "checkpoints")] == [3, 3]


def test_a_directory_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    checkpointer = Checkpointer(tmp_path / "file" / "checkpoints")
    checkpointer.save(1, fresh())
    with pytest.raises(CheckpointError, match=r"step 1 could not be saved in .*: rank 0: .*Not a directory"):
        checkpointer.wait()


def _second_rank_dies(directory: Path) -> str:
    if rank() == 1:
        die_before(Checkpointer, "_checksums")
    checkpointer = Checkpointer(directory)
    checkpointer.save(1, fresh())
    started = time.monotonic()
    with pytest.raises(CheckpointError) as raised:
        checkpointer.wait()
    assert time.monotonic() - started < 25
    os._exit(0 if "step 1 could not be saved; no answer from rank 1: " in str(raised.value) else 1)


def test_a_rank_that_dies_while_saving_does_not_hang_the_others(tmp_path: Path) -> None:
    results = run_ranks(_second_rank_dies, 2, tmp_path, check=False)
    assert "exit code 0" in str(results[0])
    assert checkpoints_in(tmp_path) == []


STOPS = {
    "while it writes": (storage.HuggingFaceStorageWriter, "write_data"),
    "instead of saving": (Checkpointer, "save"),
    "instead of loading": (Checkpointer, "load_latest"),
}


def _save(checkpointer: Checkpointer, step: int, state: TrainState) -> None:
    checkpointer.save(step, state)
    checkpointer.wait()


def _middle_rank_stops(directory: Path, where: str) -> None:
    """The others leave what they raised in `directory`; then the stopped one, which cannot end, is killed."""
    processes: list[int] = [0] * 3
    dist.all_gather_object(processes, os.getpid())
    state = fresh()
    checkpointer = Checkpointer(directory / "checkpoints", timeout=timedelta(seconds=3))
    _save(checkpointer, 1, state)
    if rank() == 1:
        setattr(*STOPS[where], lambda *_: os.kill(os.getpid(), signal.SIGSTOP))
    with pytest.raises(CheckpointError) as raised:
        checkpointer.load_latest(state) if where == "instead of loading" else _save(checkpointer, 2, state)
    (directory / f"{rank()}.tmp").write_text(str(raised.value))
    (directory / f"{rank()}.tmp").rename(directory / f"{rank()}.txt")
    while not all((directory / f"{other}.txt").exists() for other in (0, 2)):
        time.sleep(0.01)
    if rank() == 0:
        os.kill(processes[1], signal.SIGKILL)
    os._exit(0)


@pytest.mark.parametrize(
    "where", ["while it writes", *(pytest.param(where, marks=pytest.mark.full) for where in list(STOPS)[1:])]
)
def test_a_rank_that_stops_is_named_by_the_others_once_the_timeout_is_over(tmp_path: Path, where: str) -> None:
    run_ranks(_middle_rank_stops, 3, tmp_path, where, check=False)
    failed = (
        rf"the checkpoints in {tmp_path}/checkpoints could not be read"
        if where == "instead of loading"
        else "step 2 could not be saved"
    )
    for number in (0, 2):
        line = (tmp_path / f"{number}.txt").read_text()
        assert re.fullmatch(rf"rank {number}: {failed}; no answer from rank 1: .*gloo.*", line), line
    assert names(tmp_path / "checkpoints")[-1] == "step-00000001"
