"""`thinwire bench faults`: its rows, and a run whose worker is killed."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.namespaces import needs_namespaces
from thinwire.bench import faults


def test_rows_compare_with_the_run_that_was_left_alone() -> None:
    alone = {"survived": True, "val_loss": 2.0, "repeated_steps": 0, "stalled_seconds": 0.0}
    run: dict[str, Any] = {"survived": True, "val_loss": 2.1, "repeated_steps": 15, "stalled_seconds": 4.5}
    row = faults.compare("pier", "kill", run, alone)
    assert row == faults.Row("pier", "kill", True, 0.75, 4.5, True, 1.05)
    lost = faults.compare("pier", "cut", {"survived": False, "problem": "it hung"}, alone)
    assert lost == faults.Row("pier", "cut", False, None, None, False, None)
    assert "pier               kill        yes        0.75         4.5 s     1.050000" in faults.table([row, lost])


def test_steps_that_are_taken_again_are_counted_and_a_stall_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    steps = faults.Steps(file)
    assert steps.look() == 0
    began = time.monotonic()

    def write(last: int) -> None:
        file.write_text("".join(f'{{"step": {step}, "loss": 1.0}}\n' for step in range(1, last + 1)))

    write(7)
    assert steps.look() == 7
    write(4)  # a restart
    assert steps.look() == 4
    with file.open("a") as lines:
        lines.write('{"step": 5, "lo')
    assert steps.look() == 4
    stall = time.monotonic() - began
    write(9)
    assert steps.look() == 9
    assert steps.repeated == 3
    assert steps.longest_gap(began) <= time.monotonic() - began
    assert steps.longest_gap(began) > 0.0
    assert steps.longest_gap(time.monotonic()) == 0.0
    assert stall >= 0.0


@needs_namespaces
@pytest.mark.slow  # two jobs of two torchruns each, one of which starts its workers twice
def test_a_killed_worker_costs_a_part_of_a_round_and_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshots = tmp_path / "memory"
    snapshots.mkdir()
    arguments = ["diloco", "--faults", "kill", "--ranks", "2", "--steps", "80", "--out", str(tmp_path / "out")]
    arguments += ["--snapshots", str(snapshots), "--json"]
    assert faults.main(arguments) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["survived"], row["identical_replicas"], row["val_loss_ratio"]) == (True, True, 1.0)
    assert 0.0 < row["rounds_lost"] <= 1.0
    assert row["seconds_to_resume"] > 0.5
    assert not list(snapshots.iterdir())
    assert faults.main(arguments) == 0  # from what it kept
    assert "running" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["ddp"], "unknown method 'ddp'; choose of diloco, pier, streaming-diloco"),
        (["--ranks", "3"], "--nodes 2: 3 ranks cannot be shared out equally over them"),
        (["--faults", "flood"], "invalid choice: 'flood'"),
    ],
)
def test_bad_usage_is_one_line(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        faults.main(arguments)
    assert sentence in capsys.readouterr().err
