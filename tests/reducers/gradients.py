"""Made-up gradients that every rank can compute for every other, and short ways to reduce them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives import Slot, Wire
from thinwire.reducers import BoundReducer, Reducer

UNEVEN = (
    Slot("layers.0.weight", (33, 47)),
    Slot("layers.0.bias", (7,)),
    Slot("scale", ()),
    Slot("conv", (5, 3, 11, 2)),
    Slot("one", (1,)),
    Slot("nothing", (0, 3)),
    Slot("odd", (4097,)),
)
"""Shapes that divide by nothing, some with fewer elements than ranks."""

Gradients = dict[str, Tensor]


def gradient(slot: Slot, step: int, rank: int) -> Tensor:
    """The gradient of a slot: partly common to all ranks, with magnitudes from 1e-3 to 1e3 across a slot."""
    common = _noise(slot, step, -1)
    own = _noise(slot, step, rank)
    spread = 10.0 ** torch.linspace(-3, 3, max(1, slot.numel))[: slot.numel].view(slot.shape)
    return ((0.5 * common + own) * spread).to(slot.dtype)


def gradients(slots: Sequence[Slot], step: int, rank: int) -> Gradients:
    """One gradient per slot."""
    return {slot.name: gradient(slot, step, rank) for slot in slots}


def exact_mean(slot: Slot, step: int, world_size: int, weights: Sequence[float] | None = None) -> Tensor:
    """The weighted mean over ranks in float64."""
    weights = weights or [1.0] * world_size
    terms = [weight * gradient(slot, step, rank).double() for rank, weight in enumerate(weights)]
    return torch.stack(terms).sum(0) / world_size


def bind(reducer: Reducer, slots: Sequence[Slot] = UNEVEN) -> tuple[BoundReducer, Wire]:
    """A bound reducer on a wire of its own."""
    wire = Wire()
    return reducer.bind(slots, wire), wire


def reduce(
    bound: BoundReducer, named: Mapping[str, Tensor], *, weight: float = 1.0, begin: bool = True
) -> Mapping[str, Tensor]:
    """One whole reduction; returns `named`, which now holds the means."""
    if begin:
        bound.begin()
    bound.all_reduce(named, weight=weight).wait()
    return named


def residuals(bound: BoundReducer) -> Gradients:
    """This rank's residuals by slot."""
    state = bound.state_dict()
    return {key.removeprefix("residual."): value for key, value in state.items() if key.startswith("residual.")}


def sum_over_ranks(x: Tensor) -> Tensor:
    """In float64, on the default group."""
    total = x.double()
    dist.all_reduce(total)
    return total


def plain(named: Mapping[str, Tensor]) -> dict[str, Any]:
    """Tensors as numpy arrays, to travel back from a rank."""
    return {name: tensor.detach().float().numpy().copy() for name, tensor in named.items()}


def equal(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Bit for bit, names included."""
    return a.keys() == b.keys() and all(
        np.array_equal(np.asarray(a[name]).view(np.uint8), np.asarray(b[name]).view(np.uint8))
        if np.asarray(a[name]).ndim
        else np.array_equal(a[name], b[name])
        for name in a
    )


def _noise(slot: Slot, step: int, rank: int) -> Tensor:
    seed = zlib.crc32(f"{slot.name} {step} {rank}".encode())
    return torch.randn(slot.shape, generator=torch.Generator().manual_seed(seed))
