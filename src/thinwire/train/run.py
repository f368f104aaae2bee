"""Everything that a training loop works on, put together in the one order that is correct.

    data -> model -> the ranks agree -> DDP or FSDP2 -> one throw-away step -> tw.attach -> optimizers

The throw-away step lets DDP rebuild its buckets, so that a resumed run reduces in the same order as an
uninterrupted one: random state is restored, gradients are dropped, no counter moves. After `attach` nothing
uses the default process group any more; small agreements go through the link's control group.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import thinwire as tw
from thinwire.local_update import LocalUpdate
from thinwire.train.arguments import to_table
from thinwire.train.averaging import Attach, Averaging, attach_recipe, optimizer_of
from thinwire.train.config import ConfigError, TrainConfig
from thinwire.train.data.sampler import GlobalSampler
from thinwire.train.data.samples import IGNORED, Batch, TokenData, build_data
from thinwire.train.model import Vocabulary, build_model, identity
from thinwire.train.optimizer import build_optimizers
from thinwire.train.parallel import spread

logger = logging.getLogger(__name__)

# Settings that ranks on different machines may differ in.
_LOCAL_KEYS = ("out", "workers", "threads", "port", "device", "logging", "data.files", "data.shards", "model.name")


class RanksDiffer(RuntimeError):
    """The ranks of this run do not train the same thing; the message names the rank and what differs."""


@dataclass(frozen=True)
class Run:
    """The parts of a run on this rank."""

    config: TrainConfig
    rank: int
    world_size: int
    device: torch.device
    train_data: TokenData
    validation_data: TokenData
    sampler: GlobalSampler
    model: nn.Module  # the bare model
    wrapped: nn.Module  # what a step calls: the model in DDP, or itself in shards
    averaging: Averaging
    optimizers: tuple[Optimizer, ...]
    identity: dict[str, Any]  # of the run, for its checkpoints

    @property
    def link(self) -> tw.Link:
        return self.averaging.link

    @property
    def sync(self) -> LocalUpdate | None:
        return self.averaging.sync

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def agree(self, values: Sequence[float]) -> list[float]:
        """The sums of these numbers over all ranks."""
        summed: list[float] = self.link.control_all_reduce(torch.tensor(values, dtype=torch.float64)).tolist()
        return summed

    def table(self, values: Sequence[float]) -> list[list[float]]:
        """These numbers of every rank, in rank order, on all ranks."""
        own = torch.zeros(self.world_size, len(values), dtype=torch.float64)
        own[self.rank] = torch.tensor(values, dtype=torch.float64)
        rows: list[list[float]] = self.link.control_all_reduce(own).tolist()
        return rows

    @property
    def uneven(self) -> bool:
        """Whether the ranks' shares of a step may differ in tokens."""
        return not self.config.data.pack or self.config.batch_size % self.world_size > 0

    def autocast(self) -> AbstractContextManager[Any]:
        if self.config.precision == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def shares(self, position: int) -> list[list[int]]:
        """This rank's sample ids of the step that starts at `position`, one list per micro-batch.

        A step takes the same samples whatever the number of ranks and the accumulation are: they are shared
        out in order, as evenly as possible.
        """
        ids = self.sampler.take(position, self.config.batch_size)
        own = _parts(ids, self.world_size)[self.rank]
        return _parts(own, self.config.accumulation)


def assemble(
    config: TrainConfig,
    device: torch.device,
    attach: Attach = attach_recipe,
    build: Callable[..., nn.Module] = build_model,
) -> Run:
    """Build all parts. The default process group is up; every rank calls this with the same configuration."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train_data, validation_data = build_data(config.data, seed=config.seed)
    tokenizer = train_data.tokenizer
    vocabulary = Vocabulary(tokenizer.vocab_size, tokenizer.eos_id, tokenizer.pad_id)
    model = build(config.model, vocabulary, seed=config.seed)
    _all_ranks_agree(config, train_data.corpus_hash, model)
    model.to(device)
    torch.manual_seed(config.seed * 1_000_003 + rank)  # dropout differs between ranks, as samples do
    random.seed(config.seed * 1_000_003 + rank)
    wrapped = spread(model, config, device)
    throw_away_step(wrapped, device, find_unused=config.model.find_unused_parameters)
    optimizer = optimizer_of(config)
    optimizers = build_optimizers(model, optimizer)
    return Run(
        config=config,
        rank=rank,
        world_size=world_size,
        device=device,
        train_data=train_data,
        validation_data=validation_data,
        sampler=GlobalSampler(train_data.num_sequences, config.seed),
        model=model,
        wrapped=wrapped,
        averaging=attach(wrapped, optimizers, config),
        optimizers=optimizers,
        identity={
            "recipe": config.recipe,
            "model": identity(model),
            "optimizer": optimizer.name,
            "seed": config.seed,
            "data": {
                "tokenizer": tokenizer.fingerprint,
                "corpus_hash": train_data.corpus_hash,
                "training_tokens": train_data.num_tokens,  # of that text, the rest is held out
                "sequence_length": config.data.sequence_length,
                "pack": config.data.pack,
            },
        },
    )


def throw_away_step(wrapped: nn.Module, device: torch.device, *, find_unused: bool) -> None:
    """One forward and backward whose only trace is that DDP's buckets are final at the next forward."""
    state, python_state = torch.get_rng_state(), random.getstate()
    cuda_state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    ids = torch.zeros(1, 8, dtype=torch.int64, device=device)
    summed_loss(wrapped, Batch(ids, None, ids, ids[:, 0])).backward()
    named = wrapped.named_parameters()
    without = [n.removeprefix("module.") for n, p in named if p.requires_grad and p.grad is None]
    if without and not find_unused:
        raise ConfigError(
            f"model.find_unused_parameters: {len(without)} parameters of this model get no gradient, "
            f"{without[0]!r} for one; set it to true"
        )
    wrapped.zero_grad(set_to_none=True)
    torch.set_rng_state(state)
    random.setstate(python_state)
    if cuda_state is not None:
        torch.cuda.set_rng_state(cuda_state, device)


def summed_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The cross entropy of the next tokens, summed over the positions that have a target, in nats."""
    logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits  # (batch, length, vocab)
    targets = F.pad(batch.labels[:, 1:], (0, 1), value=IGNORED)  # (batch, length)
    return F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).float(), targets.reshape(-1), ignore_index=IGNORED, reduction="sum"
    )


def count_targets(batch: Batch) -> int:
    """The positions of a batch that `summed_loss` sums over."""
    return int((batch.labels[:, 1:] != IGNORED).sum())


def fetch(data: TokenData, sample_ids: Sequence[int], device: torch.device) -> Batch:
    """A batch on the device of the model."""
    batch = data.batch(sample_ids)
    if device.type == "cpu":
        return batch
    mask = None if batch.attention_mask is None else batch.attention_mask.to(device)
    return Batch(batch.input_ids.to(device), mask, batch.labels.to(device), batch.sample_ids)


def _parts(items: list[int], count: int) -> list[list[int]]:
    """Consecutive parts whose sizes differ by at most one."""
    return [items[len(items) * n // count : len(items) * (n + 1) // count] for n in range(count)]


def _all_ranks_agree(config: TrainConfig, corpus_hash: str, model: nn.Module) -> None:
    """Compare configuration, text and model with rank 0's before DDP does, which says less or hangs."""
    facts = {f"setting {key}": value for key, value in _flat(to_table(config)) if key not in _LOCAL_KEYS}
    facts["the text (its hash)"] = corpus_hash
    for name, parameter in model.named_parameters():
        facts[f"parameter {name!r} of the model"] = f"{tuple(parameter.shape)} {parameter.dtype}"
    everyone: list[Mapping[str, Any]] = [facts] * dist.get_world_size()
    dist.all_gather_object(everyone, facts)
    for rank, theirs in enumerate(everyone):
        for key in {**everyone[0], **theirs}:
            expected, found = everyone[0].get(key, "not there"), theirs.get(key, "not there")
            if expected != found:
                raise RanksDiffer(f"rank {rank} differs from rank 0 in {key}: {found} instead of {expected}")


def _flat(table: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """(dotted key, value) of nested dicts; the keys that may differ between machines are left whole."""
    items: list[tuple[str, Any]] = []
    for key, value in table.items():
        dotted = f"{prefix}{key}"
        nested = isinstance(value, dict) and dotted not in _LOCAL_KEYS
        items += _flat(value, f"{dotted}.") if nested else [(dotted, value)]
    return items
