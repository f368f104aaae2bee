"""The optimizer and its learning rate.

AdamW, or Muon for the hidden matrices (two-dimensional, not an embedding or the output layer) with AdamW for
the rest. Weight decay acts on matrices only. The learning rate is a pure function of the step, so it has no
state to save:

    lr(s) = peak * (s + 1) / warmup                                                s < warmup
    lr(s) = peak * (f + (1 - f) * (1 + cos(pi * (s - warmup) / (S - warmup))) / 2)    after it

with f the final fraction, S the steps of the run and s counted from 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from thinwire.train.config import OptimizerConfig, TrainConfig
from thinwire.train.parallel import whole


def build_optimizers(model: nn.Module, config: OptimizerConfig) -> tuple[Optimizer, ...]:
    """One AdamW, or Muon and an AdamW."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = hidden_matrices(model) if config.name == "muon" else set()
    rest = [p for name, p in named if name not in matrices]
    adamw = torch.optim.AdamW(
        _decay_groups(rest, config.weight_decay),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )
    if not matrices:
        return (adamw,)
    muon = torch.optim.Muon(
        [p for name, p in named if name in matrices],
        lr=config.lr,
        weight_decay=config.weight_decay,
        momentum=config.momentum,
        adjust_lr_fn="match_rms_adamw",  # updates as large as AdamW's: one learning rate for both
    )
    return (muon, adamw)


def hidden_matrices(model: nn.Module) -> set[str]:
    """Names of the two-dimensional trainable parameters, embeddings and the output layer apart."""
    ends = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    output = getattr(model, "get_output_embeddings", lambda: None)()
    if output is not None:
        ends.add(id(output.weight))
    return {n for n, p in model.named_parameters() if p.requires_grad and p.ndim == 2 and id(p) not in ends}


def learning_rate(step: int, config: TrainConfig) -> float:
    """The learning rate of the step with this index, from 0."""
    warmup, peak, f = config.warmup_steps, config.optimizer.lr, config.schedule.final_fraction
    if step < warmup:
        return peak * ((step + 1) / warmup)
    if config.schedule.decay == "constant":
        return peak
    progress = (step - warmup) / max(1, config.steps - warmup)
    return peak * (f + (1 - f) * (1 + math.cos(math.pi * min(1.0, progress))) / 2)


def set_learning_rate(optimizers: Sequence[Optimizer], lr: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr


def settings(optimizers: Sequence[Optimizer]) -> list[dict[str, Any]]:
    """What every group is set to: its numbers, without its parameters."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


def set_settings(optimizers: Sequence[Optimizer], chosen: Sequence[Mapping[str, Any]]) -> None:
    """Set the groups to what `settings` returned."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for group, values in zip(groups, chosen, strict=True):
        group.update(values)


def gradient_norm(parameters: Iterable[nn.Parameter], clip: float) -> float:
    """The norm of all gradients together; scales them to at most `clip` if that is positive.

    A norm that is not finite leaves the gradients as they are, for the caller to drop.
    """
    with_gradient = [p for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in with_gradient if p.grad is not None])
    value = float(whole(norm))
    if clip > 0 and math.isfinite(value):
        torch.nn.utils.clip_grads_with_norm_(with_gradient, clip, norm)
    return value


def _decay_groups(parameters: Sequence[nn.Parameter], weight_decay: float) -> list[dict[str, object]]:
    matrices = [p for p in parameters if p.ndim >= 2]
    vectors = [p for p in parameters if p.ndim < 2]
    groups: list[dict[str, object]] = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
