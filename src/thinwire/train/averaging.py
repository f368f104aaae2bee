"""How a run averages: gradients in every step, or under local updates weights now and then.

Under local updates a rank's steps depend on no other rank's, so nothing is agreed on in a step: a request to stop
is heard at the end of a round, losses and counts are added up where they are logged, and each rank skips a step of
its own if its gradient is not finite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from datetime import timedelta
from typing import Any, TypeAlias

from torch import nn
from torch.optim import Optimizer

import thinwire as tw
from thinwire.local_update import LocalUpdate, Method
from thinwire.train.config import ConfigError, OptimizerConfig, TrainConfig


@dataclass(frozen=True)
class Averaging:
    """What averages, on this rank."""

    link: tw.Link
    """Of gradients."""
    sync: LocalUpdate | None = None
    """Of weights, if they are."""

    @property
    def sent_bytes(self) -> int:
        """Control traffic apart."""
        return self.link.ledger.sent_bytes()  # which counts what `sync` sends, too

    @property
    def between_groups_bytes(self) -> int:
        """Of them, those that left a group of ranks that local updates keep alike."""
        if self.sync is None:
            return 0
        return self.sent_bytes - self.link.ledger.sent_bytes(scope="group")

    @property
    def exposed_seconds(self) -> float:
        return self._of_both("exposed_seconds")

    @property
    def sending_seconds(self) -> float:
        return self._of_both("sending_seconds")

    @property
    def encode_seconds(self) -> float:
        return self._of_both("encode_seconds")

    def detach(self) -> None:
        """Give DDP its own averaging back."""
        if self.sync is None:
            self.link.detach()
        else:
            self.sync.close()

    def _of_both(self, name: str) -> float:
        own: float = getattr(self.link, name)
        return own + (getattr(self.sync, name) if self.sync is not None else 0.0)


Attach: TypeAlias = Callable[[nn.Module, Sequence[Optimizer], TrainConfig], Averaging]


def attach_recipe(wrapped: nn.Module, optimizers: Sequence[Optimizer], config: TrainConfig) -> Averaging:
    """Average as the configuration says."""
    recipe = tw.recipes.get(config.recipe)
    timeout = timedelta(seconds=config.timeout)
    method = method_of(config)
    if method is not None:
        return average_now_and_then(method, wrapped, optimizers, config)
    assert recipe.reducer is not None
    link = tw.attach(wrapped, recipe.reducer, timeout=timeout)
    if config.verify_every:
        link.verify(every=config.verify_every)
    return Averaging(link)


def average_now_and_then(
    method: Method, ddp: nn.Module, optimizers: Sequence[Optimizer], config: TrainConfig
) -> Averaging:
    """Average by local updates."""
    timeout = timedelta(seconds=config.timeout)
    sync = tw.local_update(ddp, optimizers, method, total_steps=config.steps, timeout=timeout)
    assert sync.link is not None  # as for every DDP model
    return Averaging(sync.link, sync)


def method_of(config: TrainConfig) -> Method | None:
    """The recipe's local updates as configured. Raises ConfigError naming a key that does not fit."""
    method = tw.recipes.get(config.recipe).method
    chosen = config.local_update
    known: set[str] = {field.name for field in fields(method)} if is_dataclass(method) else set()
    for key in ("every", "groups"):
        value: Any = getattr(chosen, key)
        if value is None:
            continue
        if method is None or key not in known:
            raise ConfigError(f"local_update.{key}: recipe {config.recipe} has no such setting")
        try:
            method = replace(method, **{key: value})  # type: ignore[type-var]
        except ValueError as error:
            raise ConfigError(f"local_update.{key}: {error}") from error
    return method


def optimizer_of(config: TrainConfig) -> OptimizerConfig:
    """The configured optimizer, or the one that the recipe is made for."""
    wanted = tw.recipes.get(config.recipe).optimizer
    return config.optimizer if wanted is None else replace(config.optimizer, name=wanted)
