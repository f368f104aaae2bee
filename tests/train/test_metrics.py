"""What a run writes for people and programs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from thinwire.train.config import LoggingConfig
from thinwire.train.metrics import Baseline, RunLog, StepMetrics, keep_lines_until

BASELINE = Baseline.of(1000, 2, "float32")


def _line(step: int, **changes: Any) -> StepMetrics:
    values: dict[str, Any] = {"step": step, "loss": 2.0, "lr": 0.1, "gradient_norm": 1.0, "sent_bytes": 1000}
    values |= {
        "step_seconds": 0.5,
        "comm_seconds": 0.1,
        "tokens_per_second": 10.0,
        "tokens": 5,
        "skipped_steps": 0,
    }
    return StepMetrics(**(values | changes))


def _log(out: Path, first_step: int = 0, **config: Any) -> RunLog:
    settings = {"tensorboard": False, "progress": False} | config
    return RunLog(out, LoggingConfig(**settings), BASELINE, first_step=first_step, steps=10)


def _read(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_a_resumed_run_replaces_the_lines_of_the_steps_that_it_replays(tmp_path: Path) -> None:
    log = _log(tmp_path)
    for step in (1, 2, 3, 4):
        log.step(_line(step))
    log.close()
    log = _log(tmp_path, first_step=2)
    for step in (3, 4, 5):
        log.step(_line(step, loss=1.0))
    log.close()
    assert [(line["step"], line["loss"]) for line in _read(tmp_path)] == [(1, 2), (2, 2), (3, 1), (4, 1), (5, 1)]


@pytest.mark.parametrize(
    "spoiled", [b'{"step": 2, "lo', b"\0" * 9, b"\xff\xfe\x80", b"[" * 100_000, b'{"step": "2"}']
)
def test_a_line_spoiled_by_a_kill_or_the_disk_is_dropped(tmp_path: Path, spoiled: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    good = b'{"step": 1, "loss": 2}\n'
    path.write_bytes(good + spoiled)
    keep_lines_until(path, 5)
    assert path.read_bytes() == good


def test_what_is_not_finite_is_null_in_json(tmp_path: Path) -> None:
    log = _log(tmp_path)
    log.step(_line(1, loss=math.nan, gradient_norm=math.inf))
    log.close()
    assert (_read(tmp_path)[0]["loss"], _read(tmp_path)[0]["gradient_norm"]) == (None, None)


def test_the_validation_loss_is_only_in_lines_that_have_one(tmp_path: Path) -> None:
    log = _log(tmp_path)
    log.step(_line(1))
    log.step(_line(2, val_loss=1.5))
    log.close()
    assert ["val_loss" in line for line in _read(tmp_path)] == [False, True]


def test_tensorboard_events_hold_the_same_values(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = _log(tmp_path, tensorboard=True)
    log.step(_line(1, loss=2.5))
    log.step(_line(2, loss=math.nan))
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 2.5)]


def test_without_a_terminal_progress_is_a_line_per_logged_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = _log(tmp_path, progress=True)
    log.step(_line(3))
    log.close()
    text = capsys.readouterr().out
    assert text == "step 3/10: loss 2.000, 10 tokens/s, 0.00 MB/step, 4.00x less than DDP float32\n"


def test_without_progress_there_are_no_lines_per_step_but_the_last_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = _log(tmp_path, progress=False)
    log.step(_line(10, val_loss=1.5))
    log.finish({"val_loss": 1.5, "steps": 10, "tokens": 5, "wall_seconds": 3.0, "sent_bytes_per_rank": 10}, 40.0)
    log.close()
    assert capsys.readouterr().out == (
        "done: validation loss 1.5000 nats/byte after 10 steps and 5 tokens in 3 s; "
        f"sent 0.00 MB/step, 4.00x less than DDP float32; {tmp_path / 'summary.json'}\n"
    )


def test_brackets_in_a_path_are_shown_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = _log(tmp_path)
    log.say("runs/[red]1")
    log.close()
    assert capsys.readouterr().out == "runs/[red]1\n"


def test_compression_is_told_against_plain_ddp_in_float32_and_in_the_jobs_own_dtype() -> None:
    baseline = Baseline.of(10**6, 4, "bfloat16")
    assert baseline.float32_bytes == 6e6
    text = "1.50 MB/step, 4.00x less than DDP float32, 2.00x less than DDP bfloat16"
    assert baseline.compared(1.5e6) == text
    assert Baseline.of(10**6, 1, "float32").compared(0) == "0.00 MB/step"


def test_gradients_of_shards_are_compared_with_a_reduce_scatter() -> None:
    baseline = Baseline.of(10**6, 4, "float32", "fsdp")
    assert baseline.compared(1.5e6) == "1.50 MB/step, 2.00x less than FSDP2 float32"
