"""Every optimizer trains language models of every architecture."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import thinwire as tw
from tests.optim.tiny_models import CONFIGS, tiny

OPTIMIZERS: dict[str, Any] = {
    "muon": tw.optim.Muon,
    "normuon": tw.optim.NorMuon,
    "dion": partial(tw.optim.Dion, rank_fraction=0.25),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_loss_falls(kind: str) -> None:
    ids = (torch.arange(48).view(4, 12) * 7) % 96
    for name, make in OPTIMIZERS.items():
        torch.manual_seed(0)
        model = tiny(kind)
        optimizer = make(tw.optim.param_groups(model, split_heads=name == "normuon"), lr=0.02)
        losses = []
        for _ in range(6):
            optimizer.zero_grad()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0] - 0.02, (name, losses)
