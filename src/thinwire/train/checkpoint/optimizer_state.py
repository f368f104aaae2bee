"""Optimizer state by parameter name: tensors under `optimizer.<kind>.<parameter>`, the rest as JSON.

A fresh optimizer has no state yet, so the tensors to read into are made after the checkpoint's own index.
They get the saved dtype (`Optimizer.load_state_dict` would cast them to the parameter's), and a parameter
that never had a gradient stays without state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.train.checkpoint.manifest import JSON, CheckpointError, differences
from thinwire.train.checkpoint.saved import Saved, json_value

# How an optimizer computes rather than what: the present run's choice stays.
_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")


@dataclass(frozen=True)
class Owned:
    """A parameter with the optimizer and the group that update it."""

    name: str
    parameter: Tensor
    group: dict[str, Any]
    optimizer: Optimizer

    @property
    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.optimizer.state.get(self.parameter, {})
        return state


@dataclass(frozen=True)
class Target:
    """A tensor to read `optimizer.<kind>.<name>` into."""

    owner: Owned
    kind: str
    tensor: Tensor


def owned(optimizers: Sequence[Optimizer], names: Mapping[int, str]) -> Iterator[Owned]:
    """Every parameter of every optimizer with its name in the model (`names`: by id)."""
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) not in names:
                    raise CheckpointError(
                        f"{type(optimizer).__name__}, group {number}: a parameter of shape "
                        f"{tuple(parameter.shape)} is not one of the model's, so there is no name to save it under"
                    )
                yield Owned(names[id(parameter)], parameter, group, optimizer)


def collect(
    optimizers: Sequence[Optimizer], names: Mapping[int, str]
) -> tuple[dict[str, Tensor], dict[str, JSON]]:
    tensors: dict[str, Tensor] = {}
    values: dict[str, JSON] = {}
    for owner in owned(optimizers, names):
        for kind, value in owner.state.items():
            if "." in kind:
                raise CheckpointError(f"optimizer state {kind!r} of {owner.name}: cannot save a name with a dot")
            key = f"optimizer.{kind}.{owner.name}"
            if isinstance(value, Tensor):
                tensors[key] = value.detach()
            else:
                values[key] = json_value(key, value)
    return tensors, {"values": values, "optimizers": [_outline(optimizer, names) for optimizer in optimizers]}


def _outline(optimizer: Optimizer, names: Mapping[int, str]) -> JSON:
    """Its class and, per group, the names of the parameters and the hyperparameters."""
    return {
        "class": type(optimizer).__name__,
        "groups": [
            {
                "parameters": [names[id(parameter)] for parameter in group["params"]],
                "numbers": {
                    key: json_value(f"optimizer group {number}: {key}", value)
                    for key, value in group.items()
                    if key not in ("params", "param_names", *_IMPLEMENTATION)
                },
            }
            for number, group in enumerate(optimizer.param_groups)
        ],
    }


def targets(saved: Saved, optimizers: Sequence[Optimizer], names: Mapping[int, str]) -> dict[str, Target]:
    """Where every saved tensor goes; refuses other optimizers or groups than those that were saved."""
    owners = {owner.name: owner for owner in owned(optimizers, names)}
    here = [_outline(optimizer, names) for optimizer in optimizers]
    saved.refuse(differences(_members(saved.state["optimizer"]["optimizers"]), _members(here)))
    found = {}
    for key, (shape, dtype) in saved.index.items():
        if key.startswith("optimizer."):
            _, kind, name = key.split(".", 2)
            if name not in owners:
                raise CheckpointError(f"{saved.name} has {key}, and no optimizer here has a parameter {name}")
            found[key] = Target(owners[name], kind, _target(owners[name], kind, shape, dtype))
    return found


def _members(optimizers: list[JSON]) -> dict[str, JSON]:
    return {
        f"optimizer {i}": {
            "class": optimizer["class"],
            **{f"parameters of group {j}": group["parameters"] for j, group in enumerate(optimizer["groups"])},
        }
        for i, optimizer in enumerate(optimizers)
    }


def _target(owner: Owned, kind: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    present = owner.state.get(kind)
    if isinstance(present, Tensor) and present.shape == shape and present.dtype == dtype:
        return present.detach()
    if owner.parameter.shape == shape and kind != "step":
        return torch.empty_like(owner.parameter, dtype=dtype, requires_grad=False)
    on_device = kind != "step" or owner.group.get("capturable") or owner.group.get("fused")
    return torch.empty(shape, dtype=dtype, device=owner.parameter.device if on_device else "cpu")


def restore(
    saved: Saved, optimizers: Sequence[Optimizer], names: Mapping[int, str], filled: Mapping[str, Target]
) -> None:
    """Give the optimizers the tensors that were read, and the numbers; the saved hyperparameters win."""
    owners = {owner.name: owner for owner in owned(optimizers, names)}
    for optimizer in optimizers:
        optimizer.state.clear()
    for target in filled.values():
        target.owner.optimizer.state[target.owner.parameter][target.kind] = target.tensor
    for key, value in saved.state["optimizer"]["values"].items():
        _, kind, name = key.split(".", 2)
        owners[name].optimizer.state[owners[name].parameter][kind] = value
    for optimizer, there in zip(optimizers, saved.state["optimizer"]["optimizers"], strict=True):
        for group, kept in zip(optimizer.param_groups, there["groups"], strict=True):
            for key, value in kept["numbers"].items():
                present = group.get(key)
                if isinstance(present, Tensor):
                    present.fill_(value)
                else:
                    group[key] = tuple(value) if isinstance(present, tuple) else value
