"""Encoded buffers across ranks: the layout of slots, the compressed collectives, the wire, the byte ledger."""

from thinwire.collectives.failures import CollectiveError
from thinwire.collectives.layout import CHUNK, Chunk, Layout, Place, Slot
from thinwire.collectives.ledger import CONTROL, Ledger, LedgerRow, all_reduce_bytes
from thinwire.collectives.wire import Wire

__all__ = [
    "CHUNK",
    "CONTROL",
    "Chunk",
    "CollectiveError",
    "Layout",
    "Ledger",
    "LedgerRow",
    "Place",
    "Slot",
    "Wire",
    "all_reduce_bytes",
]
