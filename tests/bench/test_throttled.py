"""`thinwire bench recipes --rate`: what its rows are made of, and the real thing on a slow network."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.namespaces import needs_namespaces
from tests.support.ranks import run_ranks
from tests.train.jobs import job, run_job
from thinwire.bench import recipes, throttled
from thinwire.bench.jobs import Job, Trained
from thinwire.bench.methods import TORCH_HOOKS
from thinwire.bench.stepping import train
from thinwire.train.config import TrainConfig


def stepped(methods: tuple[str, ...], config: TrainConfig) -> dict[str, Trained]:
    torch.set_num_threads(1)
    steps = config.steps
    return {method: train(Job(method, 0, steps, steps, 4, 0.0), config) for method in methods}


def test_a_bench_step_is_a_step_of_thinwire_train(tmp_path: Path) -> None:
    config = job(tmp_path, recipe="fp8-ef")
    (summary, *_) = run_ranks(run_job, 2, config, tmp_path / "out")
    trained = run_ranks(stepped, 2, ("fp8-ef",), replace(config, recipe="ddp"))[0]["fp8-ef"]
    assert [step for step, _ in trained.losses] == [4, 6]  # every four and at the end
    assert trained.losses[-1][1] == summary["val_loss"]
    assert trained.sent_bytes == summary["sent_bytes_per_rank"] // 6
    assert trained.step_seconds > 0


def test_torchs_hooks_train_the_same_model(tmp_path: Path) -> None:
    """fp16 rounds gradients to 11 bits; PowerSGD of rank 4 loses more but keeps it for the next step."""
    trained = run_ranks(stepped, 2, ("ddp", *TORCH_HOOKS), job(tmp_path))[0]
    exact = trained["ddp"].losses[-1][1]
    assert trained["torch-fp16"].losses[-1][1] == pytest.approx(exact, rel=1e-3)
    assert trained["torch-powersgd"].losses[-1][1] == pytest.approx(exact, rel=0.05)
    assert len({method.losses[-1][1] for method in trained.values()}) == 3


def test_time_to_the_target_is_steps_to_it_times_seconds_of_a_limited_step() -> None:
    def losses(*values: float) -> Trained:
        return Trained(0.0, 0, [(10 * (number + 1), value) for number, value in enumerate(values)])

    trained = {
        "ddp": [losses(3.0, 2.01, 2.0), losses(3.0, 2.5, 2.0)],
        "fp8": [losses(3.0, 2.02, 2.01), losses(2.02, 2.1, 2.03)],
        "int4": [losses(3.0, 2.5, 2.03), losses(3.0, 2.0, 1.9)],
    }
    limited = {
        "ddp": Trained(4.0, 4_000_000, []),
        "fp8": Trained(1.5, 1_000_000, []),
        "int4": Trained(1.0, 500_000, []),
    }
    free = {method: Trained(0.5, 0, []) for method in trained}
    ddp, fp8, int4 = throttled.compare(trained, limited, free, steps=30, rate=8_000_000)
    assert ddp.seconds_to_target == 25 * 4.0  # the mean of steps 20 and 30
    assert ddp.comm_share == 1 - 0.5 / 4.0
    assert fp8.seconds_to_target == 15 * 1.5
    assert fp8.speedup_vs_ddp == pytest.approx(100 / 22.5)
    assert fp8.ratio_to_limit == pytest.approx(1.5 / (0.5 + 1.0))
    assert fp8.sent_bytes_per_rank == 30_000_000
    assert fp8.seconds == 45.0
    assert int4.seconds_to_target is None  # one seed never gets there
    assert int4.speedup_vs_ddp is None
    assert int4.ratio_to_ddp_step == 0.25


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--rate", "fast"], "write it like 200mbit"),
        (["--ranks", "65"], "2 to 64"),
        (["torch-fp16"], "unknown recipe"),
        (["--rate", "10mbit", "--steps", "9"], "--steps 9 are too few"),
    ],
)
def test_what_cannot_be_run_is_one_line(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        recipes.main(flags)
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@needs_namespaces
@pytest.mark.full
def test_every_method_has_its_bytes_on_a_slow_network_and_nothing_is_run_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["fp8", "--rate", "10mbit", "--ranks", "2", "--seeds", "1", "--steps", "10", "--timed-steps", "10"]
    argv += ["--out", str(tmp_path), "--json"]
    assert recipes.main(argv) == 0
    first = json.loads(capsys.readouterr().out)
    rows = {row["recipe"]: row for row in first["rows"]}
    assert list(rows) == ["ddp", "fp8", *TORCH_HOOKS]
    assert rows["fp8"]["sent_bytes_per_rank"] < 0.28 * rows["ddp"]["sent_bytes_per_rank"]
    assert rows["torch-fp16"]["sent_bytes_per_rank"] == pytest.approx(
        rows["ddp"]["sent_bytes_per_rank"] / 2, rel=0.05
    )
    written = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert recipes.main(argv) == 0
    assert json.loads(capsys.readouterr().out) == first
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == written
