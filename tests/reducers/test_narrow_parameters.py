"""Parameters in bf16 and fp16: what the delivery in their dtype rounds away is owed too."""

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks
from thinwire.collectives import Slot, Wire
from thinwire.reducers import Quantized

STEPS = 60


def _lost_per_step(dtype: torch.dtype) -> float:
    """Largest |applied + owed - exact| after many steps of a constant gradient, in gradients."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    gradient = torch.randn(97, 53, generator=generator).to(dtype)
    bound = Quantized("fp8_e4m3", feedback="error").bind([Slot("w", (97, 53), dtype)], Wire())
    applied = torch.zeros(97, 53, dtype=torch.float64)
    for _ in range(STEPS):
        mean = gradient.clone()
        bound.begin()
        bound.all_reduce({"w": mean}).wait()
        applied += mean.double()
    exact, owed = gradient.double(), bound.state_dict()["residual.w"].double()
    dist.all_reduce(exact)
    dist.all_reduce(owed)
    exact /= dist.get_world_size()
    return ((applied + owed - STEPS * exact).abs().max() / exact.abs().mean()).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nothing_is_lost_whatever_the_parameters_dtype(dtype: torch.dtype) -> None:
    assert max(run_ranks(_lost_per_step, 2, dtype)) < 1e-4


def _after_an_overflow() -> dict[str, bool]:
    """What is owed makes a mean that float32 holds and float16 does not."""
    bound = Quantized("fp8_e4m3", feedback="error").bind([Slot("w", (4096,), torch.float16)], Wire())

    def mean_of(gradient: torch.Tensor) -> torch.Tensor:
        bound.begin()
        bound.all_reduce({"w": gradient}).wait()
        return gradient

    largest = torch.finfo(torch.float16).max
    rounded_down = torch.full((4096,), 58400.0, dtype=torch.float16)
    rounded_down[::128] = largest  # so the codes nearby are 56146 and 60825
    mean_of(rounded_down)
    overflows = bool(mean_of(torch.full((4096,), largest, dtype=torch.float16)).isinf().any())
    seen = not bound.finite()
    return {"overflows": overflows, "seen": seen, "next is finite": bool(mean_of(rounded_down).isfinite().all())}


def test_a_mean_too_large_for_the_parameters_dtype_is_not_finite_and_spoils_no_error_memory() -> None:
    expected = {"overflows": True, "seen": True, "next is finite": True}
    assert run_ranks(_after_an_overflow, 2) == [expected] * 2
