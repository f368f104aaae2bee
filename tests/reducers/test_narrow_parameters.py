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
