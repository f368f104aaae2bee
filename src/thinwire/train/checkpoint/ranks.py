"""The ranks that write or read one checkpoint together, and what is said when one of them is lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from thinwire.collectives.failures import describe, is_of_a_collective
from thinwire.train.checkpoint.manifest import CheckpointError
from thinwire.usage import first_line


class Ranks:
    """A gloo group; alone where torch.distributed is not initialised."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = dist.get_rank(group) if group else 0
        self.size = dist.get_world_size(group) if group else 1
        self._mesh = DeviceMesh.from_group(group, "cpu") if group else None

    def all_gather(self, value: Any) -> list[Any]:
        gathered = [value] * self.size
        if self.group:
            dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value on every rank."""
        holder = [value]
        if self.group:
            dist.broadcast_object_list(holder, group=self.group, group_src=0)
        return holder[0]

    def stacked(self, local: Tensor) -> Tensor:
        """(R, *shape): one row per rank, of which this rank holds its own."""
        row = local.detach().cpu()[None]
        if self._mesh is None:
            return row
        return DTensor.from_local(row, self._mesh, [Shard(0)], run_check=False)

    @contextmanager
    def explaining(self, what: str) -> Iterator[None]:
        """A failure of torch in here is a `CheckpointError` of one line: `what` could not be done, and why;
        after a collective also which ranks do not answer."""
        try:
            yield
        except CheckpointError:
            raise
        except RuntimeError as error:
            if self.group is None or not is_of_a_collective(error):
                raise CheckpointError(f"{what}: {kind_and_line(error)}") from error
            ranks, name = dist.get_process_group_ranks(self.group), self.group.group_name
            line = describe(what, error, rank=ranks[self.rank], ranks=ranks, group_name=name)
            raise CheckpointError(line) from error


def kind_and_line(error: BaseException) -> str:
    """The kind of an error and the first line of its message; of the system's own errors the line alone."""
    line, kind = first_line(error), type(error).__name__
    return line if isinstance(error, OSError) or line == kind else f"{kind}: {line}"
