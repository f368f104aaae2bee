"""The piece of every slot that a reduce-scatter leaves on this rank, cut by element."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from thinwire.collectives import Layout, Slot, Wire
from thinwire.reducers.reducer import check_pieces


class Pieces:
    """This rank's pieces of slots on a wire: a slot's units, or single elements, in equal shares (ceil)."""

    def __init__(self, slots: Sequence[Slot], wire: Wire) -> None:
        self._rank = wire.rank
        places = Layout(tuple(slots), wire.world_size, block=1).places
        self._places = {place.slot.name: place for place in places}

    def check(self, out: Mapping[str, Tensor]) -> None:
        """Refuse by name a tensor that cannot take its piece."""
        check_pieces(out, {name: self._places[name].length(self._rank) for name in out}, self._rank)

    def write(self, whole: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        """Copy this rank's piece of each of `whole`, tensors of as many elements as their slots, into `out`."""
        for name, piece in out.items():
            start = self._rank * self._places[name].piece
            part = whole[name].detach().reshape(-1)[start : start + piece.numel()]
            piece.detach().copy_(part.view(piece.shape))
