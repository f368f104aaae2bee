"""Who owns which matrix, and where each lies in what travels from or to its owner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

Owners = Mapping[str, int]
"""The rank that owns each matrix."""


def share_out(sizes: Mapping[str, int], world_size: int) -> dict[str, int]:
    """An owner for each matrix, the largest first to whoever has least; in the order of the names."""
    load = [0] * world_size
    owners = {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        owners[name] = load.index(min(load))
        load[owners[name]] += sizes[name]
    return {name: owners[name] for name in sizes}


class Portions:
    """A vector of numbers per rank in which each of its matrices has a portion; as long as the longest needs."""

    def __init__(self, owners: Owners, sizes: Mapping[str, int], world_size: int) -> None:
        """`sizes`: numbers that each matrix takes."""
        self._places: list[dict[str, slice]] = [{} for _ in range(world_size)]
        ends = [0] * world_size
        for name, owner in owners.items():
            self._places[owner][name] = slice(ends[owner], ends[owner] + sizes[name])
            ends[owner] += sizes[name]
        self.length = max(ends)

    def of(self, owner: int) -> Iterator[tuple[str, slice]]:
        """The matrices of an owner and their portions of its vector."""
        return iter(self._places[owner].items())
