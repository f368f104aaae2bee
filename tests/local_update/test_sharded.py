"""Local updates of sharded models: FSDP2 with replicas, and tensor parallelism."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW

import thinwire as tw
from tests.local_update.shards import local, mesh_of, sharded, steps, whole
from tests.local_update.toys import Layers, apart, bits, loss, plain
from tests.support.ranks import run_ranks

STEPS = 24
PIER = tw.Pier(every=4, warmup=0.25)


def fsdp_and_ddp() -> dict[str, Any]:
    """Two replicas, each sharded over two ranks, and four DDP ranks in two groups, on the same data."""
    mesh, rank = mesh_of(("replicate", "shard")), dist.get_rank()
    constant = tw.Pier(
        every=4, warmup=0.0, groups=2, outer_lr=((0.0, 0.7),), outer_momentum=((0.0, 0.9),)
    )  # in groups of two, DiLoCo
    found: dict[str, Any] = {}
    for name, on_shards, on_groups in [
        ("pier", PIER, replace(PIER, groups=2)),
        ("diloco", tw.DiLoCo(every=4), constant),
    ]:
        model = sharded(Layers(seed=rank // 2), mesh["shard"])  # equal only because the first's are given to all
        optimizer = AdamW(model.parameters(), lr=0.01)
        sync = tw.local_update(model, optimizer, on_shards, total_steps=STEPS, replicate=mesh["replicate"])
        history = steps(model, optimizer, rank, STEPS, sync)
        sync.verify()
        sync.load_state_dict(copy.deepcopy(sync.state_dict()))
        found[name] = {"history": history, "weights": plain(whole(model)), "memory": sync.memory_bytes()}
        sync.close()
        grouped = Layers()
        optimizer = AdamW(grouped.parameters(), lr=0.01)
        ddp = DDP(grouped)
        sync = tw.local_update(ddp, optimizer, on_groups, total_steps=STEPS)
        steps(ddp, optimizer, rank, STEPS, sync)
        found[name]["in groups"] = plain(whole(grouped))
        sync.close()
    model = sharded(Layers(), mesh["shard"])
    optimizer = AdamW(model.parameters(), lr=0.01)
    streaming = tw.StreamingDiLoCo(every=8, fragments=2, reducer=tw.Quantized("fp8_e4m3"))
    sync = tw.local_update(model, optimizer, streaming, replicate=mesh["replicate"])
    steps(model, optimizer, rank, STEPS, sync)
    sync.finish()
    found["streaming"] = {"weights": plain(whole(model))}
    sync.close()
    found["evaluated"] = [evaluated(mesh, evaluations) for evaluations in (False, True)]
    found["narrow"] = {streaming: narrow(mesh, streaming) for streaming in (False, True)}
    found["one infinity"] = one_infinity(mesh)
    return found


def evaluated(mesh: DeviceMesh, evaluations: bool) -> tuple[list[str], list[float]]:
    """Bits after every step, and losses. An evaluation has FSDP2 gather weights, and keep those of the root."""
    model, rank = sharded(Layers(), mesh["shard"]), dist.get_rank()
    optimizer = AdamW(model.parameters(), lr=0.01)
    if evaluations:
        evaluate(model)
    link = tw.attach(model, tw.Dense(), replicate=mesh["replicate"])
    history = steps(model, optimizer, rank, 2)
    link.detach()
    losses = [evaluate(model)] if evaluations else []
    sync = tw.local_update(model, optimizer, tw.DiLoCo(every=4), replicate=mesh["replicate"])
    history += steps(model, optimizer, rank, 6, sync)
    if evaluations:
        evaluate(model)
        with sync.agreed():
            losses = [evaluate(model), evaluate(gathered(model))]
    history += steps(model, optimizer, rank, 1, sync)
    losses += [evaluate(model)] if evaluations else []
    sync.finish()
    losses += [evaluate(model), evaluate(gathered(model))] if evaluations else []
    sync.close()
    return history, losses


def evaluate(model: nn.Module) -> float:
    with torch.no_grad():
        return float(loss(model, 99, 0))


def gathered(model: nn.Module) -> Layers:
    bare = Layers()
    bare.load_state_dict(whole(model))
    return bare


class Narrow(nn.Module):
    """Of its one-row weights, a rank of two holds nothing."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(12, 1, bias=False), nn.Linear(1, rows, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).expand(-1, 5)  # type: ignore[no-any-return]


def narrow(mesh: DeviceMesh, streaming: bool) -> str:
    """Bits after training of which one rank of each replica holds nothing, or nothing of one fragment."""
    model = Narrow(5 if streaming else 1)
    method = tw.StreamingDiLoCo(every=4, fragments=(("first.*",), ("second.*",))) if streaming else PIER
    fully_shard(model, mesh=mesh["shard"])
    optimizer = AdamW(model.parameters(), lr=0.01)
    sync = tw.local_update(model, optimizer, method, total_steps=STEPS, replicate=mesh["replicate"])
    steps(model, optimizer, dist.get_rank(), 9, sync)
    sync.load_state_dict(copy.deepcopy(sync.state_dict()))
    sync.verify()
    sync.finish()
    sync.close()
    return bits(whole(model))


def one_infinity(mesh: DeviceMesh) -> dict[str, bool]:
    """Which parameters moved in a round in which one rank of one replica ends with one weight that is infinite."""
    model = Columns()
    parallelize_module(model, mesh["shard"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
    start = {name: local(p).clone() for name, p in model.named_parameters()}
    optimizer = AdamW(model.parameters(), lr=0.01, foreach=False)
    sync = tw.local_update(model, optimizer, tw.DiLoCo(every=2), replicate=mesh["replicate"])
    for step in range(2):
        optimizer.zero_grad()
        loss(model, step, mesh["replicate"].get_local_rank()).backward()
        optimizer.step()
        if step == 1 and dist.get_rank() == 1:
            local(model.first.weight)[0, 0] = torch.inf
        sync.step()
    sync.close()
    return {name: not torch.equal(local(p), start[name]) for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def shards() -> list[dict[str, Any]]:
    return run_ranks(fsdp_and_ddp, 4)


@pytest.mark.parametrize("method", ["pier", "diloco"])
def test_a_sharded_replica_is_a_group(shards: list[dict[str, Any]], method: str) -> None:
    """And its anchors and outer momentum are shards, too."""
    numel = sum(p.numel() for p in Layers().parameters())
    for found in shards:
        assert apart(found[method]["weights"], found[method]["in groups"]) < 1e-5
        assert found[method]["memory"] == pytest.approx(8 * numel / 2, rel=0.1)


def test_ranks_with_the_same_shards_agree_after_a_round(shards: list[dict[str, Any]]) -> None:
    for step in range(STEPS):
        for a, b in ((0, 2), (1, 3)):
            for method, alike in (("pier", 6), ("diloco", 0)):
                equal = shards[a][method]["history"][step] == shards[b][method]["history"][step]
                assert equal == (step < alike or step % 4 == 3)
    assert all(found["streaming"] == shards[0]["streaming"] for found in shards)


def test_an_evaluation_sees_the_agreed_weights_and_changes_nothing(shards: list[dict[str, Any]]) -> None:
    for found in shards:
        (without, _), (history, losses) = found["evaluated"]
        assert history == without
        agreed, agreed_gathered, between, finished, finished_gathered = losses
        assert agreed == pytest.approx(agreed_gathered, abs=1e-6)
        assert finished == pytest.approx(finished_gathered, abs=1e-6)
        assert between != finished


def test_a_rank_may_hold_nothing_of_a_narrow_model(shards: list[dict[str, Any]]) -> None:
    assert all(found["narrow"] == shards[0]["narrow"] for found in shards)


def test_one_weight_that_is_not_finite_moves_no_part_of_a_sharded_replica(shards: list[dict[str, Any]]) -> None:
    """Else the layers that tensor parallelism leaves whole would come apart."""
    for found in shards:
        assert not any(found["one infinity"].values())


class Columns(nn.Module):
    """Two layers, of which tensor parallelism cuts one by columns and the other by rows, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.norm = nn.Linear(12, 16), nn.Linear(16, 5), nn.LayerNorm(12)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(self.norm(x)).tanh())  # type: ignore[no-any-return]


def tensor_parallel(method: tw.Pier | tw.DiLoCo) -> dict[str, Any]:
    """2 TP x 2 DP on four ranks: the weights put together."""
    mesh = mesh_of(("dp", "tp"))
    model = Columns()
    parallelize_module(model, mesh["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
    optimizer = AdamW(model.parameters(), lr=0.01, foreach=False)
    sync = tw.local_update(model, optimizer, method, total_steps=STEPS, replicate=mesh["dp"])
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, step, mesh["dp"].get_local_rank()).backward()
        optimizer.step()
        sync.step()
    sync.verify()
    result = plain(whole(model))
    sync.close()
    return result


def data_parallel(method: tw.Pier | tw.DiLoCo) -> dict[str, Any]:
    """The same with whole models on two ranks."""
    model = Columns()
    optimizer = AdamW(model.parameters(), lr=0.01, foreach=False)
    sync = tw.local_update(model, optimizer, method, total_steps=STEPS)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, step, dist.get_rank()).backward()
        optimizer.step()
        sync.step()
    result = plain(whole(model))
    sync.close()
    return result


@pytest.mark.parametrize("method", [PIER, tw.DiLoCo(every=4)])
def test_tensor_parallel_layers_end_as_whole_ones(method: tw.Pier | tw.DiLoCo) -> None:
    """Identity 4: the outer step acts on each rank's own shards."""
    expected = run_ranks(data_parallel, 2, method)[0]
    for found in run_ranks(tensor_parallel, 4, method):
        assert apart(found, expected) < 1e-5
