"""Buffers, such as running statistics: what ranks make of the mean of theirs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives import Wire
from thinwire.data_parallel.agreement import ranks_that_differ
from thinwire.data_parallel.parameters import local_part


class Buffers:
    """The buffers of a module by name, and a copy of what the ranks agreed on last.

    `average` takes the mean of floating point and complex buffers and the largest of all others (counts); ranks
    whose buffers are equal, as constants are, send 8 bytes to find that out and nothing else. Control traffic.
    """

    def __init__(self, buffers: Mapping[str, Tensor], wire: Wire) -> None:
        self._buffers = {name: buffer for name, buffer in buffers.items() if local_part(buffer).numel()}
        self._wire = wire
        self._agreed = self.copies()

    def average(self) -> None:
        """Collective."""
        if self._buffers and ranks_that_differ(self._wire, map(local_part, self._buffers.values())):
            for buffer in map(local_part, self._buffers.values()):
                self._average(buffer)
        self._agreed = self.copies()

    def copies(self) -> dict[str, Tensor]:
        """Of all of them."""
        return {name: local_part(buffer).clone() for name, buffer in self._buffers.items()}

    def restore(self, copies: Mapping[str, Tensor] | None = None) -> None:
        """These, or (None) what was agreed on last."""
        for name, copy in (self._agreed if copies is None else copies).items():
            local_part(self._buffers[name]).copy_(copy)

    @property
    def nbytes(self) -> int:
        """Of the copy."""
        return sum(agreed.nbytes for agreed in self._agreed.values())

    def state_dict(self) -> dict[str, Tensor]:
        """What was agreed on last, by name."""
        return {f"buffer.{name}": agreed.clone() for name, agreed in self._agreed.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError naming what is not there."""
        for name, agreed in self._agreed.items():
            saved = state.get(f"buffer.{name}")
            if not isinstance(saved, Tensor) or saved.shape != agreed.shape:
                raise ValueError(f"the local-update state has no buffer {name!r} of shape {tuple(agreed.shape)}")
            agreed.copy_(saved)

    def _average(self, buffer: Tensor) -> None:
        whole = buffer.contiguous()
        if whole.is_floating_point() or whole.is_complex():
            mean = whole.to(torch.promote_types(whole.dtype, torch.float32))
            buffer.copy_(self._wire.control_all_reduce(mean.div_(self._wire.world_size)))
        else:
            largest = whole.to(torch.int64)  # gloo knows no maximum of booleans
            buffer.copy_(self._wire.control_all_reduce(largest, dist.ReduceOp.MAX))
