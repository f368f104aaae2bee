"""The parameters of a model that ranks average: their names, which are the keys of state, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor, nn

from thinwire.collectives import Slot

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""What torch.compile and checkpoint wrappers put between the dots of a name. (Not "module": DDP is opened by
`ddp.module`, and a model may well call a child of its own that.)"""


def named_parameters(module: nn.Module, *, ignored: Collection[str] = ()) -> dict[str, nn.Parameter]:
    """The parameters that data parallelism keeps equal, by plain name."""
    found = module.named_parameters()
    return {plain_name(name): parameter for name, parameter in found if name not in ignored}


def trained_parameters(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Those that are averaged: neither frozen nor empty."""
    return {name: p for name, p in parameters.items() if p.requires_grad and p.numel()}


def slots_of(parameters: Mapping[str, nn.Parameter]) -> list[Slot]:
    """As the reducer sees the trained ones."""
    return [Slot(name, tuple(local_part(p).shape), p.dtype) for name, p in trained_parameters(parameters).items()]


def local_part(tensor: Tensor) -> Tensor:
    """Of a DTensor what lies on this rank, of any other tensor all; knows nothing of autograd."""
    tensor = tensor.detach()
    to_local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def check_parameters(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse by name what cannot be averaged. Raises ValueError."""
    names = {id(parameter): name for name, parameter in parameters.items() if parameter.requires_grad}
    for submodule in module.modules():
        sparse = isinstance(submodule, nn.Embedding | nn.EmbeddingBag) and submodule.sparse
        if sparse and (name := names.get(id(submodule.weight))):
            raise ValueError(
                f"{name!r} belongs to an embedding with sparse=True, whose gradient is not a dense tensor: "
                "build it with sparse=False"
            )
    for name, parameter in parameters.items():
        if parameter.requires_grad and not parameter.dtype.is_floating_point:
            raise ValueError(f"{name!r} is {parameter.dtype}: only real floating point parameters are averaged")


def device_of(parameters: Mapping[str, nn.Parameter]) -> torch.device:
    """The one device of all parameters. Raises ValueError where there are several."""
    devices = {parameter.device: name for name, parameter in parameters.items()}
    if len(devices) > 1:
        where = " and ".join(f"{name!r} on {device}" for device, name in devices.items())
        raise ValueError(f"parameters must be on one device per rank, got {where}")
    return next(iter(devices), torch.device("cpu"))


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP or tensor parallelism cut the parameters into DTensors or flat shards."""
    return any(
        hasattr(parameter, "placements") or hasattr(parameter, "_is_flat_param")
        for parameter in model.parameters()
    )


def plain_name(name: str) -> str:
    """`layers.0._orig_mod.weight` -> `layers.0.weight`."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)
