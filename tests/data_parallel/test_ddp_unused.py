"""Parameters that some steps or ranks leave unused, and what is owed to them meanwhile; and buckets, on which
no result depends. On 3 ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from tests.data_parallel.toys import (
    FP8,
    MANY_BUCKETS,
    REDUCERS,
    parameter_bits,
    residuals,
    train,
    trained,
    vectors,
)
from tests.support.ranks import run_ranks

FORMATS = ("fp8_e4m3", "fp8_e5m2_pow2", "fp8_e4m3_span", "bf16")


def _three_ranks() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for format in FORMATS:
        reducer = tw.Quantized(format, feedback="error")
        found[f"buckets {format}"] = [trained(reducer, bucket_cap_mb=cap) for cap in (25, MANY_BUCKETS, 0.0005)]
    for name in ("fp8", "routed"):
        for kept in (False, True):
            for options in ({}, {"gradient_as_bucket_view": True}):
                found[f"balance {name} {kept} {len(options)}"] = _balance(REDUCERS[name], not kept, options)
    found["frozen"] = _frozen_for_a_while()
    found["static unused"] = _unused_in_a_static_graph()
    return found


class Spare(nn.Module):
    """`used` tells whether the second layer takes part."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(20, 30)
        self.spare = nn.Linear(20, 30)
        self.used = True

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + (self.spare(x) if self.used else 0)


def _spare() -> Spare:
    torch.manual_seed(1)
    return Spare()


USED: list[tuple[str, Callable[[int], bool]]] = [
    ("by all", lambda rank: True),
    ("by all", lambda rank: True),
    ("by none", lambda rank: False),
    ("by none", lambda rank: False),
    ("by rank 1", lambda rank: rank == 1),
    ("by all but rank 1, with a NaN", lambda rank: rank != 1),
    ("by all", lambda rank: True),
]


def _balance(reducer: Any, set_to_none: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Per step: the gradient of the spare weight and whether its residual stayed. Over all steps, by
    parameter: the largest error of sum of applied means + sum of residuals - sum of exact means."""
    ddp = DDP(_spare(), find_unused_parameters=True, bucket_cap_mb=MANY_BUCKETS, **options)
    link = tw.attach(ddp, reducer)
    model = ddp.module
    for layer in (model.layer, model.spare):  # so that the worker has averaged the first bucket before the last
        layer.weight.register_hook(lambda gradient: time.sleep(0.01))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    owed = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters()}
    spare = []
    for step, (_, used) in enumerate(USED):
        model.used = used(dist.get_rank())
        broken = step == 5 and dist.get_rank() == 1
        x = vectors(step) * (float("nan") if broken else 1)
        exact = _exact_means(model, vectors(step))
        before = residuals(link)
        optimizer.zero_grad(set_to_none=set_to_none)
        ddp(x).square().mean().backward()
        gradient = model.spare.weight.grad
        kept = torch.equal(residuals(link)["spare.weight"], before["spare.weight"])
        spare.append((None if gradient is None else float(gradient.norm()), kept))
        if step == 5:
            continue  # as a trainer does, on all ranks
        for name, parameter in model.named_parameters():
            owed[name] += exact[name]
            if parameter.grad is not None:
                owed[name] -= parameter.grad
        optimizer.step()
    for name, residual in residuals(link).items():
        total = residual.double()
        dist.all_reduce(total)
        owed[name] -= total
    return {"spare": spare, "lost": {name: float(owed[name].abs().max()) for name in residuals(link)}}


def _exact_means(model: Spare, x: Tensor) -> dict[str, Tensor]:
    """The mean over ranks of local gradients, in float64."""
    named = dict(model.named_parameters())
    gradients = torch.autograd.grad(model(x).square().mean(), list(named.values()), allow_unused=True)
    means = {}
    for (name, parameter), gradient in zip(named.items(), gradients):
        mean = torch.zeros_like(parameter) if gradient is None else gradient
        means[name] = mean.double() / dist.get_world_size()
        dist.all_reduce(means[name])
    return means


def _frozen_for_a_while() -> tuple[list[bool], list[bool], str]:
    """A layer frozen in steps 2 and 3 of 6: whether it had no gradient, whether its residual stayed."""
    ddp = DDP(_spare(), find_unused_parameters=True)
    link = tw.attach(ddp, FP8)
    absent, kept = [], []
    for step in range(6):
        ddp.module.spare.requires_grad_(step not in (2, 3))
        before = residuals(link)["spare.weight"]
        train(ddp, range(step, step + 1), batch=vectors)
        absent.append(ddp.module.spare.weight.grad is None)
        kept.append(torch.equal(residuals(link)["spare.weight"], before))
    return absent, kept, parameter_bits(ddp.module)


def _unused_in_a_static_graph() -> tuple[bool, bool]:
    """A parameter that a static graph never uses: no gradient, no residual but zero."""
    ddp = DDP(_spare(), static_graph=True)
    ddp.module.used = False
    link = tw.attach(ddp, FP8)
    train(ddp, 4, batch=vectors)
    memory = residuals(link)
    return ddp.module.spare.weight.grad is None, bool(
        memory["layer.weight"].any() and not memory["spare.weight"].any()
    )


@pytest.fixture(scope="module")
def three() -> list[dict[str, Any]]:
    return run_ranks(_three_ranks, 3, timeout=120)


@pytest.mark.parametrize("format", FORMATS)
def test_the_result_does_not_depend_on_the_buckets(three: list[dict[str, Any]], format: str) -> None:
    for rank in three:
        assert len(set(rank[f"buckets {format}"])) == 1


BALANCES = [(name, kept, views) for name in ("fp8", "routed") for kept in (False, True) for views in (0, 1)]


@pytest.mark.parametrize(("reducer", "zeros", "views"), BALANCES)
def test_nothing_is_lost_whoever_uses_a_parameter(
    three: list[dict[str, Any]], reducer: str, zeros: bool, views: int
) -> None:
    for rank in three:
        lost = rank[f"balance {reducer} {zeros} {views}"]["lost"]
        assert set(lost) >= {"layer.weight", "spare.weight"}
        assert max(lost.values()) < 1e-6


@pytest.mark.parametrize("reducer", ["fp8", "routed"])
def test_a_parameter_unused_on_all_ranks_has_no_gradient_and_keeps_its_residual(
    three: list[dict[str, Any]], reducer: str
) -> None:
    for rank in three:
        spare = rank[f"balance {reducer} False 0"]["spare"]
        assert [gradient is None for gradient, _ in spare] == [who == "by none" for who, _ in USED]
        assert [kept for _, kept in spare] == [who == "by none" or "NaN" in who for who, _ in USED]


def test_a_parameter_used_on_one_rank_gets_the_mean_on_all(three: list[dict[str, Any]]) -> None:
    gradients = {rank["balance fp8 False 0"]["spare"][4][0] for rank in three}
    assert len(gradients) == 1
    assert gradients.pop() > 0


def test_a_parameter_frozen_for_a_while_keeps_its_residual_until_it_is_thawed(three: list[dict[str, Any]]) -> None:
    for rank in three:
        frozen = [False, False, True, True, False, False]
        assert rank["frozen"] == (frozen, frozen, three[0]["frozen"][2])


def test_a_parameter_that_a_static_graph_never_uses_is_left_alone(three: list[dict[str, Any]]) -> None:
    assert [rank["static unused"] for rank in three] == [(True, True)] * 3
