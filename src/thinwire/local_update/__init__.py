"""Local updates: ranks take steps of their own and average now and then."""

from thinwire.local_update.diloco import DiLoCo, StreamingDiLoCo
from thinwire.local_update.engine import LocalUpdate
from thinwire.local_update.local_update import local_update
from thinwire.local_update.method import Method, Plan

__all__ = ["DiLoCo", "LocalUpdate", "Method", "Plan", "StreamingDiLoCo", "local_update"]
