"""What updates the parameters that are not matrices: AdamW or Lion, frozen settings and functions of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from thinwire.optim.layers import Kind

State: TypeAlias = dict[str, Tensor]


class Rest(Protocol):
    """How embeddings, the output head and vectors are updated."""

    def settings(self, kind: Kind, lr: float) -> dict[str, Any]:
        """Of a group, where it does not say them itself; `lr` is that of the matrices."""

    def new_state(self, parameter: Tensor) -> State:
        """Before the first step."""

    def step(self, parameters: Sequence[Tensor], states: Sequence[State], group: Mapping[str, Any]) -> None:
        """Move the parameters, which all have gradients."""


@dataclass(frozen=True)
class AdamW:
    """torch's AdamW (arXiv 1711.05101); 2 numbers of the parameter's dtype of memory per parameter."""

    lr: float | None = None
    """None: that of the matrices."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    """Not of the output head."""

    def settings(self, kind: Kind, lr: float) -> dict[str, Any]:
        decay = 0.0 if kind == "head" else self.weight_decay
        own = lr if self.lr is None else self.lr
        return {"lr": own, "betas": self.betas, "eps": self.eps, "weight_decay": decay}

    def new_state(self, parameter: Tensor) -> State:
        like = parameter.detach()
        return {
            "step": torch.zeros((), dtype=torch.float32),
            "exp_avg": torch.zeros_like(like),
            "exp_avg_sq": torch.zeros_like(like),
        }

    def step(self, parameters: Sequence[Tensor], states: Sequence[State], group: Mapping[str, Any]) -> None:
        adamw(
            list(parameters),
            [_gradient(parameter) for parameter in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            foreach=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


@dataclass(frozen=True)
class Lion:
    """Lion (arXiv 2302.06675): the sign of a mixture of momentum and gradient; one number of memory per parameter.

    The output head's learning rate is divided by the square root of its inputs, as in Dion's code."""

    lr: float | None = None
    """None: that of the matrices."""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    """Not of the output head."""

    def settings(self, kind: Kind, lr: float) -> dict[str, Any]:
        decay = 0.0 if kind == "head" else self.weight_decay
        return {"lr": lr if self.lr is None else self.lr, "betas": self.betas, "weight_decay": decay}

    def new_state(self, parameter: Tensor) -> State:
        return {"exp_avg": torch.zeros_like(parameter.detach())}

    def step(self, parameters: Sequence[Tensor], states: Sequence[State], group: Mapping[str, Any]) -> None:
        first, second = group["betas"]
        gradients = [_gradient(parameter) for parameter in parameters]
        momenta = [state["exp_avg"] for state in states]
        signs = torch._foreach_lerp(momenta, gradients, 1 - first)
        torch._foreach_sign_(signs)
        torch._foreach_lerp_(momenta, gradients, 1 - second)
        for parameter, sign in zip(parameters, signs):
            lr = float(group["lr"])
            parameter.mul_(1 - lr * group["weight_decay"])
            parameter.add_(sign, alpha=-lr / parameter.shape[-1] ** 0.5 if group["kind"] == "head" else -lr)


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
