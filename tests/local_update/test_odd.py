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
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW

import thinwire as tw
from tests.local_update.toys import Layers, bits, train, weights
from tests.support.ranks import run_ranks

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
    "narrow gradients": tw.Pier(every=EVERY, warmup=0.0, groups=1, inner=INT8),
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


def killed(method: tw.Pier) -> str:
    """Rank 3 dies in the second phase: when the others hear of it, and whether they hold the agreed weights."""
    rank, model = dist.get_rank(), Layers()
    optimizer = AdamW(model.parameters(), lr=0.01)
    module = DDP(model)
    sync = tw.local_update(module, optimizer, method, total_steps=40, timeout=timedelta(seconds=20))
    agreed = ""
    for step in range(12):
        if step == 9 and rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            train(module, optimizer, step, rank)
            if sync.step():
                agreed = bits(weights(model))
        except tw.CollectiveError as error:
            raise AssertionError(f"step {step}|{bits(weights(model)) == agreed}|{error}") from None
    return "finished"


@pytest.mark.parametrize("shared", [False, True])
def test_the_other_group_goes_back_to_the_agreed_weights_when_a_rank_dies(shared: bool) -> None:
    method = tw.Pier(every=EVERY, groups=2, warmup=0.1, shard_reference=shared)
    found = [str(result).strip().splitlines()[-1] for result in run_ranks(killed, 4, method, check=False)]
    for rank in (0, 1):
        assert f"AssertionError: step 11|True|rank {rank}: all_reduce of" in found[rank]
        assert "no answer from rank" in found[rank]
    assert "|rank 2: all_reduce of" in found[2]
