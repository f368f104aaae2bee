"""`thinwire train` under recipes with local updates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import RankFailed, run_ranks
from tests.train.jobs import CPU, job, lines, run_job, run_job_until, run_job_with_bad_loss
from thinwire.train.checkpoint.checkpointer import checkpoints_in
from thinwire.train.checkpoint.export import main as export
from thinwire.train.config import ConfigError, LocalUpdateConfig, TrainConfig, check
from thinwire.train.loop import training_step
from thinwire.train.metrics import parameter_hash
from thinwire.train.progress import Progress
from thinwire.train.run import assemble

EVERY = 4


def config_of(tmp_path: Path, recipe: str, steps: int = 18, **changes: Any) -> TrainConfig:
    return job(
        tmp_path, recipe=recipe, steps=steps, batch_size=8, local_update=LocalUpdateConfig(every=EVERY), **changes
    )


def several(base: TrainConfig, out: Path) -> dict[str, Any]:
    """Many jobs on the same ranks."""
    found: dict[str, Any] = {}
    for recipe in ("diloco", "ddp", "pier", "diloco-int8", "local-sgd", "post-local-sgd", "slowmo"):
        settings = LocalUpdateConfig(every=None if recipe == "ddp" else EVERY)
        found[recipe] = run_job(replace(base, recipe=recipe, local_update=settings), out / recipe)
    group = replace(base, recipe="pier", local_update=LocalUpdateConfig(every=EVERY, groups=1))
    found["one group"] = run_job(group, out / "one group")
    outcome = run_job_until(base, out / "stopped", 1, 1)
    found["stopped at"] = (outcome.step, outcome.finished)
    found["went on"] = run_job(replace(base, resume=True), out / "stopped")
    found["bad"] = run_job_with_bad_loss(base, out / "bad", 1, (5,))
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    tmp_path = tmp_path_factory.mktemp("runs")
    return tmp_path, run_ranks(several, 2, config_of(tmp_path, "diloco"), tmp_path)


LOCAL = ("pier", "diloco", "diloco-int8", "local-sgd", "post-local-sgd", "slowmo", "one group", "bad")


@pytest.mark.parametrize("recipe", LOCAL)
def test_ranks_end_alike_although_the_last_round_is_not_a_whole_one(
    runs: tuple[Path, list[dict[str, Any]]], recipe: str
) -> None:
    _, (first, second) = runs
    assert first[recipe]["param_hash"] == second[recipe]["param_hash"]
    assert first[recipe]["val_loss"] == second[recipe]["val_loss"] < 6
    assert first[recipe]["steps"] == 18
    assert first[recipe]["tokens"] == first["ddp"]["tokens"]


def test_bytes_are_those_of_the_rounds_and_of_the_first_steps(runs: tuple[Path, list[dict[str, Any]]]) -> None:
    """Of two ranks each sends every number once: in four whole rounds and the last two steps, in Pier's first step
    and its rounds that begin in it, in half of the steps of post-local SGD."""
    _, (found, _) = runs
    n = 4 * found["ddp"]["parameters"]
    assert found["ddp"]["sent_bytes_per_rank"] == 18 * n
    for recipe in ("diloco", "local-sgd", "slowmo"):
        assert found[recipe]["sent_bytes_per_rank"] == 5 * n
        assert found[recipe]["sent_bytes_between_groups_per_rank"] == 5 * n
    assert found["pier"]["sent_bytes_per_rank"] == (1 + 5) * n
    assert found["post-local-sgd"]["sent_bytes_per_rank"] == (9 + 3) * n
    assert found["one group"]["sent_bytes_per_rank"] == (18 + 5) * n
    assert found["one group"]["sent_bytes_between_groups_per_rank"] == (1 + 5) * n
    assert found["diloco-int8"]["sent_bytes_per_rank"] < 0.3 * 5 * n


def test_a_bad_loss_costs_one_step_of_one_rank(runs: tuple[Path, list[dict[str, Any]]]) -> None:
    tmp_path, (found, _) = runs
    assert found["bad"]["skipped_steps"] == 1
    assert found["diloco"]["skipped_steps"] == 0
    losses = [line["loss"] for line in lines(tmp_path / "bad")]
    assert [loss is None for loss in losses] == [step == 5 for step in range(18)]


def test_a_request_to_stop_is_heard_by_all_at_the_end_of_a_round(runs: tuple[Path, list[dict[str, Any]]]) -> None:
    _, ranks = runs
    for found in ranks:
        assert found["stopped at"] == (EVERY, False)
        for key in ("param_hash", "val_loss", "tokens", "sent_bytes_per_rank"):
            assert found["went on"][key] == found["diloco"][key]


def test_one_group_trains_as_ddp_does_until_rounding(runs: tuple[Path, list[dict[str, Any]]]) -> None:
    """Its outer optimizer is not plain, so only the first round, in which nothing else differs, is the same."""
    tmp_path, _ = runs
    ddp, one = ([line["loss"] for line in lines(tmp_path / run)] for run in ("ddp", "one group"))
    assert one[:EVERY] == pytest.approx(ddp[:EVERY], rel=1e-6)


def within_a_round(config: TrainConfig, out: Path) -> tuple[str, str]:
    """Hashes of the agreed and of this rank's own weights six steps into the run, and a checkpoint from there."""
    from thinwire.train.checkpoint.checkpointer import Checkpointer
    from thinwire.train.checkpoint.state import TrainState

    run, progress = assemble(config, CPU), Progress()
    for _ in range(6):
        assert training_step(run, progress, lambda: False) is not None
        progress.step += 1
    assert run.sync is not None
    with run.sync.agreed():
        agreed = parameter_hash(run.model)
    saver = Checkpointer(out / "checkpoints", identity=run.identity, tokenizer=run.train_data.tokenizer)
    saver.save(6, TrainState(run.model, run.optimizers, run.sync, progress.numbers()))
    saver.wait()
    saver.close()
    own = parameter_hash(run.model)
    run.averaging.detach()
    return agreed, own


def test_export_gives_the_weights_that_were_agreed_on(tmp_path: Path) -> None:
    import transformers

    first, second = run_ranks(within_a_round, 2, config_of(tmp_path, "diloco"), tmp_path / "out")
    assert first[0] == second[0]
    assert len({first[0], first[1], second[1]}) == 3
    assert export([str(tmp_path / "out"), str(tmp_path / "exported")]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert parameter_hash(model) == first[0]


def test_other_numbers_of_ranks_are_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path, "diloco", steps=5, checkpoint_every=4)
    run_ranks(run_job, 2, config, tmp_path / "out")
    longer = replace(config, resume=True)
    (failure, *_) = run_ranks(run_job, 3, longer, tmp_path / "out", check=False)
    assert isinstance(failure, RankFailed)
    assert "was saved on 2 ranks, now 3: under local updates every rank has weights of its own" in str(failure)
    assert len(checkpoints_in(tmp_path / "out" / "checkpoints")) == 2


@pytest.mark.parametrize(
    ("recipe", "settings", "sentence"),
    [
        ("nvfp4", {"every": 5}, "local_update.every: recipe nvfp4 has no such setting"),
        ("diloco", {"groups": 2}, "local_update.groups: recipe diloco has no such setting"),
        ("diloco", {"every": 0}, "local_update.every: every must be a whole number of at least 1, got 0"),
        ("streaming-diloco", {"every": 3}, "local_update.every: fragments must be 1 to every, 3, got 4"),
        ("pier", {"groups": 3}, "local_update.groups: 2 workers cannot be cut into 3 equal groups"),
        ("pier", {"groups": 0}, "local_update.groups: groups must be at least 1, got 0"),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_key(
    tmp_path: Path, recipe: str, settings: dict[str, int], sentence: str
) -> None:
    config = replace(config_of(tmp_path, recipe), local_update=LocalUpdateConfig(**settings))
    with pytest.raises(ConfigError) as raised:
        check(config, world_size=2)
    assert str(raised.value) == sentence


def test_muloco_trains_with_muon(tmp_path: Path) -> None:
    assert run_ranks(optimizers, 2, config_of(tmp_path, "muloco")) == [["Muon", "AdamW"]] * 2


def optimizers(config: TrainConfig) -> list[str]:
    run = assemble(config, CPU)
    run.averaging.detach()
    return [type(optimizer).__name__ for optimizer in run.optimizers]
