"""A small model with every kind of parameter, its data, and its training loop."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import thinwire as tw


class Small(nn.Module):
    """An embedding, matrices of several shapes, a convolution, a fused layer, vectors, and odd ones."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(11, 12)
        self.first, self.second = nn.Linear(12, 16), nn.Linear(16, 12)
        self.third, self.wide = nn.Linear(12, 16, bias=False), nn.Linear(16, 7)
        self.conv = nn.Conv1d(3, 5, 2)
        self.attention = nn.MultiheadAttention(12, 2, batch_first=True)
        self.norm = nn.LayerNorm(12)
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.unused = nn.Linear(3, 4)
        self.frozen = nn.Parameter(torch.ones(3, 3), requires_grad=False)
        self.lm_head = nn.Linear(7, 11, bias=False)
        self.to(dtype)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.embed(ids))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + self.second(self.first(x).relu())
        x = self.wide(self.third(x).tanh()) + self.conv(x[:, :3])[:, :5, :7].mean(1, keepdim=True)
        return self.lm_head(x * self.scalar) + self.empty.sum()  # type: ignore[no-any-return]


def loss(model: nn.Module, step: int, rank: int) -> Tensor:
    """Of a batch that depends on step and rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    ids = torch.randint(11, (4, 6), generator=generator)
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), (ids * 3 + 1).flatten() % 11)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int], ranks: Iterable[int] | None = None
) -> None:
    """Steps on the mean loss of the batches of `ranks` (None: of this one's)."""
    of = list(ranks) if ranks is not None else [dist.get_rank() if dist.is_initialized() else 0]
    for step in steps:
        optimizer.zero_grad()
        torch.stack([loss(model, step, rank) for rank in of]).mean().backward()
        optimizer.step()


def weights(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the parameters."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def plain(model: nn.Module) -> dict[str, list[Any]]:
    """The parameters, as another process can have them."""
    return {name: p.detach().tolist() for name, p in model.named_parameters()}


def apart(a: dict[str, Any], b: dict[str, Any]) -> float:
    """The largest difference of any element."""
    pairs = [(_wide(a[name]), _wide(b[name])) for name in a]
    return max(float((x - y).abs().max()) for x, y in pairs if x.numel())


def _wide(values: Tensor | list[Any]) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float64).detach()


def bits(model: nn.Module) -> str:
    """A hash of the parameters' bits."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(bytes(parameter.detach().contiguous().view(-1).view(torch.uint8).tolist()))
    return digest.hexdigest()


def resumed(make: Callable[[nn.Module], Any], steps: int = 3) -> tuple[str, str]:
    """Bits after 2 x `steps` steps of a run, and of one that stopped half-way and went on elsewhere."""
    model = Small()
    optimizer = make(model)
    train(model, optimizer, range(steps))
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = optimizer.state_dict()
    state = torch.load(_buffer(state), weights_only=True)
    train(model, optimizer, range(steps, 2 * steps))
    other = Small(seed=5)
    going_on = make(other)
    other.load_state_dict(saved)
    going_on.load_state_dict(state)
    train(other, going_on, range(steps, 2 * steps))
    return bits(model), bits(other)


def _buffer(state: Any) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return buffer


def matrix_groups(**named: Tensor) -> list[dict[str, Any]]:
    """One group of matrices."""
    return [{"params": [(name, nn.Parameter(tensor)) for name, tensor in named.items()], "kind": "matrix"}]


def groups(model: nn.Module) -> tw.optim.ParamGroups:
    return tw.optim.param_groups(model)
