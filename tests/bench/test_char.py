"""The model of `thinwire bench local-updates`: what it is, and that a job trains it."""

from __future__ import annotations

from pathlib import Path

import torch

from thinwire.bench import char
from thinwire.bench.jobs import Job, run_job
from thinwire.train.config import ModelConfig
from thinwire.train.model import Vocabulary


def test_it_is_the_same_for_a_seed_and_sees_no_later_byte() -> None:
    model, again, other = (char.build(ModelConfig(), Vocabulary(257), seed=seed) for seed in (3, 3, 4))
    weights = torch.nn.utils.parameters_to_vector(model.parameters())
    assert weights.numel() == 131_840
    assert torch.equal(weights, torch.nn.utils.parameters_to_vector(again.parameters()))
    assert not torch.equal(weights, torch.nn.utils.parameters_to_vector(other.parameters()))
    ids = torch.arange(128).view(2, 64)
    changed = ids.clone()
    changed[:, 40:] += 1
    here, there = model(ids).logits, model(changed).logits
    assert here.shape == (2, 64, 257)
    assert torch.equal(here[:, :40], there[:, :40])
    assert not torch.equal(here[:, 40:], there[:, 40:])


def test_a_job_trains_it_by_name(tmp_path: Path) -> None:
    job = Job("ddp", 0, 12, 12, 12, 2e-3, batch_size=4, model=char.NAME, sequence_length=64, warmup_steps=2)
    trained = run_job(job, tmp_path, "here", 2)
    [(step, loss)] = trained.losses
    assert step == 12
    assert 3.0 < loss < 5.5  # ln 257 is 5.55
    assert trained.sent_bytes == 4 * 131_840  # float32, and two ranks: 2 (W - 1) / W = 1
