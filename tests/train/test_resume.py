"""A run that is killed and resumed, twice in one epoch, ends with the bits of one that was not."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import thinwire as tw
from tests.support.ranks import RankFailed, run_ranks
from tests.train.jobs import job, lines, run_job
from thinwire.train import loop, metrics
from thinwire.train.arguments import parse, read_toml, to_toml
from thinwire.train.checkpoint.checkpointer import checkpoints_in
from thinwire.train.command import main
from thinwire.train.config import ConfigError, LocalUpdateConfig, TrainConfig
from thinwire.train.data.samples import build_data
from thinwire.train.output import choose_output

SAME = ("param_hash", "val_loss", "final_train_loss", "tokens", "skipped_steps", "sent_bytes_per_rank", "steps")


FULL = pytest.mark.full
ONE_OF_EACH = ["ddp", "fp8", "nvfp4", "int4-loco", "int4-hadamard", "powersgd-fp8", "gift-fp8"]
ONE_OF_EACH += ["streaming-diloco", "pier-fp8"]
"""What differs in a state: nothing kept, no error memory, error memory, fixed coordinates, factors, fitted
coordinates; under local updates something in flight, two phases."""

OTHERS = [name for name in tw.recipes.names() if name not in ONE_OF_EACH]


def _job(tmp_path: Path, recipe: str, accumulation: int, **settings: Any) -> TrainConfig:
    """Sixty steps that cross an epoch after about forty, of a model with dropout; a checkpoint every five."""
    import transformers

    model = tmp_path / "model"
    sizes: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 96, "max_position_embeddings": 32}
    depth: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 2}
    transformers.LlamaConfig(**sizes, **depth, attention_dropout=0.1).save_pretrained(model)
    return job(
        tmp_path,
        recipe=recipe,
        local_update=LocalUpdateConfig(every=8 if tw.recipes.get(recipe).method else None),
        accumulation=accumulation,
        steps=60,
        batch_size=16,
        threads=1,
        seed=3,
        checkpoint_every=5,
        verify_every=20,
        model_name=str(model),
        model_random_weights=True,
        **settings,
    )


def _train_and_die(config: TrainConfig, out: Path, step: int) -> None:
    """Train and be killed by SIGKILL in this step, once there is a checkpoint."""
    original = loop.training_step
    had = len(checkpoints_in(out / "checkpoints"))

    def training_step(run: Any, progress: Any, stop: Any) -> Any:
        if progress.step >= step:
            while len(checkpoints_in(out / "checkpoints")) <= min(had, config.checkpoint.keep - 1):
                time.sleep(0.005)
            os.kill(os.getpid(), signal.SIGKILL)
        return original(run, progress, stop)

    loop.training_step = training_step
    run_job(config, out)


def _check(tmp_path: Path, recipe: str, world_size: int, accumulation: int, **settings: Any) -> None:
    config = _job(tmp_path, recipe, accumulation, **settings)
    epoch = build_data(config.data, seed=config.seed)[0].num_sequences // config.batch_size
    assert 30 < epoch < config.steps - 5
    chance = random.Random(f"{recipe} {world_size} {accumulation}")
    first = chance.randint(6, 14)
    second = chance.randint(first + 6, 30)
    straight = run_ranks(run_job, world_size, config, tmp_path / "straight", timeout=180)
    out = tmp_path / "out"
    for step in (first, second):
        killed = run_ranks(_train_and_die, world_size, config, out, step, check=False, timeout=180)
        assert all(isinstance(result, RankFailed) for result in killed)
        assert any("exit code -9" in str(result) for result in killed)
        config = replace(config, resume=True)
        newest = json.loads((checkpoints_in(out / "checkpoints")[0] / "manifest.json").read_text())["step"]
        assert 5 <= newest <= step
    resumed = run_ranks(run_job, world_size, config, out, timeout=180)
    for before, after in zip(straight, resumed):
        assert {key: after[key] for key in SAME} == {key: before[key] for key in SAME}
        assert after["param_hash"] == straight[0]["param_hash"]
    losses = [[(line["step"], line["loss"]) for line in lines(tmp_path / run)] for run in ("straight", "out")]
    assert losses[0] == losses[1]


@pytest.mark.slow  # four runs
def test_a_model_in_shards_is_resumed_bit_for_bit(tmp_path: Path) -> None:
    _check(tmp_path, "gift-nvfp4", world_size=2, accumulation=2, parallel="fsdp")


@pytest.mark.parametrize("recipe", [*ONE_OF_EACH, *(pytest.param(r, marks=FULL) for r in OTHERS)])
def test_killed_twice_and_resumed_is_bit_for_bit_the_straight_run(tmp_path: Path, recipe: str) -> None:
    _check(tmp_path, recipe, world_size=2, accumulation=1 + (len(recipe) % 2))


@pytest.mark.full
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("recipe", tw.recipes.names())
def test_killed_twice_and_resumed_on_any_number_of_ranks(
    tmp_path: Path, recipe: str, world_size: int, accumulation: int
) -> None:
    _check(tmp_path, recipe, world_size, accumulation)


# -- the settings of the run that is resumed -----------------------------------------------------------------


def test_a_run_is_resumed_with_the_settings_that_it_had(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "config.toml").write_text(to_toml(TrainConfig(steps=7, seed=3)))
    config = parse(["--resume", "--out", str(tmp_path), "--seed", "4"]).config
    assert config == TrainConfig(steps=7, seed=4, resume=True, out=tmp_path)


@pytest.mark.parametrize("left", ["metrics.jsonl", "checkpoints/step-00000005/manifest.json"])
@pytest.mark.parametrize("state", ["missing", "empty"])
def test_a_run_without_its_settings_is_not_resumed_with_the_defaults(
    tmp_path: Path, left: str, state: str
) -> None:
    (tmp_path / left).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / left).write_text("")
    if state == "empty":
        (tmp_path / "config.toml").write_text("")
    (tmp_path / "other.toml").write_text("steps = 9")
    resume = ["--resume", "--out", str(tmp_path)]
    line = f"resume: {tmp_path / 'config.toml'} is {state}, so the settings of this run are not known; "
    with pytest.raises(ConfigError) as raised:
        parse(resume)
    assert str(raised.value) == line + "give them with --config FILE"
    assert parse([*resume, "--config", str(tmp_path / "other.toml")]).config.steps == 9


def _die_before_the_first_step(config: TrainConfig, out: Path) -> None:
    metrics.RunLog = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment,misc]
    run_job(config, out)


def test_a_run_that_is_killed_before_its_first_line_has_left_its_settings_and_can_be_started_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, out = job(tmp_path, steps=1), tmp_path / "out"
    run_ranks(_die_before_the_first_step, 1, config, out, check=False)
    assert [path.name for path in out.iterdir()] == ["config.toml"]
    assert main(["--resume", "--out", str(out)]) == 2
    assert f"there is no run in {out} to continue; start one without --resume" in capsys.readouterr().err
    with choose_output(replace(read_toml(out / "config.toml"), out=out)) as again:
        assert run_ranks(run_job, 1, config, again)[0]["steps"] == 1


# -- through the command -----------------------------------------------------------------------------------


def _start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "thinwire", "train", *arguments],
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )


def _newest(out: Path) -> str:
    found = checkpoints_in(out / "checkpoints")
    return found[0].name if found else ""


def _wait_for_another_checkpoint(process: subprocess.Popen[str], out: Path) -> None:
    before, deadline = _newest(out), time.monotonic() + 180
    while _newest(out) == before:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _workers(launcher: int) -> list[int]:
    """The processes that were forked by the fork server of this launcher."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            children.setdefault(int(path.read_text().rpartition(")")[2].split()[1]), []).append(
                int(path.parent.name)
            )
        except OSError:  # it has ended
            continue
    return [worker for child in children.get(launcher, []) for worker in children.get(child, [])]


@pytest.mark.full
@pytest.mark.parametrize("victim", ["a worker", "the launcher", "the whole tree"])
def test_the_command_goes_on_bit_for_bit_after_a_kill(
    tmp_path: Path, victim: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As test_launch.py does with a shorter job, whichever process it is that dies."""
    config = replace(_job(tmp_path, "fp8-ef", 2), steps=40)
    (tmp_path / "job.toml").write_text(to_toml(config))
    out = tmp_path / "out"
    straight = run_ranks(run_job, 2, config, tmp_path / "straight", timeout=180)[0]

    process = _start("--config", str(tmp_path / "job.toml"), "--out", str(out))
    _wait_for_another_checkpoint(process, out)
    workers = _workers(process.pid)
    assert len(workers) == 2
    assert main(["--resume", "--out", str(out)]) == 2, "two runs never share a directory"
    assert f"out: {out} is in use by process {process.pid} on " in capsys.readouterr().err
    if victim == "a worker":
        os.kill(workers[1], signal.SIGKILL)
        _, errors = process.communicate(timeout=180)
        assert process.returncode == 1
        assert "was killed by SIGKILL" in errors
        assert str(workers[1]) in errors
    else:
        (process.kill if victim == "the launcher" else lambda: os.killpg(process.pid, signal.SIGKILL))()
        process.communicate(timeout=180)  # until the workers have closed their end of the pipes too
    assert not (out / "summary.json").exists()

    process = _start("--resume", "--out", str(out))
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    resumed = json.loads((out / "summary.json").read_text())
    assert {key: resumed[key] for key in SAME} == {key: straight[key] for key in SAME}
