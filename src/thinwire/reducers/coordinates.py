"""Slots whose matrices travel in the coordinates of a geometry.

A reducer encodes, sends and keeps what it owes in wire coordinates. This is the way in and the way out: gradients
to u before they enter the work matrix, means of u back to gradients, and what a narrow dtype rounds away there
to u again, where it is owed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from thinwire.collectives import Slot
from thinwire.geometry import BoundGeometry, Shapes


def matrix_shapes(slots: Sequence[Slot]) -> Shapes:
    """(shape[0], rest) of the slots that are matrices."""
    return {
        slot.name: (slot.shape[0], slot.numel // slot.shape[0])
        for slot in slots
        if len(slot.shape) >= 2 and slot.numel
    }


def wire_slots(slots: Sequence[Slot]) -> list[Slot]:
    """The slots as the layout sees them: rows of matrices stay together, and travel as float32 numbers."""
    shapes = matrix_shapes(slots)
    return [
        replace(slot, unit=shapes[slot.name][1], dtype=torch.float32) if slot.name in shapes else slot
        for slot in slots
    ]


def load_coordinates(coordinates: Coordinates | None, state: Mapping[str, Any]) -> None:
    """Restore the coordinates in a reducer's state. Raises ValueError for those of another geometry, in which
    residuals mean something else."""
    own = None if coordinates is None else coordinates.geometry.description
    if state.get("geometry") != own:
        raise ValueError(
            f"the reducer state is in coordinates of geometry {state.get('geometry')}, this reducer's is {own}"
        )
    if coordinates is not None:
        coordinates.geometry.load_state_dict(state)


class Coordinates:
    """The coordinates of a bound reducer's slots."""

    def __init__(self, geometry: BoundGeometry, slots: Sequence[Slot]) -> None:
        self.geometry = geometry
        self._columns = {name: columns for name, (_, columns) in matrix_shapes(slots).items()}
        self._narrow = {slot.name for slot in slots if slot.dtype != torch.float32 and slot.name in self._columns}

    def state_dict(self) -> dict[str, Any]:
        """Which coordinates these are."""
        return {"geometry": self.geometry.description, **self.geometry.state_dict()}

    def enter(self, named: Mapping[str, Tensor], loss_scale: float) -> dict[str, Tensor]:
        """The tensors as they travel: fresh and float32 where they change."""
        return {name: self._enter(name, tensor, loss_scale) for name, tensor in named.items()}

    def changes(self, name: str) -> bool:
        """Whether a slot travels as something else than its own numbers."""
        return self._active(name) or name in self._narrow

    def leave(self, name: str, u: Tensor, out: Tensor) -> Tensor | None:
        """Write the gradient of u, float32 rows, into `out`; returns what a narrow dtype of `out` rounds away, in
        wire coordinates."""
        rows = u.view(-1, self._columns[name])
        active = self._active(name)
        gradient = self.geometry.inverse(name, rows) if active else rows
        out.copy_(gradient.view(out.shape))
        if name not in self._narrow:
            return None
        lost = gradient - out.reshape(rows.shape).float()
        return self.geometry.forward(name, lost) if active else lost

    def forward(self, name: str, tensor: Tensor) -> Tensor:
        """A float32 tensor of a slot's shape in wire coordinates."""
        return self.rebase(name, tensor, partial(self.geometry.forward, name)) if self._active(name) else tensor

    def inverse(self, name: str, tensor: Tensor) -> Tensor:
        """The way back."""
        return self.rebase(name, tensor, partial(self.geometry.inverse, name)) if self._active(name) else tensor

    def rebase(self, name: str, residual: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        """A residual of the slot's shape in new coordinates."""
        return change(residual.view(-1, self._columns[name])).reshape(residual.shape)

    def _active(self, name: str) -> bool:
        return name in self.geometry.names

    def _enter(self, name: str, tensor: Tensor, loss_scale: float) -> Tensor:
        if name not in self._columns:
            return tensor
        matrix = tensor.detach().reshape(-1, self._columns[name]).float()
        self.geometry.see(name, matrix if loss_scale == 1.0 else matrix / loss_scale)
        if self._active(name):
            matrix = self.geometry.forward(name, matrix)
        return matrix.view(tensor.shape) if self.changes(name) else tensor
