"""Running statistics under local updates, and gradients that are accumulated."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD

import thinwire as tw
from tests.local_update.toys import Layers, apart, loss, plain, weights
from tests.support.ranks import run_ranks

EVERY = 3


class Normalised(nn.Module):
    """A layer with running statistics, a count and a constant."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(12)
        self.head = nn.Linear(12, 5)
        self.register_buffer("table", torch.arange(7.0))
        self.register_buffer("mask", torch.tensor([True, False]))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def buffers(model: nn.Module) -> dict[str, list[float]]:
    return plain(dict(model.named_buffers()))


def statistics(kind: str, sync_buffers: bool) -> dict[str, Any]:
    rank = dist.get_rank()
    model = Normalised()
    method: Any = tw.Pier(every=EVERY, warmup=0.5) if kind == "pier" else tw.DiLoCo(every=EVERY)
    module: nn.Module = DDP(model) if kind == "ddp" else model
    options: dict[str, Any] = {"total_steps": 12}
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        module = fully_shard(model, mesh=mesh["shard"])
        options["replicate"] = mesh["replicate"]
    optimizer = SGD(model.parameters(), lr=0.05)
    sync = tw.local_update(module, optimizer, method, sync_buffers=sync_buffers, **options)
    history = []
    for step in range(2 * EVERY + 1):
        optimizer.zero_grad()
        loss(module, step, rank).backward()
        optimizer.step()
        before = buffers(model)
        control = sync.ledger.sent_bytes(control=True)
        sync.step()
        history.append((before, buffers(model), sync.ledger.sent_bytes(control=True) - control))
    own = buffers(model)
    with sync.agreed():
        agreed = buffers(model)
    assert buffers(model) == own
    state = copy.deepcopy(sync.state_dict())
    sync.finish()
    finished = buffers(model)
    if sync_buffers:
        sync.load_state_dict(state)
        with sync.agreed():
            assert buffers(model) == agreed
        with pytest.raises(ValueError, match=r"has no buffer 'norm\.running_mean' of shape \(12,\)"):
            sync.load_state_dict({k: v for k, v in state.items() if k != "buffer.norm.running_mean"})
    sync.close()
    return {"history": history, "agreed": agreed, "finished": finished}


def several() -> dict[str, Any]:
    return {
        "bare": statistics("bare", True),
        "ddp": statistics("ddp", True),
        "pier": statistics("pier", True),
        "fsdp": statistics("fsdp", True),
        "own": statistics("bare", False),
        "accumulated": accumulated(),
    }


def accumulated() -> float:
    """Two micro-batches per step: how far a bare model ends from DDP, which averages their sum."""
    ends = []
    for wrapped in (False, True):
        model = Layers()
        module: nn.Module = DDP(model) if wrapped else model
        optimizer = SGD(model.parameters(), lr=0.1)
        sync = tw.local_update(module, optimizer, tw.PostLocalSGD(start=4, every=2))
        for step in range(8):
            optimizer.zero_grad()
            for micro in range(2):
                if wrapped and micro == 0:
                    with module.no_sync():  # type: ignore[operator]
                        loss(module, 2 * step, dist.get_rank()).backward()
                else:
                    loss(module, 2 * step + micro, dist.get_rank()).backward()
            optimizer.step()
            sync.step()
        ends.append(weights(model))
        sync.close()
    return apart(*ends)


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run_ranks(several, 2)


@pytest.mark.parametrize("kind", ["bare", "ddp", "pier", "fsdp"])
def test_running_statistics_are_averaged_at_the_end_of_a_round(two: list[dict[str, Any]], kind: str) -> None:
    a, b = (found[kind]["history"] for found in two)
    for step, ((before, after, sent), (other, _, _)) in enumerate(zip(a, b)):
        ended = step % EVERY == EVERY - 1
        for name in ("norm.running_mean", "norm.running_var"):
            assert before[name] != other[name]
            mean = (torch.tensor(before[name]) + torch.tensor(other[name])) / 2 if ended else before[name]
            torch.testing.assert_close(torch.tensor(after[name]), torch.as_tensor(mean))
        assert after["norm.num_batches_tracked"] == step + 1
        assert (sent > 0) == ended
    assert [now[1] for now in a[EVERY - 1 :: EVERY]] == [now[1] for now in b[EVERY - 1 :: EVERY]]


def test_the_agreed_buffers_are_those_of_the_last_round_and_finish_averages_the_rest(
    two: list[dict[str, Any]],
) -> None:
    for found in two:
        for kind in ("bare", "ddp", "pier", "fsdp"):
            assert found[kind]["agreed"] == found[kind]["history"][2 * EVERY - 1][1]
            assert found[kind]["finished"] == two[0][kind]["finished"] != found[kind]["agreed"]
            assert found[kind]["finished"]["table"] == list(range(7))
            assert found[kind]["finished"]["mask"] == [True, False]


def test_buffers_that_are_not_to_be_averaged_stay_with_their_rank(two: list[dict[str, Any]]) -> None:
    a, b = (found["own"]["finished"] for found in two)
    assert a["norm.running_mean"] != b["norm.running_mean"]


def test_accumulated_gradients_are_averaged_once_per_step(two: list[dict[str, Any]]) -> None:
    for found in two:
        assert found["accumulated"] < 1e-6


class Constant(Layers):
    """A table that no float sum of three thirds gives back, and a statistic that moves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(0.1, 7.3, 1000))
        self.register_buffer("statistic", torch.zeros(4))


def rounds(*, moves: bool, bad: int | None = None) -> tuple[list[int], bool, list[float]]:
    """Control bytes of each round; whether the table is as it was; the statistic at the end. With `bad`, rank 1's
    is not finite in that round."""
    model, rank = Constant(), dist.get_rank()
    table = model.table.clone()
    sync = tw.local_update(model, SGD(model.parameters(), lr=0.1), tw.LocalSGD(every=1))
    sent = []
    for number in range(3):
        if moves:
            model.statistic += float("nan") if number == bad and rank == 1 else 1.5 * rank
        before = sync.ledger.sent_bytes(control=True)
        sync.step()
        sent.append(sync.ledger.sent_bytes(control=True) - before)
    sync.close()
    return sent, torch.equal(model.table, table), model.statistic.tolist()


def on_three_ranks() -> list[Any]:
    return [rounds(moves=False), rounds(moves=True), rounds(moves=True, bad=1)]


def test_constants_cost_a_hash_and_stay_as_they_are_beside_a_statistic_that_moves() -> None:
    """Of two buffers, 8 bytes each to the two others; the statistic besides, 4 floats by a ring of three."""
    for still, moving, bad in run_ranks(on_three_ranks, 3):
        assert still == ([32, 32, 32], True, [0.0] * 4)
        assert moving == ([32 + 21] * 3, True, [4.5] * 4)
        assert bad[1:] == (True, [3.0] * 4)  # in the second round all went back to what they had agreed on
