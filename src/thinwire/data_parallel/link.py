"""A link: a reducer attached to a model. The handle through which users see and steer it."""

from __future__ import annotations

import ctypes
import hashlib
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.collectives import Ledger, Slot, Wire
from thinwire.reducers.reducer import BoundReducer, State


class Link:
    """What `tw.attach` returns.

    `ledger` counts bytes, `exposed_seconds` is the time that backward passes were blocked on communication,
    `encode_seconds` the time the worker spent encoding and decoding (hidden or not).
    """

    def __init__(
        self, model: nn.Module, reducer: BoundReducer, wire: Wire, slots: list[Slot], on_detach: Callable[[], None]
    ) -> None:
        self.reducer = reducer
        self.exposed_seconds = 0.0
        self._model = model
        self._wire = wire
        self._slots = slots
        self._on_detach = on_detach
        self._verify_every = 0
        self._reductions = 0
        self._detached = False
        self._verify_names()

    @property
    def ledger(self) -> Ledger:
        return self._wire.ledger

    @property
    def world_size(self) -> int:
        return self._wire.world_size

    @property
    def encode_seconds(self) -> float:
        return self._wire.busy_seconds

    @property
    def slots(self) -> tuple[Slot, ...]:
        """What is averaged, in the order of the model's parameters."""
        return tuple(self._slots)

    def verify(self, every: int = 100) -> None:
        """Compare a hash of all parameters across ranks now and before every n-th reduction (0: never again).

        Raises RuntimeError naming the ranks that differ. Control traffic: an all-gather of 8 bytes.
        """
        if every < 0:
            raise ValueError(f"verify needs every >= 0, got {every}")
        self._verify_every = every
        self._verify_parameters()

    def set_loss_scale(self, scale: float) -> None:
        """Tell the reducer by what the loss is multiplied (a GradScaler's scale), before the backward pass."""
        self.reducer.set_loss_scale(scale)

    def rollback(self, names: list[str] | None = None) -> None:
        """Forget what the last reduction added to the error memory, of all slots or of `names`: for a caller
        who throws that reduction's gradients away."""
        self.reducer.rollback(names)

    def control_all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum a small tensor over the ranks, in place, now; counted as control traffic."""
        return self._wire.control_all_reduce(tensor)

    def state_dict(self) -> State:
        """This rank's state: plain tensors and numbers. Save it for every rank."""
        return self.reducer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned on this rank. Raises ValueError naming what does not fit."""
        self.reducer.load_state_dict(dict(state))

    def memory_bytes(self) -> int:
        """Bytes that the reducer holds on this rank."""
        return self.reducer.memory_bytes()

    def detach(self) -> None:
        """Give the model its own gradient averaging back. Error memory not yet sent is dropped."""
        if not self._detached:
            self._detached = True
            self._on_detach()
            self._wire.close()

    def begin(self) -> None:
        """Open a reduction (the call site does this before its first bucket)."""
        self._reductions += 1
        if self._verify_every and self._reductions % self._verify_every == 0:
            self._verify_parameters()
        self.reducer.begin()

    def raise_error(self) -> None:
        """Raise what broke the wire, if anything did."""
        if self._wire.error is not None:
            raise self._wire.error

    def expose(self, since: float) -> None:
        """Count the time from `since` (time.perf_counter) until now as exposed communication."""
        self.exposed_seconds += time.perf_counter() - since

    def _verify_names(self) -> None:
        """All ranks must average the same slots: otherwise they would sum unrelated numbers without an error."""
        described = [f"{slot.name} {slot.dtype} {tuple(slot.shape)}" for slot in self._slots]
        hashes = self._wire.control_all_gather(_hash_tensor(json.dumps(described).encode()))
        if bool((hashes == hashes[0]).all()):
            return
        listings = _gather_text(self._wire, "\n".join(described))
        for rank, listing in enumerate(listings):
            if listing != listings[0]:
                mine, theirs = listings[0].splitlines(), listing.splitlines()
                unequal = (i for i, (a, b) in enumerate(zip(mine, theirs)) if a != b)
                first = next(unequal, min(len(mine), len(theirs)))
                raise ValueError(
                    f"ranks hold different models: parameter {first} is {_at(mine, first)} on rank 0 and "
                    f"{_at(theirs, first)} on rank {rank}; build the same model on every rank"
                )

    def _verify_parameters(self) -> None:
        if self.reducer.replicas == "drift":
            return
        digest = hashlib.sha256()
        for _, parameter in self._model.named_parameters():
            host = parameter.detach().contiguous().cpu()
            digest.update(ctypes.string_at(host.data_ptr(), host.nbytes))  # numpy may be absent
        hashes = self._wire.control_all_gather(_hash_tensor(digest.digest()))
        differing = [rank for rank, other in enumerate(hashes) if not torch.equal(other, hashes[0])]
        if differing:
            raise RuntimeError(
                f"parameters differ between ranks: rank {', '.join(map(str, differing))} from rank 0, "
                f"seen before reduction {self._reductions}; replicas must start equal and take the same updates"
            )


def _at(lines: list[str], index: int) -> str:
    return repr(lines[index]) if index < len(lines) else "absent"


def _hash_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(hashlib.sha256(data).digest()[:8]), dtype=torch.uint8)


def _gather_text(wire: Wire, text: str) -> list[str]:
    """A text of every rank, padded to the longest."""
    data = torch.frombuffer(bytearray(text.encode() + b"\0"), dtype=torch.uint8)
    longest = wire.control_all_reduce(torch.tensor([data.numel()]), dist.ReduceOp.MAX)
    padded = torch.zeros(int(longest.item()), dtype=torch.uint8)
    padded[: data.numel()] = data
    return [bytes(row.tolist()).rstrip(b"\0").decode() for row in wire.control_all_gather(padded)]
