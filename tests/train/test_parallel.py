"""`--parallel fsdp`: the model in shards trains as the whole one does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.ranks import run_ranks
from tests.train.jobs import job, lines, run_job
from thinwire.train.checkpoint.export import export
from thinwire.train.config import ConfigError, TrainConfig, check
from thinwire.train.metrics import parameter_hash


def config_of(tmp_path: Path, **changes: Any) -> TrainConfig:
    return job(tmp_path, steps=8, batch_size=12, accumulation=2, validation_every=3, **changes)


def both(config: TrainConfig, out: Path) -> dict[str, Any]:
    return {
        parallel: run_job(replace(config, parallel=parallel), out / parallel)  # type: ignore[arg-type]
        for parallel in ("ddp", "fsdp")
    }


@pytest.mark.parametrize("world_size", [2, 3])
def test_dense_averages_of_shards_are_those_of_the_whole_to_rounding(tmp_path: Path, world_size: int) -> None:
    """Validated and logged on the way; three ranks have validation samples of different numbers."""
    config = config_of(tmp_path, checkpoint_every=4)
    found = run_ranks(both, world_size, config, tmp_path, timeout=180)
    ddp, fsdp = found[0]["ddp"], found[0]["fsdp"]
    assert fsdp["val_loss"] == pytest.approx(ddp["val_loss"], rel=1e-5)
    assert len({of_rank["fsdp"]["param_hash"] for of_rank in found}) == 1
    losses = [[line["loss"] for line in lines(tmp_path / parallel)] for parallel in ("ddp", "fsdp")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert fsdp["parameters"] == ddp["parameters"]
    export(tmp_path / "fsdp", tmp_path / "exported")
    assert parameter_hash(AutoModelForCausalLM.from_pretrained(tmp_path / "exported")) == fsdp["param_hash"]


@pytest.mark.parametrize("recipe", ["nvfp4", "gift-fp8", "int4-loco"])
def test_compressed_shards_send_half_and_learn_as_well(tmp_path: Path, recipe: str) -> None:
    found = run_ranks(both, 2, config_of(tmp_path, recipe=recipe), tmp_path, timeout=180)
    ddp, fsdp = found[0]["ddp"], found[0]["fsdp"]
    assert fsdp["val_loss"] == pytest.approx(ddp["val_loss"], rel=0.01)
    assert 0.45 < fsdp["sent_bytes_per_rank"] / ddp["sent_bytes_per_rank"] < 0.7


def test_weights_of_whole_models_are_not_averaged_in_shards(tmp_path: Path) -> None:
    config = config_of(tmp_path, recipe="diloco", parallel="fsdp")
    with pytest.raises(ConfigError, match="parallel: recipe diloco averages weights of whole models: use ddp"):
        check(config, world_size=2)


def test_shards_are_a_part_of_the_whole(tmp_path: Path) -> None:
    for found in run_ranks(shard_sizes, 2, config_of(tmp_path, parallel="fsdp")):
        own, every = found
        assert 0.49 < own / every < 0.51


def shard_sizes(config: TrainConfig) -> tuple[int, int]:
    from thinwire.data_parallel.parameters import local_part
    from thinwire.train.run import assemble

    model = assemble(config, torch.device("cpu")).model
    return sum(local_part(p).numel() for p in model.parameters()), sum(p.numel() for p in model.parameters())
