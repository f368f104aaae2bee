"""What a script does to a model or to a state between two rounds is right, or refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW

import thinwire as tw
from tests.local_update.shards import mesh_of, sharded, whole
from tests.local_update.toys import Layers, bits, loss, plain, train, weights
from tests.support.ranks import run_ranks


def tokens_on_shards() -> dict[str, list[float]]:
    """Two replicas of 40 tokens, spread unevenly over their ranks, at 0 and at 8."""
    mesh, rank = mesh_of(("replicate", "shard")), dist.get_rank()
    model = sharded(Layers(), mesh["shard"])
    optimizer = SGD(model.parameters(), lr=0.0)
    sync = tw.local_update(model, optimizer, tw.LocalSGD(every=1), replicate=mesh["replicate"])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(8.0 * (rank // 2))
    sync.step(tokens=[30, 10, 10, 30][rank])
    sync.close()
    return plain(whole(model))


def test_ranks_of_a_replica_count_together() -> None:
    for found in run_ranks(tokens_on_shards, 4):
        for name, values in found.items():
            assert torch.as_tensor(values).allclose(torch.tensor(4.0)), name


def ddp_closed_in_a_round() -> list[str]:
    rank = dist.get_rank()
    model = Layers()
    ddp = DDP(model)
    optimizer = SGD(model.parameters(), lr=0.1)
    sync = tw.local_update(ddp, optimizer, tw.LocalSGD(every=4))
    for step in range(6):
        train(ddp, optimizer, step, rank)
        sync.step()
    sync.close()
    found = [bits(weights(model))]
    sync = tw.local_update(ddp, optimizer, tw.LocalSGD(every=4))
    found.append(bits(weights(model)))
    train(ddp, optimizer, 6, rank)
    sync.step()
    sync.finish()
    sync.verify()
    sync.close()
    return [*found, bits(weights(model))]


def test_a_ddp_model_that_was_left_within_a_round_starts_equal() -> None:
    one, other = run_ranks(ddp_closed_in_a_round, 2)
    assert one[0] != other[0]
    assert one[1] == other[1] == one[0]
    assert one[2] == other[2]


def slow_momentum_of_unlike_schedules() -> str:
    rank = dist.get_rank()
    model = Layers()
    optimizer = SGD(model.parameters(), lr=0.1)
    sync = tw.local_update(model, optimizer, tw.SlowMo(every=2))
    for step in range(8):
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + step * rank)
        train(model, optimizer, step, rank)
        sync.step()
    sync.verify()
    sync.close()
    return bits(weights(model))


def test_slow_momentum_is_the_same_where_inner_learning_rates_are_not() -> None:
    assert len(set(run_ranks(slow_momentum_of_unlike_schedules, 2))) == 1


class Assigned(nn.Module):
    """Assigns its buffer anew in every step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(12, 5)
        self.register_buffer("seen", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        self.seen = 0.9 * self.seen + y.detach().mean(0)
        return y


def replaced_buffers(narrow: bool) -> list[list[float]]:
    rank = dist.get_rank()
    model = Assigned()
    optimizer = SGD(model.parameters(), lr=0.1)
    sync = tw.local_update(model, optimizer, tw.LocalSGD(every=3))
    if narrow:
        model.seen = model.seen.to(torch.bfloat16)
    for step in range(4):
        train(model, optimizer, step, rank)
        sync.step()
    with sync.agreed():
        agreed = model.seen.tolist()
    sync.finish()
    finished = model.seen.tolist()
    sync.close()
    return [agreed, finished]


@pytest.mark.parametrize("narrow", [False, True])
def test_buffers_that_are_replaced_are_averaged_all_the_same(narrow: bool) -> None:
    one, other = run_ranks(replaced_buffers, 2, narrow)
    assert one == other
    assert one[0] != one[1]


def unused(method: Any) -> bool:
    """Whether a layer that nobody uses stays as it is under weight decay."""
    model = Layers()
    model.spare = nn.Linear(3, 3)  # type: ignore[assignment]
    before = model.spare.weight.detach().clone()
    optimizer = AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    sync = tw.local_update(model, optimizer, method, total_steps=12)
    for step in range(4):
        train(model, optimizer, step, dist.get_rank())
        sync.step()
    sync.close()
    return torch.equal(model.spare.weight, before)


def test_between_rounds_a_parameter_without_a_gradient_is_left_alone() -> None:
    assert run_ranks(unused, 2, tw.PostLocalSGD(start=0.0, every=2)) == [True, True]
    assert run_ranks(unused, 2, tw.DiLoCo(every=2)) == [True, True]


def narrow_progress() -> tuple[float, float]:
    """One rank of four moves by the smallest step of bfloat16 in each round: a quarter of it on average."""
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    nn.init.ones_(model.weight)
    optimizer = SGD(model.parameters(), lr=0.0)
    sync = tw.local_update(model, optimizer, tw.LocalSGD(every=1))
    for _ in range(12):
        if dist.get_rank() == 1:
            with torch.no_grad():
                model.weight.add_(2.0**-7)
        sync.step()
    anchor = float(sync.state_dict()["anchor.weight"])
    sync.close()
    return anchor, float(model.weight)


def test_what_a_narrow_parameter_rounds_away_is_not_lost() -> None:
    for anchor, weight in run_ranks(narrow_progress, 4):
        assert anchor == pytest.approx(1 + 12 * 2.0**-9, rel=1e-6)
        assert weight == pytest.approx(anchor, abs=2.0**-8)


def refusals() -> dict[str, str]:
    model, rank = Layers(), dist.get_rank()
    optimizer = SGD(model.parameters(), lr=0.1)
    found = {}

    def refused(what: str, kind: type[Exception], call: Any) -> None:
        with pytest.raises(kind) as error:
            call()
        found[what] = str(error.value)

    refused("sync_buffers", TypeError, lambda: tw.local_update(model, optimizer, tw.DiLoCo(), sync_buffers="no"))  # type: ignore[arg-type]
    model.head.requires_grad_(False)
    sync = tw.local_update(model, optimizer, tw.LocalSGD(every=2))
    train(model, optimizer, 0, rank)
    sync.step()
    state = sync.state_dict()
    model.head.requires_grad_(True)
    refused("unfrozen", ValueError, sync.step)
    model.head.requires_grad_(False)
    refused("a key", ValueError, lambda: sync.load_state_dict({k: v for k, v in state.items() if k != "sent"}))
    sync.load_state_dict(copy.deepcopy(state))
    sync.close()
    refused("closed", RuntimeError, sync.finish)
    for what, method in {"method": tw.SlowMo(every=2), "every": tw.LocalSGD(every=3)}.items():
        other = tw.local_update(model, optimizer, method)
        refused(what, ValueError, lambda other=other: other.load_state_dict(state))
        other.close()
    pier = tw.local_update(model, optimizer, tw.Pier(every=4, warmup=0.5), total_steps=8)
    train(model, optimizer, 0, rank)
    pier.step()
    loss(model, 1, rank).backward()
    refused("skipped", RuntimeError, pier.step)
    pier.close()
    return found


def test_what_would_be_silently_wrong_is_refused() -> None:
    for found in run_ranks(refusals, 2):
        assert "sync_buffers must be True or False, got 'no'" in found["sync_buffers"]
        assert "'head.weight' takes gradients now and was frozen" in found["unfrozen"]
        assert found["a key"] == "the local-update state has no 'sent'"
        assert found["closed"].startswith("finish: this local update was closed")
        assert "'method': 'LocalSGD'" in found["method"]
        assert "'method': 'SlowMo'" in found["method"]
        assert "'every': 2" in found["every"]
        assert "no optimizer took a step since the last one" in found["skipped"]
