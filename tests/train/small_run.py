"""A run that fits in a test: a small model with everything awkward in it, an optimizer, and a stand-in link."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.train.checkpoint.checkpointer import Checkpointer
from thinwire.train.checkpoint.state import TrainState


class Awkward(nn.Module):
    """Tied, frozen, unused, 0-d, empty and bfloat16 parameters; persistent and other buffers."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, width)
        self.hidden = nn.Linear(width, width)
        self.head = nn.Linear(width, 5, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(2, 2))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.narrow = nn.Parameter(torch.randn(width).bfloat16())
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        self.seen += tokens.numel()
        x = nn.functional.dropout(self.hidden(self.embed(tokens)), 0.5)
        return self.head(x * self.scale + self.narrow)


class StandInLink:
    """Per-rank error memory as `tw.attach` keeps it, nested once."""

    def __init__(self, model: nn.Module) -> None:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.reductions = 0
        self.residuals = {name: torch.zeros(p.shape) for name, p in named}

    def state_dict(self) -> dict[str, Any]:
        residuals = {f"residual.{name}": tensor for name, tensor in self.residuals.items()}
        return {
            "format_version": 1,
            "matrices": {"reductions": self.reductions, **residuals},
            "rank": rank(),
            "world_size": world_size(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["format_version"] == 1
        assert (state["rank"], state["world_size"]) == (rank(), world_size())
        self.reductions = state["matrices"]["reductions"]
        for name, tensor in self.residuals.items():
            tensor.copy_(state["matrices"][f"residual.{name}"])


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def fresh(seed: int = 0, *, link: bool = True, model: nn.Module | None = None) -> TrainState:
    torch.manual_seed(seed)
    model = model or Awkward()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    return TrainState(model, optimizer, StandInLink(model) if link else None, {"position": 0}, seed=seed)


def advance(state: TrainState, steps: int = 1) -> None:
    """Local steps: the same on every rank but for dropout, so the gradients of rank 0 are given to all."""
    for _ in range(steps):
        tokens = torch.randint(0, 5, (4,))
        state.model(tokens).float().pow(2).mean().backward()
        if dist.is_initialized():
            for parameter in state.model.parameters():
                if parameter.grad is not None:
                    dist.broadcast(parameter.grad, 0)
            for buffer in state.model.buffers():
                dist.broadcast(buffer, 0)
        for optimizer in state.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        state.numbers["position"] += 4
        if isinstance(state.link, StandInLink):
            state.link.reductions += 1
            for residual in state.link.residuals.values():
                residual += torch.randn(residual.shape) + rank()


def content(state: TrainState) -> dict[str, Any]:
    """Everything in it, as bytes, comparable and picklable."""
    found: dict[str, Any] = {f"model.{name}": bits(t) for name, t in state.model.state_dict().items()}
    for number, optimizer in enumerate(state.optimizers):
        for index, entry in optimizer.state_dict()["state"].items():
            for kind, value in entry.items():
                found[f"optimizer.{number}.{index}.{kind}"] = bits(value) if isinstance(value, Tensor) else value
        found[f"groups.{number}"] = repr(optimizer.state_dict()["param_groups"])
    if isinstance(state.link, StandInLink):
        found |= {f"link.{name}": bits(t) for name, t in state.link.residuals.items()}
        found["link.reductions"] = state.link.reductions
    return found | {"numbers": dict(state.numbers)}


def bits(tensor: Tensor) -> tuple[str, tuple[int, ...], bytes]:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return str(tensor.dtype), tuple(tensor.shape), flat.view(torch.uint8).numpy().tobytes()


def save_steps(directory: Path, steps: list[int], *, keep: int = 3, identity: dict[str, Any] | None = None) -> Any:
    """A run that saves after each of these steps; what it held at each."""
    state = fresh()
    checkpointer = Checkpointer(directory, keep=keep, identity=identity)
    held = {}
    done = 0
    for step in steps:
        advance(state, step - done)
        done = step
        checkpointer.save(step, state)
        held[step] = content(state)
    checkpointer.wait()
    checkpointer.close()
    return held


def load(directory: Path, *, identity: dict[str, Any] | None = None) -> tuple[int | None, dict[str, Any]]:
    """What a fresh run finds there."""
    state = fresh(seed=99)
    checkpointer = Checkpointer(directory, identity=identity)
    step = checkpointer.load_latest(state)
    checkpointer.close()
    return step, content(state)
