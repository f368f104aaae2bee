import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import thinwire as tw
from thinwire import recipes
from thinwire.bench import recipes as bench
from thinwire.bench.jobs import Job, fingerprint


def _summary(val_loss: float, sent: int, wall: float) -> dict[str, float | int]:
    return {
        "val_loss": val_loss,
        "sent_bytes_per_rank": sent,
        "wall_seconds": wall,
        "steps": 10,
        "comm_seconds": 1.0,
    }


def test_losses_are_compared_seed_by_seed() -> None:
    rows = bench.compare(
        {
            "ddp": [_summary(2.0, 400, 10.0), _summary(1.0, 400, 10.0)],
            "fp8": [_summary(2.02, 100, 5.0), _summary(1.01, 100, 20.0)],
        }
    )
    assert rows[0].ratio_to_ddp == 1.0
    assert rows[1].ratio_to_ddp == pytest.approx(1.01)
    assert rows[1].ratio_spread == pytest.approx(0.0, abs=1e-12)
    assert rows[1].val_loss == pytest.approx(1.515)
    assert rows[1].sent_ratio_to_ddp == 0.25
    assert rows[1].ratio_to_ddp_step == pytest.approx(1.25)


def test_two_short_runs_become_a_table_and_are_not_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["fp8", "--seeds", "1", "--steps", "2", "--out", str(tmp_path), "--json"]
    assert bench.main(argv) == 0
    first = json.loads(capsys.readouterr().out)
    assert [row["recipe"] for row in first["rows"]] == ["ddp", "fp8"]
    assert first["rows"][1]["sent_ratio_to_ddp"] < 0.27
    written = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/summary.json")}
    assert len(written) == 2
    assert bench.main(argv) == 0
    assert json.loads(capsys.readouterr().out) == first
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/summary.json")} == written


@pytest.mark.full
def test_a_run_that_was_stopped_goes_on_from_its_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped = tmp_path / f"ddp-workers2-batch8-steps4-lr0.001-seed0-{fingerprint('ddp')}"
    half = ["train", "--recipe", "ddp", "--steps", "2", "--out", str(stopped), "--logging.no-progress"]
    subprocess.run([sys.executable, "-m", "thinwire", *half], check=True, capture_output=True)
    (stopped / "summary.json").unlink()
    assert bench.main(["ddp", "--seeds", "1", "--steps", "4", "--out", str(tmp_path)]) == 0
    assert json.loads((stopped / "summary.json").read_text())["steps"] == 4
    steps = [json.loads(line)["step"] for line in (stopped / "metrics.jsonl").read_text().splitlines()]
    assert steps[-1] == 4
    assert len(steps) == len(set(steps))


def test_what_was_run_under_another_configuration_is_not_taken_for_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = {name: fingerprint(name) for name in ("fp8", "fp8-ef", "torch-fp16")}
    assert len(set(before.values())) == 3
    changed = replace(recipes.get("fp8"), reducer=tw.Quantized("fp8_e4m3"))
    monkeypatch.setitem(recipes._RECIPES, "fp8", changed)
    assert [name for name, was in before.items() if fingerprint(name) != was] == ["fp8"]
    job = Job("ddp", seed=0, steps=20, horizon=20, validate_every=10, lr=1e-3)
    assert job.name != replace(job, validate_every=20).name


def test_an_unknown_recipe_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench.main(["fp9"])
    assert "unknown recipe 'fp9'; choose of ddp" in capsys.readouterr().err
