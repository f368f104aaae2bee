"""What a geometry is: an invertible linear change of the coordinates of matrix gradients.

A reducer sends u = forward(g), and what comes back is inverse(mean of u): linear and the same on every rank, so
the mean may be taken in between. Its state is statistics and never gradients, and it does not communicate:
whoever owns it carries `statistics` to each matrix's owner, where the geometry wants that, and `payload` from
each owner to all ranks, which `install` it together.

Gradients of two or more dimensions are matrices (shape[0], rest).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

Shapes: TypeAlias = Mapping[str, tuple[int, int]]
"""Rows and columns of each matrix, by slot name."""

RoundTrip: TypeAlias = Callable[[Tensor], Tensor]
"""What is left of a matrix after it was encoded and decoded, float32 of the same shape."""

Rebase: TypeAlias = Callable[[str, Callable[[Tensor], Tensor]], None]
"""`rebase(name, change)`: replace everything that is kept in the old coordinates by `change` of it."""


Observer: TypeAlias = Callable[[Tensor], None]
"""Sees the inputs of a layer in a forward pass, float32 (tokens, columns), without padding."""


@dataclass(frozen=True)
class Fidelity:
    """What a round trip through the format leaves of a matrix's gradient, on its owner at the last refresh."""

    error: float
    """|decoded - gradient| / |gradient| in the coordinates in use: the plain ones where others were no gain."""
    plain_error: float
    """The same without a geometry."""
    cosine: float
    """Between the gradient and what is left of it."""


@dataclass(frozen=True)
class Place:
    """Where a geometry is bound."""

    rank: int
    world_size: int
    device: torch.device
    round_trip: RoundTrip
    shares_rows: bool = False
    """Whether each rank gets the means of some rows alone, as under FSDP2: then rows cannot be mixed."""


class BoundGeometry(Protocol):
    """Coordinates with state. All ranks make the same calls in the same order."""

    @property
    def names(self) -> frozenset[str]:
        """The matrices whose coordinates change; the reducer sends all others as they are."""

    @property
    def description(self) -> str:
        """What says, together with the state, which coordinates these are."""

    @property
    def mixes_rows(self) -> bool:
        """Whether a row of u depends on other rows than its own of g."""

    def forward(self, name: str, matrix: Tensor) -> Tensor:
        """g (rows, columns), or for a geometry that does not mix rows some rows of it, to u; a new tensor."""

    def inverse(self, name: str, matrix: Tensor) -> Tensor:
        """u to g, a new tensor; bit for bit the same on all ranks."""

    def observers(self, reduction: int) -> Mapping[str, Observer]:
        """Who wants to see the inputs of layers in the forward passes of this reduction, before it is opened, by
        the name of the layer's weight."""

    @property
    def fidelity(self) -> Mapping[str, Fidelity]:
        """Measured by the owners, known to all ranks, by matrix."""

    def open(self, reduction: int) -> None:
        """Reduction number `reduction` (from 1) begins."""

    def see(self, name: str, gradient: Tensor) -> None:
        """This rank's gradient in the open reduction, float32, unscaled."""

    def statistics(self) -> Tensor | None:
        """What this rank saw, float32 (W, length), of which rank r, an owner, is to `combine` row r; None when
        nothing is due, on all ranks alike."""

    def combine(self, statistics: Tensor) -> None:
        """The rows for this rank of all others, (W-1, length), in rank order."""

    def payload(self) -> Tensor | None:
        """What this rank found out as an owner, float32, of one length on all ranks; None when nothing is due."""

    def install(self, payloads: Tensor, rebase: Rebase) -> None:
        """Change the coordinates to those in the payloads of all ranks, (W, length)."""

    def state_dict(self) -> dict[str, Any]:
        """The installed coordinates, tensors by name, the same on every rank."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them."""

    def memory_bytes(self) -> int:
        """Bytes of statistics and coordinates held on this rank."""


@runtime_checkable
class Geometry(Protocol):
    """How coordinates are chosen: a frozen configuration."""

    def bind(self, shapes: Shapes, place: Place) -> BoundGeometry:
        """State for these matrices. Raises ValueError naming what cannot be done."""

    def refresh_bytes(self, shapes: Shapes, world_size: int) -> int:
        """Bytes that one rank sends for these coordinates per reduction, in the long run."""
