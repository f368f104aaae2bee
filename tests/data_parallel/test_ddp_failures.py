"""Ranks that die, hang or compute NaN: peers see an error out of backward() that says who, what and where, or
the same non-finite mean."""

from __future__ import annotations

import itertools
import os
import signal
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from tests.data_parallel.toys import FP8, MANY_BUCKETS, REDUCERS, layers, numbers, parameter_bits, residuals
from tests.support.ranks import run_ranks

TIMEOUT = timedelta(seconds=2)


def _step(ddp: DDP, step: int) -> None:
    ddp.zero_grad()
    ddp(numbers(step, 60)).square().mean().backward()


def _with_a_failing_rank(reducer: Any, failure: str, at_step: int) -> None:
    """Rank 1 dies in the middle of a backward pass, or never begins it and stays until the others gave up."""
    store = dist.distributed_c10d._get_default_store()
    ddp = DDP(layers(60, 50, 40, 30, 20), bucket_cap_mb=0.0005)
    tw.attach(ddp, reducer, timeout=TIMEOUT)

    def die(gradient: Tensor) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    for step in range(at_step + 1):
        if step == at_step and dist.get_rank() == 1:
            if failure == "hangs":
                store.wait(["rank 0 gave up", "rank 2 gave up"], timedelta(seconds=30))
                os._exit(0)
            ddp.module.layers[1].weight.register_hook(die)
        try:
            _step(ddp, step)
        except tw.CollectiveError:
            store.set(f"rank {dist.get_rank()} gave up", "")
            raise


def _errors_of_survivors(reducer: str, failure: str, at_step: int) -> dict[int, str]:
    """The last line of the traceback, which leads through backward()."""
    results = run_ranks(_with_a_failing_rank, 3, REDUCERS[reducer], failure, at_step, check=False)
    tracebacks = {rank: str(results[rank]).strip() for rank in (0, 2)}
    assert all(".backward()" in text for text in tracebacks.values())
    return {rank: text.splitlines()[-1] for rank, text in tracebacks.items()}


@pytest.mark.parametrize(
    ("reducer", "op", "at_step"), [("fp8", "all_to_all", 3), ("dense", "all_reduce", 0), ("routed", "all_", 3)]
)
def test_a_rank_that_dies_in_backward_ends_the_others_with_an_error_that_names_it(
    reducer: str, op: str, at_step: int
) -> None:
    for rank, error in _errors_of_survivors(reducer, "dies", at_step).items():
        assert f"CollectiveError: rank {rank}: {op}" in error
        assert " of 'layers." in error
        assert "no answer from rank 1" in error


def test_a_rank_that_never_calls_backward_is_named_when_the_timeout_is_over() -> None:
    for rank, error in _errors_of_survivors("fp8", "hangs", 3).items():
        assert f"CollectiveError: rank {rank}: all_to_all of 'layers." in error
        assert "no answer from rank 1" in error
        assert "Timed out waiting 2000ms" in error or "timeout caused pair closure" in error


def _with_a_nan(reducer: Any, where: str) -> list[dict[str, Any]]:
    """Four steps; in step 2 rank 1 has a NaN in its input, or in the gradient of one bias."""
    ddp = DDP(layers(60, 50, 40), bucket_cap_mb=MANY_BUCKETS)
    link = tw.attach(ddp, reducer)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    steps = []
    for step in range(4):
        broken = step == 2 and dist.get_rank() == 1
        if where == "bias":
            handle = ddp.module.layers[0].bias.register_hook(
                lambda g, broken=broken: g * float("nan") if broken else g
            )
        before = residuals(link)
        optimizer.zero_grad()
        ddp(numbers(step, 60) * (float("nan") if broken and where == "input" else 1)).square().mean().backward()
        if where == "bias":
            handle.remove()
        finite = {name: bool(p.grad.isfinite().all()) for name, p in ddp.module.named_parameters()}
        after = residuals(link)
        if all(finite.values()):
            optimizer.step()
        kept = {name: torch.equal(after[name], before[name]) for name in before}
        steps.append({"finite": finite, "kept": kept, "bits": parameter_bits(ddp.module)})
    return steps


def _with_nans() -> dict[str, Any]:
    cases = itertools.product(REDUCERS, ("input", "bias"))
    return {f"{name} {where}": _with_a_nan(REDUCERS[name], where) for name, where in cases}


@pytest.fixture(scope="module")
def nans() -> list[dict[str, Any]]:
    return run_ranks(_with_nans, 2)


@pytest.mark.parametrize("where", ["input", "bias"])
@pytest.mark.parametrize("reducer", REDUCERS)
def test_a_nan_on_one_rank_reaches_all_and_the_next_step_is_fine(
    nans: list[dict[str, Any]], reducer: str, where: str
) -> None:
    for rank in nans:
        steps = rank[f"{reducer} {where}"]
        spoiled = {name: where == "bias" and name != "layers.0.bias" for name in steps[0]["finite"]}
        assert steps[2]["finite"] == spoiled
        assert all(all(steps[i]["finite"].values()) for i in (0, 1, 3))
        assert [step["bits"] for step in steps] == [step["bits"] for step in nans[0][f"{reducer} {where}"]]


@pytest.mark.parametrize("where", ["input", "bias"])
@pytest.mark.parametrize("reducer", ["fp8", "routed"])
def test_a_nan_in_any_mean_leaves_all_error_memory_as_it_was(
    nans: list[dict[str, Any]], reducer: str, where: str
) -> None:
    for rank in nans:
        for step, found in enumerate(rank[f"{reducer} {where}"]):
            assert set(found["kept"].values()) == {step == 2}


def _attached_again_after_control_failed() -> tuple[str, str, bool]:
    """Rank 1 is late for a control collective; what a reduction then says, and whether a new link averages."""
    store = dist.distributed_c10d._get_default_store()
    ddp = DDP(layers(20, 10))
    link = tw.attach(ddp, FP8, timeout=timedelta(seconds=1))
    if dist.get_rank() == 1:
        store.wait(["rank 0 gave up"], timedelta(seconds=30))
    errors = []
    bias = {"layers.0.bias": torch.ones(10)}
    for attempt in (lambda: link.control_all_reduce(torch.ones(1)), lambda: link.reducer.all_reduce(bias)):
        try:
            attempt()
        except tw.CollectiveError as error:
            errors.append(str(error))
        store.set(f"rank {dist.get_rank()} gave up", "")
    link.detach()
    link = tw.attach(ddp, FP8, timeout=timedelta(seconds=1))
    ddp(numbers(0, 20)).sum().backward()
    same = [torch.equal(*link._wire.control_all_gather(p.grad)) for p in ddp.parameters() if p.grad is not None]
    return errors[0], errors[1], all(same)


def test_after_control_traffic_failed_a_reduction_says_so_and_a_new_link_has_connections_of_its_own() -> None:
    for rank, (control, reduction, averages) in enumerate(run_ranks(_attached_again_after_control_failed, 2)):
        assert control.startswith(f"rank {rank}: all_reduce of control values failed")
        assert reduction == control
        assert averages
