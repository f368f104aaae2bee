"""A model that holds every kind of parameter at once, with a loss that is linear in them: so the exact mean
gradients do not depend on what was trained before. Imported by ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

Named = dict[str, Tensor]


class Oddities(nn.Module):
    """Matrices that routes leave to the format, and everything else that a parameter can be."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(66, 64)
        self.embedding = nn.Embedding(72, 60)
        self.output = nn.Linear(60, 72, bias=False)
        self.output.weight = self.embedding.weight  # tied
        self.frozen = nn.Parameter(torch.ones(64), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(70, 60))
        self.still = nn.Parameter(torch.randn(64, 65))  # its gradient is zero
        self.bfloat = nn.Parameter(torch.randn(65, 66).bfloat16())
        self.bfloat_vector = nn.Parameter(torch.randn(37).bfloat16())
        self.transposed = nn.Parameter(torch.randn(65, 66).t())
        self.permuted = nn.Parameter(torch.randn(5, 48, 6, 3).permute(1, 3, 0, 2))
        self.row = nn.Parameter(torch.randn(1, 50))
        self.scalar = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.one = nn.Parameter(torch.randn(1))
        self.seven = nn.Parameter(torch.randn(7))
        self.seventeen = nn.Parameter(torch.randn(17))
        self.vector = nn.Parameter(torch.randn(4097))

    def forward(self, data: Named) -> Tensor:
        own = [(p.float() * data[name]).sum() for name, p in self._parameters.items() if name in data]
        layer = self.layer(data["input"]) * self.frozen * data["layer"]
        tied = [self.output(data["y"]) * data["output"], self.embedding(data["tokens"]) * data["embedding"]]
        return torch.stack([layer.sum(), *(part.sum() for part in tied), *own]).sum()

    def data(self, step: int, spoiled: str = "") -> Named:
        """What this rank sees: the gradients of its parameters, and what makes those of the layers."""
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        shapes = {name: p.shape for name, p in self._parameters.items() if name not in ("frozen", "unused")}
        shapes |= {"input": (16, 66), "layer": (16, 64), "y": (12, 60), "output": (12, 72), "embedding": (50, 60)}
        data = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        data["tokens"] = torch.randint(0, 72, (50,), generator=generator)
        data["input"] *= torch.logspace(-0.5, 0.5, 66)
        data["still"].zero_()
        if spoiled and dist.get_rank() == 1:
            data[spoiled].view(-1)[5] = float("inf")
        return data


class Exact(NamedTuple):
    """Of one parameter in one step."""

    mean: Tensor
    size: float
    """The mean over ranks of the norms of their gradients."""


def exact(model: Oddities, step: int) -> dict[str, Exact]:
    """By parameter."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(model(model.data(step)), list(named.values()), allow_unused=True)
    found = {}
    for (name, parameter), gradient in zip(named.items(), gradients):
        mean = (torch.zeros_like(parameter) if gradient is None else gradient).double() / dist.get_world_size()
        size = mean.norm()
        dist.all_reduce(mean)
        dist.all_reduce(size)
        found[name] = Exact(mean, size.item())
    return found
