"""The byte ledger: what left this rank, counted where it leaves.

Rows are keyed by op, phase and scope. `payload_bytes` is what the caller handed to be moved to other ranks;
`sent_bytes` is what this rank puts on the wire for it, by the algorithm of the backend (gloo and NCCL: ring
all-reduce 2 (W-1)/W n, ring all-gather (W-1) n, direct all-to-all n to each peer), protocol framing apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

CONTROL = "control"
"""Phase of traffic that is not training data: agreement on flags, hashes, token counts."""


@dataclass(frozen=True)
class LedgerRow:
    """Totals of one kind of collective since the ledger began."""

    op: str
    phase: str
    scope: str
    calls: int = 0
    payload_bytes: int = 0
    sent_bytes: int = 0


class Ledger:
    """Running totals of a link's traffic."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str, str], LedgerRow] = {}

    def record(self, op: str, *, phase: str, scope: str, payload_bytes: int, sent_bytes: int) -> None:
        """Add one collective."""
        key = (op, phase, scope)
        row = self._rows.get(key) or LedgerRow(*key)
        self._rows[key] = replace(
            row,
            calls=row.calls + 1,
            payload_bytes=row.payload_bytes + payload_bytes,
            sent_bytes=row.sent_bytes + sent_bytes,
        )

    def rows(self) -> list[LedgerRow]:
        """One row per op, phase and scope."""
        return list(self._rows.values())

    def sent_bytes(self, *, control: bool = False) -> int:
        """Bytes this rank sent: training data, or with `control=True` the control traffic instead."""
        return sum(row.sent_bytes for row in self._select(control))

    def summary(self) -> dict[str, Any]:
        """Totals and rows as plain data."""
        return {
            "sent_bytes": self.sent_bytes(),
            "control_sent_bytes": self.sent_bytes(control=True),
            "rows": [row.__dict__ for row in self.rows()],
        }

    def _select(self, control: bool) -> Iterator[LedgerRow]:
        return (row for row in self.rows() if (row.phase == CONTROL) == control)


def all_reduce_bytes(nbytes: int, world_size: int) -> int:
    """Bytes one rank sends in a ring all-reduce of `nbytes`."""
    return 2 * (world_size - 1) * nbytes // world_size
