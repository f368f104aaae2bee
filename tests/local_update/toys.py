"""A small model, its data and its training loop, shared by the tests of local updates."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor, nn

Named: TypeAlias = Mapping[str, Tensor | list[float]]
"""Weights by name, as tensors or as what travels between processes."""

SIZES = (12, 16, 16, 16, 5)


class Layers(nn.Module):
    """A stack of layers and a head, as language models have them."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(SIZES[:-1]))
        self.head = nn.Linear(*SIZES[-2:], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)  # type: ignore[no-any-return]


def loss(model: nn.Module, step: int, rank: int) -> Tensor:
    """Of a batch that depends on step and rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x, y = (torch.randn(8, n, generator=generator) for n in (SIZES[0], SIZES[-1]))
    return (model(x) - y).square().mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    """One step of the inner optimizer."""
    optimizer.zero_grad()
    loss(model, step, rank).backward()
    optimizer.step()


def weights(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the parameters."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def plain(named: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """As another process can have it."""
    return {name: tensor.tolist() for name, tensor in named.items()}


def bits(named: Named) -> str:
    """A hash of names and bits."""
    digest = hashlib.sha256()
    for name, tensor in named.items():
        digest.update(name.encode())
        digest.update(bytes(torch.as_tensor(tensor).contiguous().view(-1).view(torch.uint8).tolist()))
    return digest.hexdigest()


def apart(a: Named, b: Named) -> float:
    """The largest difference of any element."""
    return max(float((torch.as_tensor(a[name]) - torch.as_tensor(b[name])).abs().max()) for name in a)
