"""The byte ledger: what left this rank, counted where it leaves.

Rows are keyed by op, phase and scope. `payload_bytes` is what the caller handed to be moved to other ranks;
`sent_bytes` is what this rank puts on the wire for it, by the algorithm of the backend (gloo and NCCL: ring
all-reduce 2 (W-1)/W n, ring all-gather (W-1) n, direct all-to-all n to each peer), protocol framing apart.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

CONTROL = "control"
"""Phase of traffic that is not training data: agreement on flags, hashes, token counts."""


@dataclass(frozen=True)
class LedgerRow:
    """Totals of one kind of collective on this rank since the ledger began."""

    op: str
    """"all_to_all", "all_gather" or "all_reduce"."""
    phase: str
    """"scatter" (contributions on their way to owners), "gather" (means on their way back), "dense" or
    "control"."""
    scope: str
    """The ranks: "world" is all that average together, "group" the groups among them, "between groups" one rank of
    each."""
    calls: int = 0
    payload_bytes: int = 0
    sent_bytes: int = 0


class Ledger:
    """Running totals of a link's traffic."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str, str], LedgerRow] = {}
        self._lock = threading.Lock()  # workers of several wires may share a ledger

    def record(self, op: str, *, phase: str, scope: str, payload_bytes: int, sent_bytes: int) -> None:
        """Add one collective."""
        key = (op, phase, scope)
        with self._lock:
            row = self._rows.get(key) or LedgerRow(*key)
            self._rows[key] = replace(
                row,
                calls=row.calls + 1,
                payload_bytes=row.payload_bytes + payload_bytes,
                sent_bytes=row.sent_bytes + sent_bytes,
            )

    def rows(self) -> list[LedgerRow]:
        """One row per op, phase and scope, in the order of their first use."""
        with self._lock:
            return list(self._rows.values())

    def sent_bytes(self, *, control: bool = False, scope: str | None = None) -> int:
        """Bytes this rank sent since the ledger began: training data (payload and scales), or with
        `control=True` the control traffic instead; of one scope or (None) of all. Take the difference of two calls
        for what lies between."""
        return sum(row.sent_bytes for row in self._select(control) if scope in (None, row.scope))

    def summary(self) -> dict[str, Any]:
        """Plain data, fit for JSON: `sent_bytes` and `control_sent_bytes`, as `sent_bytes()` counts them, and
        `rows`: a dict per LedgerRow, its fields (op, phase, scope, calls, payload_bytes, sent_bytes) as keys."""
        return {
            "sent_bytes": self.sent_bytes(),
            "control_sent_bytes": self.sent_bytes(control=True),
            "rows": [asdict(row) for row in self.rows()],
        }

    def _select(self, control: bool) -> Iterator[LedgerRow]:
        return (row for row in self.rows() if (row.phase == CONTROL) == control)


def all_reduce_bytes(nbytes: int, world_size: int) -> int:
    """Bytes one rank sends in a ring all-reduce of `nbytes`."""
    return 2 * (world_size - 1) * nbytes // world_size
