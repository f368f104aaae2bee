"""Snapshots in memory: a run whose worker dies goes on from the last round when torchrun starts it again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import RankFailed, run_ranks
from tests.train.jobs import job, lines, run_job
from thinwire.train.arguments import to_toml
from thinwire.train.checkpoint.checkpointer import checkpoints_in
from thinwire.train.config import CheckpointConfig, LocalUpdateConfig

EVERY = 5


def torchrun(file: Path, out: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *options]
    command += ["-m", "thinwire", "train", "--config", str(file), "--out", str(out)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def worker(launcher: int, rank: int) -> int:
    """The process of this rank."""
    for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        if f"RANK={rank}\0".encode() in b"\0" + Path(f"/proc/{pid}/environ").read_bytes():
            return int(pid)
    raise AssertionError(f"rank {rank} is not there")


def steps_saved(memory: Path) -> list[int]:
    return [int(path.name.split("-")[1]) for run in memory.glob("thinwire-*") for path in checkpoints_in(run)]


def test_a_worker_that_is_killed_costs_at_most_a_round(tmp_path: Path) -> None:
    memory, out = tmp_path / "memory", tmp_path / "out"
    memory.mkdir()
    config = job(
        tmp_path, recipe="diloco", steps=60, batch_size=4, local_update=LocalUpdateConfig(every=EVERY), threads=1
    )
    config = replace(config, checkpoint=CheckpointConfig(every=0, snapshots=memory), verify_every=0)
    file = tmp_path / "job.toml"
    file.write_text(to_toml(config))
    process = torchrun(file, out, "--max-restarts", "1")
    try:
        deadline = time.monotonic() + 60
        while max(steps_saved(memory), default=0) < 4 * EVERY:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(worker(process.pid, 1), signal.SIGKILL)
        said, _ = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, said
    assert "resuming after step" in said
    steps = [line["step"] for line in lines(out)]
    assert steps == list(range(1, 61))  # none is missing, and none is there twice
    straight = run_ranks(run_job, 2, replace(config, checkpoint=CheckpointConfig(every=0)), tmp_path / "straight")
    summary = json.loads((out / "summary.json").read_text())
    for key in ("param_hash", "val_loss", "tokens"):
        assert summary[key] == straight[0][key]
    assert not list(memory.iterdir())  # a run that is over leaves nothing in memory


def test_too_little_memory_is_said_before_the_first_step(tmp_path: Path) -> None:
    config = replace(job(tmp_path), checkpoint=CheckpointConfig(every=0, snapshots=tmp_path / "nowhere"))
    (failure, *_) = run_ranks(run_job, 2, config, tmp_path / "out", check=False)
    assert isinstance(failure, RankFailed)
    assert f"checkpoint.snapshots: {tmp_path / 'nowhere'}: No such file or directory" in str(failure)
    (failure, *_) = run_ranks(
        cramped, 2, replace(config, checkpoint=CheckpointConfig(snapshots=tmp_path)), check=False
    )
    assert "has 0 MB free, and three snapshots of this run take up to" in str(failure)


def cramped(config: Any) -> None:
    """On a file system that is full."""
    import shutil

    from thinwire.train import snapshots

    full = shutil.disk_usage(config.checkpoint.snapshots)._replace(free=0)
    snapshots.shutil.disk_usage = lambda path: full  # type: ignore[attr-defined,assignment]
    run_job(config, config.checkpoint.snapshots / "out")


@pytest.mark.parametrize("restarts", ["0", "2"])
def test_only_workers_that_were_started_again_go_on_by_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: str
) -> None:
    from thinwire.train.snapshots import was_restarted

    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
    config = replace(job(tmp_path), out=tmp_path / "out")
    assert not was_restarted(config)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "metrics.jsonl").write_text("")
    assert was_restarted(config) == (restarts == "2")
    assert not was_restarted(replace(config, out=None))
