"""A link and torch.compile, on either side of DDP."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from tests.data_parallel.toys import FP8, bits, layers, train, vectors
from tests.support.ranks import run_ranks


def _compiled(where: str) -> tuple[str, str]:
    """Two buckets of at least 1 MiB, on which torch.compile's DDP optimizer insists."""
    torch._dynamo.reset()
    model = layers(20, 600, 600, 8)
    if where == "inside":
        ddp = DDP(torch.compile(model, backend="aot_eager"), bucket_cap_mb=1)
        link = tw.attach(ddp, FP8)
        train(ddp, 3, batch=vectors)
    else:
        ddp = DDP(model, bucket_cap_mb=1)
        run = torch.compile(ddp, backend="aot_eager") if where == "outside" else ddp
        link = tw.attach(run, FP8)  # type: ignore[arg-type]
        train(run, 3, batch=vectors)  # type: ignore[arg-type]
    return bits(model), link.slots[0].name


def _compiled_everywhere() -> dict[str, tuple[str, str]]:
    return {where: _compiled(where) for where in ("nowhere", "inside", "outside")}


def test_a_model_compiled_inside_or_outside_of_ddp_trains_to_the_same_bits_under_the_same_names() -> None:
    for rank in run_ranks(_compiled_everywhere, 2, timeout=120):
        assert rank["inside"] == rank["outside"] == rank["nowhere"]
        assert rank["nowhere"][1] == "layers.0.weight"
