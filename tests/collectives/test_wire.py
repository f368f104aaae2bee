"""A wire is made whatever process groups a script has made before."""

from __future__ import annotations

import torch
import torch.distributed as dist

import thinwire as tw
from tests.support.ranks import run_ranks
from thinwire.collectives import Wire


def groups_known() -> int:
    return len(dist.distributed_c10d._world.pg_names)


def wires_after_uneven_groups() -> list[object]:
    """Each rank is in another number of groups: of the first, of the last two, of one of its own."""
    rank = dist.get_rank()
    dist.new_group([0])
    dist.new_group([2, 3])
    for _ in range(rank):
        dist.new_group([rank], use_local_synchronization=True)
    before = groups_known()
    wire = Wire()
    parts = [wire.part([0], "alone") if rank == 0 else wire.part([1, 2, 3], "three")]
    parts.append(wire.part([rank // 2 * 2, rank // 2 * 2 + 1], "pair", own_worker=True))
    sums = []
    for some in (wire, *parts):
        sums.append(float(some.control_all_reduce(torch.tensor([float(rank)]))[0]))
        if some.world_size > 1:
            some.phase("gather")
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    method = tw.Pier(every=2, groups=2, shard_reference=True)
    sync = tw.local_update(model, optimizer, method, total_steps=100)
    for _ in range(4):
        model(torch.full((1, 3), float(rank))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        sync.step()
    sync.verify()
    sync.close()
    parts[-1].close()
    wire.close()
    return [before, *sums]


def test_ranks_that_are_in_different_numbers_of_groups_meet() -> None:
    found = run_ranks(wires_after_uneven_groups, 4)
    assert len({before for before, *_ in found}) > 1
    assert [sums for _, *sums in found] == [[6.0, 0.0, 1.0], [6.0, 6.0, 1.0], [6.0, 6.0, 5.0], [6.0, 6.0, 5.0]]
