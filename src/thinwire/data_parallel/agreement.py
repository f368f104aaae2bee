"""What the ranks of a link must have in common, compared by hash: slots, reducer, parameters.

Ranks that average different slots would sum unrelated numbers without an error, and ranks with different
reducers would wait for each other's collectives until the timeout.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives import Slot, Wire
from thinwire.reducers import Reducer


def check_same_model(wire: Wire, slots: Sequence[Slot]) -> None:
    """Raise ValueError on every rank, naming the first parameter that differs."""
    described = [f"{slot.name} {slot.dtype} {tuple(slot.shape)}" for slot in slots]
    if difference := _first_difference(wire, described):
        index, sides = difference
        raise ValueError(
            f"ranks hold different models: parameter {index} is {sides}; build the same model on every rank"
        )


def check_same_reducer(wire: Wire, reducer: Reducer) -> None:
    """Raise ValueError on every rank if one attaches another reducer."""
    if sides := _different(wire, reducer):
        raise ValueError(f"ranks attach different reducers: {sides}; attach the same on every rank")


def check_same_method(wire: Wire, method: object) -> None:
    """Raise ValueError on every rank if one averages by another method."""
    if sides := _different(wire, method):
        raise ValueError(f"ranks average by different methods: {sides}; use the same on every rank")


def ranks_that_differ(wire: Wire, tensors: Iterable[Tensor], *, abstain: bool = False) -> list[int]:
    """Ranks whose tensors are not bit for bit those of most ranks (in a tie, of the lowest rank).

    A rank that abstains takes part and is not counted. Control traffic: an all-gather of 8 bytes.
    """
    vote = torch.zeros(8, dtype=torch.uint8) if abstain else _hash(b"".join(map(_digest, tensors)))
    votes = enumerate(bytes(row.tolist()) for row in wire.control_all_gather(vote.to(wire.device)))
    counted = {rank: vote for rank, vote in votes if any(vote)}
    most, _ = Counter(counted.values()).most_common(1)[0] if counted else (b"", 0)  # in a tie, the first seen
    return [wire.ranks[rank] for rank, vote in counted.items() if vote != most]


def hash_of(tensor: Tensor) -> Tensor:
    """8 bytes, uint8, of a hash of the tensor's bytes."""
    return _hash(_digest(tensor))


def _different(wire: Wire, configuration: object) -> str | None:
    """What two ranks have, if not the same."""
    described = re.sub(r" at 0x[0-9a-f]+", "", repr(configuration))  # the address of a rule that is a function
    difference = _first_difference(wire, [described])
    return difference[1] if difference else None


def _first_difference(wire: Wire, lines: Sequence[str]) -> tuple[int, str] | None:
    """Where the lines of the ranks first part: number, and "'x' on rank 0 and absent on rank 2"."""
    text = "\n".join(lines)
    hashes = wire.control_all_gather(_hash(text.encode()).to(wire.device))
    if bool((hashes == hashes[0]).all()):
        return None
    mine, *others = (listing.splitlines() for listing in _gather_text(wire, text))
    rank, theirs = next((rank, lines) for rank, lines in enumerate(others, 1) if lines != mine)
    unequal = (i for i, (a, b) in enumerate(zip(mine, theirs)) if a != b)
    first = next(unequal, min(len(mine), len(theirs)))
    here, there = wire.ranks[0], wire.ranks[rank]
    return first, f"{_at(mine, first)} on rank {here} and {_at(theirs, first)} on rank {there}"


def _at(lines: Sequence[str], index: int) -> str:
    return repr(lines[index]) if index < len(lines) else "absent"


def _digest(tensor: Tensor) -> bytes:
    """SHA-256 of the tensor's bytes, without numpy: torch alone does not bring it."""
    plain = tensor.detach().cpu().contiguous()
    if not plain.numel():
        return b""
    return hashlib.sha256((ctypes.c_ubyte * plain.nbytes).from_address(plain.data_ptr())).digest()


def _hash(data: bytes) -> Tensor:
    """8 bytes of the hash of `data`."""
    return torch.frombuffer(bytearray(hashlib.sha256(data).digest()[:8]), dtype=torch.uint8)


def _gather_text(wire: Wire, text: str) -> list[str]:
    """A text of every rank, padded to the longest."""
    data = torch.frombuffer(bytearray(text.encode() + b"\0"), dtype=torch.uint8)
    longest = wire.control_all_reduce(torch.tensor([data.numel()], device=wire.device), dist.ReduceOp.MAX)
    padded = torch.zeros(int(longest.item()), dtype=torch.uint8, device=wire.device)
    padded[: data.numel()] = data
    return [bytes(row.tolist()).rstrip(b"\0").decode() for row in wire.control_all_gather(padded)]
