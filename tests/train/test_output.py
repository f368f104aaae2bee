"""One run at a time in a directory, whoever started it and however it ends."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.ranks import run_ranks
from thinwire.train import worker
from thinwire.train.config import TrainConfig
from thinwire.train.output import OutputError, choose_output


def _refusal(config: TrainConfig) -> str:
    with pytest.raises(OutputError) as raised, choose_output(config):
        pass
    return str(raised.value)


def _in_use(out: Path, process: int) -> str:
    holder = f"process {process} on {socket.gethostname()}"
    return f"out: {out} is in use by {holder}; wait for it, or choose another --out"


def test_a_second_run_in_a_directory_is_refused_and_the_first_one_named(tmp_path: Path) -> None:
    with choose_output(TrainConfig(out=tmp_path)):
        assert _refusal(TrainConfig(out=tmp_path)) == _in_use(tmp_path, os.getpid())
        (tmp_path / "metrics.jsonl").write_text("")
        assert _refusal(TrainConfig(out=tmp_path, resume=True)) == _in_use(tmp_path, os.getpid())
    with choose_output(TrainConfig(out=tmp_path, resume=True)) as out:
        assert out == tmp_path


def test_a_directory_that_the_run_chose_itself_is_held_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with choose_output(TrainConfig()) as first, choose_output(TrainConfig()) as second:
        assert [str(first), str(second)] == ["runs/nvfp4-1", "runs/nvfp4-2"]
        assert _refusal(TrainConfig(out=first)) == _in_use(first, os.getpid())


def _hold_and_start_a_program(out: Path) -> None:
    with choose_output(TrainConfig(out=out)):
        program = subprocess.Popen(["sleep", "60"], close_fds=False)
        (out / "program").write_text(str(program.pid))
        time.sleep(60)


def test_a_killed_run_frees_its_directory_even_if_a_program_that_it_started_goes_on(tmp_path: Path) -> None:
    process = multiprocessing.get_context("forkserver").Process(target=_hold_and_start_a_program, args=(tmp_path,))
    process.start()
    while not (tmp_path / "program").exists() or not (tmp_path / "program").read_text():
        assert process.is_alive()
        time.sleep(0.01)
    program = int((tmp_path / "program").read_text())
    assert process.pid is not None
    assert _refusal(TrainConfig(out=tmp_path)) == _in_use(tmp_path, process.pid)
    process.kill()
    process.join()
    try:
        os.kill(program, 0)  # it still runs
        with choose_output(TrainConfig(out=tmp_path)):
            pass
    finally:
        os.kill(program, signal.SIGKILL)


def _choose_together(config: TrainConfig) -> tuple[Path, str, int]:
    with worker._same_output(config) as out:
        processes = [0, 0]
        dist.all_gather_object(processes, os.getpid())
        refusal = _refusal(config)
        dist.barrier()
    return out, refusal, processes[0]


def test_under_torchrun_rank_0_holds_it(tmp_path: Path) -> None:
    for out, refusal, first in run_ranks(_choose_together, 2, TrainConfig(out=tmp_path)):
        assert out == tmp_path
        assert refusal == _in_use(tmp_path, first)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_on_a_file_system_without_locks_a_warning_takes_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    with choose_output(TrainConfig(out=tmp_path)) as out:
        assert out == tmp_path
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path} has no file locks ({os.strerror(code)}): a second run in it would not be noticed"
    ]


def test_a_directory_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 300)
    assert (
        _refusal(TrainConfig(out=long, resume=True))
        == f"out: cannot read {long}: {os.strerror(errno.ENAMETOOLONG)}"
    )
