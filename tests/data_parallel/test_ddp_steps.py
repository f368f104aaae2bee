"""A link under everything a step can be: accumulation, several backwards or models, checkpointing, loss
scaling, uneven inputs. Each from the first step, with buckets rebuilt after it."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import thinwire as tw
from tests.data_parallel.toys import (
    FP8,
    MANY_BUCKETS,
    REDUCERS,
    Layers,
    bits,
    layers,
    memory_bits,
    numbers,
    parameter_bits,
    toy,
    train,
    trained,
    vectors,
)
from tests.support.ranks import run_ranks

BOTH = [None, *REDUCERS]
"""Plain DDP and every reducer."""


def _two_ranks() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in BOTH:
        reducer = REDUCERS[name] if name else None
        found[f"big batch {name}"] = _accumulated(reducer, 1), _accumulated(reducer, 4)
        found[f"twice {name}"] = _two_backwards_per_step(reducer)
        if name != "routed":
            found[f"checkpoint {name}"] = [_checkpointed(reducer, mode) for mode in (None, False, True)]
        found[f"join {name}"] = _joined(reducer)
    for name, reducer in REDUCERS.items():
        found[f"scale {name}"] = [_scaled(reducer, scale) for scale in (1.0, 1024.0)]
        found[f"overflow {name}"] = _scaler_overflow(reducer)
        found[f"models {name}"] = _two_models(reducer)
    found["views"] = trained(FP8, gradient_as_bucket_view=True), trained(FP8)
    found["static"] = trained(FP8, static_graph=True), trained(FP8)
    found["join verify"] = _joined_and_verified()
    found["join divide"] = _joined_with_another_divisor()
    return found


def _accumulated(reducer: Any, micro_steps: int) -> tuple[str, str]:
    """A gradient of small integers, exact in any order: the bits of it and of the error memory."""
    torch.manual_seed(1)
    ddp = DDP(nn.Linear(40, 130, bias=False))
    link = tw.attach(ddp, reducer) if reducer else None
    for step in range(3):
        ddp.zero_grad()
        x, factor = ((numbers(10 * step + i, width, count=8) * 4).round() for i, width in enumerate((40, 130)))
        for i, (a, b) in enumerate(zip(x.chunk(micro_steps), factor.chunk(micro_steps))):
            with ddp.no_sync() if i < micro_steps - 1 else contextlib.nullcontext():
                (ddp(a) * b).sum().backward()
    return bits(ddp.module), memory_bits(link)


def _two_backwards_per_step(reducer: Any) -> tuple[str, int, int]:
    """Two synchronised backward passes add up: gradient bits, bytes of a one-backward step and of this one."""
    ddp = DDP(layers(20, 30, 8), bucket_cap_mb=MANY_BUCKETS)
    link = tw.attach(ddp, reducer) if reducer else None
    sent = [0]
    for step in range(4):
        ddp.zero_grad()
        for backward in range(1 + step % 2):
            ddp(vectors(10 * step + backward)).square().mean().backward()
        sent.append(link.ledger.sent_bytes() if link else 0)
    return bits(ddp.module), sent[3] - sent[2], sent[4] - sent[3]


class Checkpointed(Layers):
    """Layers recomputed in the backward pass, through one way or the other (None: not at all)."""

    reentrant: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
            x = x.tanh()
        return x


def _checkpointed(reducer: Any, reentrant: bool | None) -> list[str]:
    def build() -> nn.Module:
        torch.manual_seed(1)
        model = Checkpointed(20, 30, 31, 8)
        model.reentrant = reentrant
        return model

    def batch(step: int) -> Tensor:
        return vectors(step).requires_grad_()

    return [trained(reducer, build=build, batch=batch, static_graph=static) for static in (False, True)]


def _joined(reducer: Any) -> str:
    """Rank 1 has three batches more than rank 0."""
    ddp = DDP(toy(), bucket_cap_mb=MANY_BUCKETS)
    if reducer:
        tw.attach(ddp, reducer)
    with Join([ddp]):
        train(ddp, 3 + 3 * dist.get_rank())
    return parameter_bits(ddp.module)


def _joined_and_verified() -> int:
    ddp = DDP(toy())
    link = tw.attach(ddp, FP8)
    link.verify(every=1)
    with Join([ddp]):
        train(ddp, 3 + 3 * dist.get_rank())
    link.verify()
    return int(link.state_dict()["reductions"])


def _joined_with_another_divisor() -> str:
    ddp = DDP(toy())
    tw.attach(ddp, FP8)
    try:
        with Join([ddp], divide_by_initial_world_size=False):
            train(ddp, 1 + dist.get_rank())
    except ValueError as error:
        return str(error)
    return "no error"


def _scaled(reducer: Any, scale: float) -> tuple[str, str]:
    """Training under a loss scale, by hand."""
    ddp = DDP(layers(60, 50, 40), bucket_cap_mb=MANY_BUCKETS)
    link = tw.attach(ddp, reducer)
    link.set_loss_scale(scale)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        (ddp(numbers(step, 60)).square().mean() * scale).backward()
        for parameter in ddp.parameters():
            parameter.grad /= scale
        optimizer.step()
    return bits(ddp.module), memory_bits(link)


def _scaler_overflow(reducer: Any) -> tuple[list[float], str]:
    """Rank 0 overflows at step 2 of 5."""
    ddp = DDP(layers(60, 50, 40), bucket_cap_mb=MANY_BUCKETS)
    link = tw.attach(ddp, reducer)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    scales = []
    for step in range(5):
        optimizer.zero_grad()
        link.set_loss_scale(scaler.get_scale())
        loss = ddp(numbers(step, 60)).square().mean() * (float("inf") if (step, dist.get_rank()) == (2, 0) else 1)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, parameter_bits(ddp.module)


def _two_models(reducer: Any) -> tuple[str, str, str, str]:
    """Two DDP models with a link each in one backward pass, and both of them as one DDP model."""
    separate = [
        DDP(layers(20, 30, 8), bucket_cap_mb=MANY_BUCKETS),
        DDP(layers(8, 30, 7), bucket_cap_mb=MANY_BUCKETS),
    ]
    together = DDP(nn.Sequential(layers(20, 30, 8), layers(8, 30, 7)), bucket_cap_mb=MANY_BUCKETS)
    for model in (*separate, together):
        tw.attach(model, reducer)
    optimizer = torch.optim.SGD([p for model in separate for p in model.parameters()], lr=0.2, momentum=0.9)
    train(nn.Sequential(*separate), 4, batch=vectors, optimizer=optimizer)
    train(together, 4, batch=vectors)
    first, second = together.module
    return bits(separate[0].module), bits(first), bits(separate[1].module), bits(second)


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run_ranks(_two_ranks, 2, timeout=120)


@pytest.mark.parametrize("reducer", BOTH)
def test_four_micro_steps_under_no_sync_equal_one_big_batch(
    two: list[dict[str, Any]], reducer: str | None
) -> None:
    for rank in two:
        big, accumulated = rank[f"big batch {reducer}"]
        assert big == accumulated


def test_several_backwards_per_step_add_up_as_in_plain_ddp(two: list[dict[str, Any]]) -> None:
    assert all(rank["twice dense"][0] == rank["twice None"][0] for rank in two)
    assert all(two[0][f"twice {reducer}"] == two[1][f"twice {reducer}"] for reducer in BOTH)


@pytest.mark.parametrize("reducer", REDUCERS)
def test_bytes_are_counted_once_per_synchronised_backward(two: list[dict[str, Any]], reducer: str) -> None:
    for rank in two:
        _, one_backward, two_backwards = rank[f"twice {reducer}"]
        assert one_backward > 0
        assert two_backwards == 2 * one_backward


@pytest.mark.parametrize("reducer", [None, "dense", "fp8"])
def test_activation_checkpointing_of_either_kind_changes_no_bit(
    two: list[dict[str, Any]], reducer: str | None
) -> None:
    for rank in two:
        without, new, reentrant = rank[f"checkpoint {reducer}"]
        assert without == new == reentrant
    assert two[0]["checkpoint dense"] == two[0]["checkpoint None"]


@pytest.mark.parametrize("options", ["views", "static"])
def test_bucket_views_and_static_graphs_change_no_bit(two: list[dict[str, Any]], options: str) -> None:
    for rank in two:
        with_option, without = rank[options]
        assert with_option == without


@pytest.mark.parametrize("reducer", REDUCERS)
def test_a_rank_without_data_takes_part_in_the_others_steps_under_join(
    two: list[dict[str, Any]], reducer: str
) -> None:
    assert two[0][f"join {reducer}"] == two[1][f"join {reducer}"]
    assert two[0]["join dense"] == two[0]["join None"]


def test_verify_does_not_ask_a_rank_without_data(two: list[dict[str, Any]]) -> None:
    assert [rank["join verify"] for rank in two] == [6, 6]


def test_join_with_a_shrinking_divisor_is_refused_on_every_rank(two: list[dict[str, Any]]) -> None:
    assert all("divide_by_initial_world_size=False" in rank["join divide"] for rank in two)


@pytest.mark.parametrize("reducer", REDUCERS)
def test_a_loss_scale_leaves_gradients_and_error_memory_as_they_are(
    two: list[dict[str, Any]], reducer: str
) -> None:
    for rank in two:
        unscaled, scaled = rank[f"scale {reducer}"]
        assert unscaled == scaled


@pytest.mark.parametrize("reducer", REDUCERS)
def test_a_grad_scaler_skips_the_step_on_all_ranks_when_one_overflows(
    two: list[dict[str, Any]], reducer: str
) -> None:
    assert two[0][f"overflow {reducer}"] == two[1][f"overflow {reducer}"]
    assert two[0][f"overflow {reducer}"][0] == [1024.0, 2048.0, 1024.0, 1024.0, 2048.0]


@pytest.mark.parametrize("reducer", REDUCERS)
def test_two_ddp_models_in_one_backward_pass_keep_apart(two: list[dict[str, Any]], reducer: str) -> None:
    for rank in two:
        first, first_together, second, second_together = rank[f"models {reducer}"]
        assert first == first_together
        assert second == second_together
