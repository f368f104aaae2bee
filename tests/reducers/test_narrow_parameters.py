"""Parameters in bf16 and fp16: what the delivery in their dtype rounds away is owed too."""

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks
from thinwire.collectives import Slot, Wire
from thinwire.geometry import Geometry, Hadamard
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


def _after_an_overflow(geometry: Geometry | None) -> dict[str, bool]:
    """What is owed makes a mean that float32 holds and float16 does not."""
    shape = (32, 128)
    reducer = Quantized("fp8_e4m3", feedback="error", geometry=geometry)
    bound = reducer.bind([Slot("w", shape, torch.float16)], Wire())
    bound.load_state_dict({**bound.state_dict(), "residual.w": torch.full(shape, 5000.0)})

    def mean_of(gradient: float) -> torch.Tensor:
        named = {"w": torch.full(shape, gradient, dtype=torch.float16)}
        bound.begin()
        bound.all_reduce(named).wait()
        return named["w"]

    overflows = bool(mean_of(60000.0).isinf().any())
    seen = not bound.finite()
    return {"overflows": overflows, "seen": seen, "next is finite": bool(mean_of(-60000.0).isfinite().all())}


@pytest.mark.parametrize("geometry", [None, Hadamard(seed=None)], ids=["as it is", "in other coordinates"])
def test_a_mean_too_large_for_the_parameters_dtype_is_not_finite_and_spoils_no_error_memory(
    geometry: Geometry | None,
) -> None:
    expected = {"overflows": True, "seen": True, "next is finite": True}
    assert run_ranks(_after_an_overflow, 2, geometry) == [expected] * 2
