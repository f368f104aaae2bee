"""How a model is spread over the workers: whole on each (DDP), or in shards (FSDP2)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from thinwire.train.config import TrainConfig


def spread(model: nn.Module, config: TrainConfig, device: torch.device) -> nn.Module:
    """What the loop calls in place of `model`."""
    if config.parallel == "fsdp":
        return _sharded(model, unused=config.model.find_unused_parameters)
    return DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        forward_sync_buffers=False,  # a language model's buffers are constants
        find_unused_parameters=config.model.find_unused_parameters,
    )


@contextmanager
def accumulating(wrapped: nn.Module) -> Iterator[None]:
    """In here gradients stay with their worker."""
    if isinstance(wrapped, DistributedDataParallel):
        with wrapped.no_sync():
            yield
        return
    assert isinstance(wrapped, FSDPModule)
    wrapped.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        wrapped.set_requires_gradient_sync(True)


def is_in_shards(model: nn.Module) -> bool:
    """Whether a forward pass is a collective call."""
    return isinstance(model, FSDPModule)


def whole(tensor: Tensor) -> Tensor:
    """A DTensor put together, a collective call; any other tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _sharded(model: nn.Module, *, unused: bool) -> nn.Module:
    """Each block that the model's author wants kept together is an FSDP module, and the rest is one."""
    blocks = set(getattr(model, "_no_split_modules", None) or ())
    for module in model.modules():
        if type(module).__name__ in blocks:
            fully_shard(module)
    sharded = fully_shard(model)
    sharded.set_reduce_scatter_unused_params(unused)
    return model
