"""Buffers, such as running statistics: what ranks make of the mean of theirs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives import Wire
from thinwire.data_parallel.agreement import hash_of
from thinwire.data_parallel.parameters import local_part


class Buffers:
    """The buffers of a module by name, and a copy of what the ranks agreed on last.

    `average` takes the mean of floating point and complex buffers and the largest of all others (counts). Those
    that are equal, as constants are, stay as they are and cost a hash of 8 bytes to each rank; one whose mean is
    not finite goes back to what was agreed on last. Control traffic.
    """

    def __init__(self, find: Callable[[], Mapping[str, Tensor]], wire: Wire) -> None:
        self._find = find
        self._wire = wire
        self._agreed = self.copies()

    @property
    def _buffers(self) -> dict[str, Tensor]:
        """Those of now: a module may assign new ones, and `model.to(dtype)` does."""
        return {name: buffer for name, buffer in self._find().items() if local_part(buffer).numel()}

    def average(self) -> None:
        """Collective."""
        for name in self._differing():
            buffer = local_part(self._buffers[name])
            mean = self._mean(buffer)
            buffer.copy_(mean if bool(mean.isfinite().all()) else self._agreed[name])
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

    def _differing(self) -> list[str]:
        """Of which not all ranks hold the same bits."""
        if not self._buffers:
            return []
        hashes = torch.stack([hash_of(local_part(buffer)) for buffer in self._buffers.values()])  # (n, 8)
        everyone = self._wire.control_all_gather(hashes.to(self._wire.device))  # (W, n, 8)
        differ = (everyone != everyone[0]).any(dim=2).any(dim=0).tolist()
        return [name for name, differs in zip(self._buffers, differ) if differs]

    def _mean(self, buffer: Tensor) -> Tensor:
        whole = buffer.contiguous()
        if whole.is_floating_point() or whole.is_complex():
            mean = whole.to(torch.promote_types(whole.dtype, torch.float32), copy=True)
            return self._wire.control_all_reduce(mean.div_(self._wire.world_size))
        largest = whole.to(torch.int64, copy=True)  # gloo knows no maximum of booleans
        return self._wire.control_all_reduce(largest, dist.ReduceOp.MAX)
