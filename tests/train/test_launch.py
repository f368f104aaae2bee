"""Real jobs through the real launcher: workers of their own, signals, deaths."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.train.jobs import job
from thinwire.train import launch as launch_module
from thinwire.train.arguments import to_toml
from thinwire.train.checkpoint.checkpointer import checkpoints_in
from thinwire.train.command import main
from thinwire.train.config import ConfigError, TrainConfig
from thinwire.train.launch import free_port, launch


@contextmanager
def _once(condition: Callable[[], bool], action: Callable[[], object]) -> Iterator[None]:
    """Do something from the side as soon as a condition holds."""
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            if condition():
                action()
                return
            time.sleep(0.005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def _steps_done(out: Path) -> int:
    path = out / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _summary(out: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return summary


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    return job(tmp_path_factory.mktemp("job"), recipe="fp8-ef", steps=40, checkpoint_every=4, accumulation=2)


@pytest.fixture(scope="module")
def straight(config: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The summary of the job without interruption."""
    out = tmp_path_factory.mktemp("straight")
    assert launch(config, out) == 0
    return _summary(out)


def test_a_job_runs_in_workers_of_its_own(straight: dict[str, Any]) -> None:
    assert (straight["world_size"], straight["steps"]) == (2, 40)


def test_sigterm_checkpoints_exits_0_and_the_run_continues_bit_for_bit(
    config: TrainConfig, straight: dict[str, Any], tmp_path: Path
) -> None:
    with _once(lambda: _steps_done(tmp_path) >= 5, lambda: os.kill(os.getpid(), signal.SIGTERM)):
        assert launch(config, tmp_path) == 0
    assert not (tmp_path / "summary.json").exists()
    newest = checkpoints_in(tmp_path / "checkpoints")[0].name
    assert newest == f"step-{_steps_done(tmp_path):08}"
    assert launch(replace(config, resume=True), tmp_path) == 0
    assert _summary(tmp_path)["param_hash"] == straight["param_hash"]


def test_a_command_killed_at_any_step_continues_bit_for_bit_and_leaves_no_worker_behind(
    config: TrainConfig, straight: dict[str, Any], tmp_path: Path
) -> None:
    out, file = tmp_path / "out", tmp_path / "job.toml"
    file.write_text(to_toml(config))
    command = [sys.executable, "-m", "thinwire", "train", "--config", str(file), "--out", str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "starting 2 workers\n"
        process.stdout.close()  # as `| head -1` does: whoever listens may leave
        while _steps_done(out) < 7:
            assert process.poll() is None
            time.sleep(0.005)
        workers = [worker for server in _children(process.pid) for worker in _children(server)]
        process.kill()
    assert len(workers) == 2
    deadline = time.monotonic() + 20
    while any(_runs(worker) for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not (out / "summary.json").exists()
    assert launch(replace(config, resume=True), out) == 0
    assert _summary(out)["param_hash"] == straight["param_hash"]
    assert {path.name for path in out.iterdir()} - {".lock"} == {
        *("checkpoints", "config.toml", "metrics.jsonl", "summary.json")  # and nothing of the launcher
    }


def test_a_worker_that_dies_ends_the_run_with_a_line_that_names_its_rank(
    config: TrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    killed: list[int] = []

    def kill_one() -> None:
        killed.append(_children(forkserver._forkserver._forkserver_pid)[-1])  # type: ignore[attr-defined]
        os.kill(killed[0], signal.SIGKILL)

    with _once(lambda: _steps_done(tmp_path) >= 3, kill_one):
        assert launch(replace(config, steps=10_000), tmp_path) == 1
    error = capsys.readouterr().err
    expected = (
        rf"thinwire train: rank [01] was killed by SIGKILL \(process {killed[0]}\); all ranks have stopped\n"
    )
    assert re.search(expected, error), error
    assert not (tmp_path / "summary.json").exists()
    assert not (tmp_path / ".workers").exists()


def test_a_hang_is_ended_by_a_timeout_that_names_rank_and_operation(
    config: TrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_module, "_GRACE", 0.5)
    stopped: list[int] = []

    def stop_one() -> None:
        stopped.append(_children(forkserver._forkserver._forkserver_pid)[-1])  # type: ignore[attr-defined]
        os.kill(stopped[0], signal.SIGSTOP)

    with _once(lambda: _steps_done(tmp_path) >= 3, stop_one):
        assert launch(replace(config, steps=10_000, timeout=8.0), tmp_path) == 1
    assert not _runs(stopped[0])
    error = capsys.readouterr().err
    assert re.fullmatch(r"thinwire train: rank 0: \w+ of .* failed; .*\n", error), error


def test_a_second_signal_kills_and_says_how_to_go_on(
    config: TrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop_twice() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)

    with _once(lambda: _steps_done(tmp_path) >= 3, stop_twice):
        assert launch(replace(config, steps=10_000), tmp_path) == 1
    expected = f"thinwire train: killed; `thinwire train --resume --out {tmp_path}` continues\n"
    assert capsys.readouterr().err == expected
    assert not (tmp_path / ".workers").exists()


def test_an_error_of_all_workers_is_one_line(
    config: TrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = replace(config, data=replace(config.data, sequence_length=2048))
    assert launch(replace(long, data=replace(long.data, files=(str(_short(tmp_path)),))), tmp_path / "a") == 2
    short = capsys.readouterr().err
    assert short.startswith("thinwire train: data.sequence_length: the training text has ")
    assert short.count("\n") == 1
    out = tmp_path / "b"
    assert launch(replace(config, steps=2), out) == 0
    assert launch(replace(config, steps=2, recipe="ddp", resume=True), out) == 1
    other = capsys.readouterr().err
    assert re.fullmatch(r"thinwire train: rank [01]: .*recipe.*\n", other), other


def _short(directory: Path) -> Path:
    for number in range(40):
        (directory / f"{number}.txt").write_text(f"a short text, number {number}")
    return directory


def test_a_taken_port_is_one_line_and_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert main(["--port", str(port), "--out", str(tmp_path)]) == 2
        expected = f"port: {port} is taken on this machine; choose another, or 0 for a free one"
        assert capsys.readouterr().err == f"thinwire train: {expected}\n"
        with pytest.raises(ConfigError):
            free_port(port)
    assert free_port(port) == port


def test_more_workers_than_cuda_devices_are_refused_before_any_starts(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="workers: 2 on a machine with 1 CUDA devices"):
        launch(replace(config, device="cuda", workers=2), tmp_path)


def test_torchrun_starts_the_workers_too(config: TrainConfig, straight: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(to_toml(config))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "thinwire", "train", "--config", str(file)]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=120, stdout=subprocess.DEVNULL)
    assert _summary(tmp_path / "runs" / "fp8-ef-1")["param_hash"] == straight["param_hash"]


@pytest.mark.full  # depends on when in the start-up the signal arrives
def test_an_interrupt_while_workers_start_is_no_accident(tmp_path: Path) -> None:
    command = [sys.executable, "-u", "-m", "thinwire", "train", "--steps", "500", "--out", str(tmp_path / "out")]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # A suite that a script put into the background ignores SIGINT, and its children would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None
    while "starting 2 workers" not in process.stdout.readline():
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=90)
    # Before the workers hear of it there is nothing to save; afterwards they save, and that is a success.
    assert process.returncode == 0 or output.strip() == "thinwire train: interrupted", output
    assert "Traceback" not in output


def test_a_rank_that_never_comes_is_named() -> None:
    """Rank 0 of two, which waits alone: the other one was stopped before it said that it is there."""
    script = """
from datetime import timedelta
from thinwire.train.worker import start_process_group
try:
    start_process_group("gloo", timedelta(seconds=2))
except Exception as error:
    print(type(error).__name__, error)
"""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as the launcher's agent has
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    environment = {**os.environ, **place, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    expected = r"CollectiveError rank 0: the ranks could not be connected within 2 s; no answer from rank 1: \S"
    assert re.match(expected, done.stdout), done
