"""Sharded models for tests, trained step by step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.local_update.toys import Layers, bits, loss


def mesh_of(names: tuple[str, str]) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


def sharded(model: Layers, mesh: DeviceMesh, **options: Any) -> Layers:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)  # type: ignore[return-value]


def whole(model: nn.Module) -> dict[str, Tensor]:
    """The parameters, put together."""
    return {
        name: p.detach().full_tensor().clone() if isinstance(p, DTensor) else p.detach().clone()
        for name, p in model.named_parameters()
    }


def steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: int, count: int, sync: Any = None
) -> list[str]:
    """Train on the data of that number; the bits of this rank's shards after every step."""
    history = []
    for step in range(count):
        optimizer.zero_grad()
        loss(model, step, data).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if sync is not None:
            sync.step()
        history.append(bits({n: local(p) for n, p in model.named_parameters()}))
    return history


def local(parameter: Tensor) -> Tensor:
    return parameter.detach().to_local() if isinstance(parameter, DTensor) else parameter.detach()
