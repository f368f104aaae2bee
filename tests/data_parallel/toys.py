"""Small models, seeded data and training loops for the tests of data parallelism. Imported by ranks."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw

MANY_BUCKETS = 0.002
"""`bucket_cap_mb` that puts each larger parameter of a toy into a bucket of its own."""

FP8 = tw.Quantized("fp8_e4m3", feedback="error")
REDUCERS = {"dense": tw.Dense(), "fp8": FP8, "routed": tw.Routed(FP8, "*weight")}


class Toy(nn.Module):
    """Channels-last convolution, batch norm with its buffers, odd sizes, a 0-d and an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(8)
        self.first = nn.Linear(8 * 16, 37)
        self.second = nn.Linear(37, 29)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.conv(x)).relu().flatten(1)
        return self.second(self.first(hidden).tanh()) * self.scale + self.nothing.sum()


class Layers(nn.Module):
    """A chain of linear layers, the input width first."""

    def __init__(self, *widths: int, bias: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=bias) for a, b in itertools.pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def toy() -> Toy:
    torch.manual_seed(1)
    return Toy()


def layers(*widths: int, bias: bool = True) -> Layers:
    torch.manual_seed(1)
    return Layers(*widths, bias=bias)


def images(step: int, *, rank: int | None = None, count: int = 4) -> Tensor:
    """What a rank (this one, unless told) sees at a step."""
    return numbers(step, 3, 6, 6, rank=rank, count=count)


def numbers(step: int, *shape: int, rank: int | None = None, count: int = 4) -> Tensor:
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(1000 * step + rank))


def train(
    model: nn.Module,
    steps: int | range,
    *,
    batch: Callable[[int], Tensor] = images,
    loss: Callable[[Tensor], Tensor] = lambda output: output.square().mean(),
    optimizer: torch.optim.Optimizer | None = None,
) -> torch.optim.Optimizer:
    """Some steps of SGD with momentum."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for step in range(steps) if isinstance(steps, int) else steps:
        optimizer.zero_grad()
        loss(model(batch(step))).backward()
        optimizer.step()
    return optimizer


def trained(
    reducer: tw.Dense | Any | None,
    *,
    build: Callable[[], nn.Module] = toy,
    steps: int = 5,
    batch: Callable[[int], Tensor] = images,
    **options: Any,
) -> str:
    """The bits of a model after some steps under DDP: with a reducer attached, or plain (None)."""
    ddp = DDP(build(), **({"bucket_cap_mb": MANY_BUCKETS} | options))
    if reducer is not None:
        link = tw.attach(ddp, reducer)
    train(ddp, steps, batch=batch)
    if reducer is not None:
        link.detach()
    return bits(ddp.module)


def bits(module: nn.Module) -> str:
    """A hash of all parameters, gradients and buffers."""
    digest = hashlib.sha256()
    for name, parameter in module.named_parameters():
        digest.update(name.encode() + raw(parameter) + (b"" if parameter.grad is None else raw(parameter.grad)))
    for name, buffer in module.named_buffers():
        digest.update(name.encode() + raw(buffer))
    return digest.hexdigest()[:16]


def raw(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def residuals(link: tw.Link) -> dict[str, Tensor]:
    """Error memory of this rank by parameter name, of reducers however nested."""
    return {k.partition("residual.")[2]: v.clone() for k, v in link.state_dict().items() if "residual." in k}


def parameter_bits(module: nn.Module) -> str:
    """A hash of the parameters alone: the same on all ranks of any replicas that are."""
    return hashlib.sha256(b"".join(map(raw, module.parameters()))).hexdigest()[:16]


def memory_bits(link: tw.Link | None) -> str:
    """A hash of this rank's error memory."""
    return hashlib.sha256(b"".join(map(raw, residuals(link).values()))).hexdigest()[:16] if link else ""


def vectors(step: int) -> Tensor:
    """Four rows of 20 numbers."""
    return numbers(step, 20)
