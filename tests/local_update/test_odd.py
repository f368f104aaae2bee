"""Local updates of a model with every odd parameter at once, and the deaths of ranks."""

from __future__ import annotations

import copy
import os
import signal
from datetime import timedelta
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW

import thinwire as tw
from tests.local_update.toys import Layers, bits, train, weights
from tests.support.ranks import run_ranks
from thinwire.data_parallel.parameters import local_part

STEPS, EVERY = 13, 4
INT8 = tw.Routed(tw.Quantized("int8", feedback="error"))


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.one = nn.Parameter(torch.ones(1))
        self.seven = nn.Parameter(torch.randn(7))
        self.long = nn.Parameter(0.01 * torch.randn(4097))
        self.narrow = nn.Parameter(torch.randn(17, 3).bfloat16())
        self.wide = nn.Parameter(torch.randn(5).double())
        self.transposed = nn.Parameter(torch.randn(6, 5).t())
        self.channels_last = nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(4))
        self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("narrow_buffer", torch.zeros(3).bfloat16())
        self.register_buffer("empty_buffer", torch.zeros(0))
        self.register_buffer("bytes", torch.zeros(2, dtype=torch.uint8))

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.embedding(ids)).sum() * self.scalar
        squares = [p.double().pow(2).sum() for n, p in self.named_parameters() if n not in ("unused", "frozen")]
        return (logits + torch.stack(squares).sum()) * (1 + ids.double().mean())


METHODS = {
    "diloco": tw.DiLoCo(every=EVERY, reducer=INT8),
    "streaming": tw.StreamingDiLoCo(every=6, fragments=3, delay=1, reducer=INT8),
    "pier": tw.Pier(every=EVERY, warmup=0.3),
    "one group": tw.Pier(every=EVERY, warmup=0.3, groups=1, shard_reference=True, reducer=INT8),
    "narrow gradients": tw.PostLocalSGD(start=0, every=EVERY, groups=1, inner=INT8),
    "never": tw.PostLocalSGD(start=0, every=50, groups=1),
    "always": tw.PostLocalSGD(start=100, every=3),
}


def odd(method: Any, wrapped: bool) -> str:
    """Bits of the weights and buffers that a run ends with; frozen and unused ones must be as they were."""
    model, rank = Odd(), dist.get_rank()
    start = {name: getattr(model, name).clone() for name in ("frozen", "unused")}
    module = DDP(model, find_unused_parameters=True) if wrapped else model
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, weight_decay=0.0)
    sync = tw.local_update(module, optimizer, method, total_steps=STEPS)
    for step in range(STEPS):
        optimizer.zero_grad()
        module(torch.tensor([[(step + rank) % 8, (3 * step + rank) % 8]])).backward()
        optimizer.step()
        sync.step()
        model.narrow_buffer += rank
        model.bytes += rank
    sync.verify()
    sync.load_state_dict(copy.deepcopy(sync.state_dict()))
    sync.finish()
    sync.finish()
    ended = bits({**weights(model), **dict(model.named_buffers())})
    for name, value in start.items():
        assert torch.equal(getattr(model, name), value)
    optimizer.step()
    sync.step()
    sync.close()
    sync.close()
    if wrapped:  # its own averaging is back
        model.zero_grad()
        module(torch.tensor([[rank, 2]])).backward()
        gradient = model.seven.grad.clone()
        dist.all_reduce(gradient)
        torch.testing.assert_close(gradient, dist.get_world_size() * model.seven.grad)
    return ended


def all_methods() -> dict[tuple[str, bool], str]:
    pairs = product(METHODS, (False, True))
    return {(name, wrapped): odd(METHODS[name], wrapped) for name, wrapped in pairs}


def test_odd_parameters_and_buffers_end_alike_on_all_ranks() -> None:
    first, *others = run_ranks(all_methods, 3)
    for found in others:
        assert found == first
    assert len(set(first.values())) > len(METHODS)


def killed(method: tw.Pier | tw.DiLoCo, in_step: int, trained: bool) -> str:
    """Rank 3 dies in the second phase: when the others hear of it, and whether they hold the agreed weights."""
    rank, model, replicate = dist.get_rank(), Layers(), None
    if isinstance(method, tw.DiLoCo):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        module, replicate = fully_shard(model, mesh=mesh["shard"]), mesh["replicate"]
    else:
        module = DDP(model)
    optimizer = AdamW(model.parameters(), lr=0.01)
    sync = tw.local_update(
        module, optimizer, method, total_steps=40, replicate=replicate, timeout=timedelta(seconds=20)
    )

    def held() -> str:
        return bits({name: local_part(tensor) for name, tensor in weights(model).items()})

    agreed = ""
    for step in range(12):
        try:
            if step == in_step and rank == 3 and not trained:
                os.kill(os.getpid(), signal.SIGKILL)
            train(module, optimizer, step, rank)
            if step == in_step and rank == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            if sync.step():
                agreed = held()
        except tw.CollectiveError as error:
            raise AssertionError(f"step {step}|{held() == agreed}|{error}") from None
    return "finished"


@pytest.mark.parametrize("shared", [False, True])
def test_the_other_group_goes_back_to_the_agreed_weights_when_a_rank_dies(shared: bool) -> None:
    method = tw.Pier(every=EVERY, groups=2, warmup=0.1, shard_reference=shared)
    found = [
        str(result).strip().splitlines()[-1] for result in run_ranks(killed, 4, method, 9, False, check=False)
    ]
    for rank in (0, 1):
        assert f"AssertionError: step 11|True|rank {rank}: all_reduce of" in found[rank]
        assert "no answer from rank" in found[rank]
    assert "|rank 2: all_reduce of" in found[2]


@pytest.mark.parametrize(
    "method",
    [tw.Pier(every=EVERY, groups=2, warmup=0.1, shard_reference=True), tw.DiLoCo(every=EVERY)],
    ids=["shared", "sharded"],
)
def test_ranks_that_hold_parts_of_the_same_weights_all_go_back_when_one_hears_nothing(
    method: tw.Pier | tw.DiLoCo,
) -> None:
    """Rank 3 dies before it sends: ranks 0 and 2 have all of their part's mean, rank 1 has not."""
    found = [
        str(result).strip().splitlines()[-1] for result in run_ranks(killed, 4, method, 11, True, check=False)
    ]
    assert "step 11|True|rank 0: the mean of fragment 0 did not reach a rank that holds other parts" in found[0]
    assert "step 11|True|rank 1: all_reduce of" in found[1]
    assert "|rank 2: all_reduce of control values failed; no answer from rank 3" in found[2]


def unlike(rank: int) -> dict[str, str]:
    """What is said of arguments that differ between two ranks, or that no rank should give."""
    norm = nn.BatchNorm1d(3, track_running_stats=rank == 0)
    foreign = SGD([nn.Parameter(torch.ones(2))], lr=0.1) if rank else None
    alone, _ = dist.new_group([0]), dist.new_group([1])
    ring = init_device_mesh("cpu", (2,), mesh_dim_names=("all",))
    pier, diloco = tw.Pier(), tw.DiLoCo()
    return {
        "total_steps": refused(Layers(), pier, total_steps=100 + rank),
        "sync_buffers": refused(Layers(), diloco, sync_buffers=rank == 0),
        "buffers": refused(norm, diloco),
        "optimizer": refused(Layers(), diloco, foreign),
        "no optimizer": refused(Layers(), diloco, []),
        "parameters": refused(Layers(), diloco, list(Layers().parameters())),
        "no model": refused(None, diloco, []),
        "group": refused(DDP(Layers()), diloco, group=alone),
        "both": refused(Layers(), diloco, group=dist.group.WORLD, replicate=ring["all"]),
        "no mesh": refused(Layers(), diloco, replicate="all"),
        "no optimizer made": refused(Layers(), tw.DiLoCo(outer=lambda tensors: None)),
        "closure": refused(Layers(), tw.DiLoCo(outer=torch.optim.LBFGS)),
    }


def refused(model: Any, method: Any, optimizer: Any = None, **arguments: Any) -> str:
    optimizer = SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer
    try:
        tw.local_update(model, optimizer, method, **arguments)
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def two_ranks() -> tuple[dict[str, str], float]:
    return unlike(dist.get_rank()), resumed_with_tokens(dist.get_rank())


def resumed_with_tokens(rank: int) -> float:
    """A weight that ranks moved to 0 and 8, by 3 tokens and 1, after a run that stopped there ends."""
    state = None
    for _ in range(2):
        model = nn.Linear(1, 1, bias=False)
        sync = tw.local_update(model, SGD(model.parameters(), lr=0.1), tw.LocalSGD(every=5))
        if state is None:
            sync.step(tokens=torch.tensor(3 - 2 * rank))
            state = sync.state_dict()
        else:
            sync.load_state_dict(state)
            nn.init.constant_(model.weight, 8.0 * rank)
            sync.finish()
        sync.close()
    return float(model.weight.detach())


def test_arguments_that_do_not_fit_are_refused_on_every_rank_and_tokens_count_after_a_stop() -> None:
    (first, weight), (second, other) = run_ranks(two_ranks, 2)
    assert weight == other == pytest.approx(2.0)
    differs = "ValueError: local_update: {} differs between rank 0 and rank 1: use the same on every rank"
    assert first["total_steps"] == second["total_steps"] == differs.format("total_steps")
    assert first["sync_buffers"] == second["sync_buffers"] == differs.format("sync_buffers")
    assert "'buffer running_mean torch.float32 (3,)' on rank 0 and absent on rank 1" in first["buffers"]
    assert first["optimizer"].startswith("ValueError: local_update: rank 1 has an optimizer that does not fit")
    assert "the optimizer has 1 of 1 parameters that are not the model's" in second["optimizer"]
    assert "needs the optimizer that trains the model, got none" in first["no optimizer"]
    assert first["parameters"].startswith("TypeError: local_update needs the optimizer that trains the model")
    assert first["no model"] == "TypeError: local_update needs a model, an nn.Module, got NoneType"
    assert "DDP averages over its own process group: leave group out" in first["group"]
    assert "group must be a process group that this rank is in, got" in second["group"]
    assert "replicate says which ranks average: leave group out" in first["both"]
    assert "replicate is one dimension of a mesh" in first["no mesh"]
    assert "outer must make an optimizer whose step needs no closure, got NoneType" in first["no optimizer made"]
    assert "needs no closure, got LBFGS" in first["closure"]


@pytest.mark.parametrize("tokens", ["some", -1, float("nan"), torch.ones(2)])
def test_what_is_no_number_of_tokens_is_refused(tokens: Any) -> None:
    model = Layers()
    sync = tw.local_update(model, SGD(model.parameters(), lr=0.1), tw.DiLoCo())
    with pytest.raises(ValueError, match="step: tokens cannot be"):
        sync.step(tokens=tokens)
    assert sync.steps == 0
