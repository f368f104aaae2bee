"""What of a model's parameters this rank averages: all, its shards of them, or its share of what its group has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.collectives import Slot, Wire
from thinwire.collectives.pipeline import Task
from thinwire.data_parallel.parameters import local_part
from thinwire.reducers.reducer import label
from thinwire.reducers.views import memory_view


class Weights:
    """Parameters by name, as this rank keeps anchors of them.

    With `group`, ranks that hold the same weights share the work: rank k keeps the k-th part of each parameter, in
    the order of memory, and `spread` gives the group what each of its ranks has. (A parameter with gaps in memory
    is kept whole by all.) Without, `spread` does nothing.

    `shards`: wires to the ranks that hold other parts of a sharded model's weights. Call `open` before writing.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        group: Wire | None = None,
        shards: Sequence[Wire] = (),
        open_: Callable[[], None] = lambda: None,
    ) -> None:
        self._parameters = {name: p for name, p in parameters.items() if local_part(p).numel()}
        self._group = group if group is not None and group.world_size > 1 else None
        self._shards = shards
        self._mates = [*shards, self._group] if self._group is not None else list(shards)
        self.open = open_
        """To be called before these are written to: drops what is gathered of them."""

    @property
    def sharers(self) -> int:
        """Ranks that share the work."""
        return self._group.world_size if self._group is not None else 1

    def sum_over_shards(self, value: Tensor) -> Tensor:
        """Over the ranks that hold other parts of the same weights: control traffic."""
        for shards in self._shards:
            value = shards.control_all_reduce(value)
        return value

    def sum_over_group(self, value: Tensor) -> Tensor:
        """Over the ranks that share the work: control traffic."""
        return self._group.control_all_reduce(value) if self._group is not None else value

    def worst(self, verdict: int) -> int:
        """The lowest verdict of all ranks that hold parts of these weights: control traffic, if there are any."""
        for mates in self._mates:
            own = torch.tensor([verdict], device=mates.device)
            verdict = int(mates.control_all_reduce(own, dist.ReduceOp.MIN))
        return verdict

    @property
    def names(self) -> Sequence[str]:
        """Of all that lie on this rank."""
        return list(self._parameters)

    def kept(self, names: Iterable[str]) -> Sequence[str]:
        """Those of which this rank keeps anything."""
        return [name for name in names if name in self._parameters and self[name].numel()]

    def __getitem__(self, name: str) -> Tensor:
        """A view of what this rank keeps: it can be written to."""
        flat = self._flat(name)
        if flat is None or self._group is None:
            return local_part(self._parameters[name])
        piece = self._piece(flat)
        return flat[piece * self._group.rank : piece * (self._group.rank + 1)]

    def slots(self) -> list[Slot]:
        """What is averaged: in float32 at least, as what a narrow parameter rounds away must not be lost."""
        return [
            Slot(name, tuple(self[name].shape), wide(self._parameters[name])) for name in self.kept(self.names)
        ]

    def copies(self) -> dict[str, Tensor]:
        """Of all that lies on this rank."""
        return {name: local_part(p).clone() for name, p in self._parameters.items()}

    def restore(self, copies: Mapping[str, Tensor]) -> None:
        """What `copies` returned."""
        self.open()
        for name, copy in copies.items():
            local_part(self._parameters[name]).copy_(copy)

    def spread(self, names: Iterable[str]) -> None:
        """Give the group what this rank keeps of these, and take what the others keep: an all-gather, for which
        each of G ranks sends (G-1) / G of their bytes."""
        if self._group is None:
            return
        if shared := [name for name in names if self._flat(name) is not None]:
            self._group.submit([self._exchange(shared, self._group)], label(shared)).wait()

    def _exchange(self, names: Sequence[str], group: Wire) -> Task:
        rows = {name: self._padded(name) for name in names}  # each (W, piece)
        for dtype in dict.fromkeys(row.dtype for row in rows.values()):  # in one order on all ranks
            same = {name: row for name, row in rows.items() if row.dtype == dtype}
            own = torch.cat([row[group.rank] for row in same.values()])
            everyone = own.new_empty((group.world_size, own.numel()))
            yield group.all_gather(everyone.view(torch.uint8), own.view(torch.uint8))
            widths = [row.shape[1] for row in same.values()]
            for name, part in zip(same, everyone.split(widths, dim=1)):
                flat = self._flat(name)
                assert flat is not None
                flat.copy_(part.reshape(-1)[: flat.numel()])

    def _padded(self, name: str) -> Tensor:
        flat = self._flat(name)
        assert flat is not None
        assert self._group is not None
        whole = flat.new_zeros(self._piece(flat) * self._group.world_size)
        whole[: flat.numel()] = flat
        return whole.view(self._group.world_size, -1)

    def _flat(self, name: str) -> Tensor | None:
        view = memory_view(local_part(self._parameters[name]))
        return view if view.dim() == 1 else None

    def _piece(self, flat: Tensor) -> int:
        assert self._group is not None
        return -(-flat.numel() // self._group.world_size)


def wide(tensor: Tensor) -> torch.dtype:
    """Of an anchor."""
    return torch.promote_types(tensor.dtype, torch.float32)
