"""Local updates: ranks take steps of their own and average now and then."""

from thinwire.local_update.diloco import DiLoCo, StreamingDiLoCo
from thinwire.local_update.engine import LocalUpdate
from thinwire.local_update.local_sgd import LocalSGD, PostLocalSGD
from thinwire.local_update.local_update import local_update
from thinwire.local_update.method import Method, Moment, Plan
from thinwire.local_update.muloco import MuLoCo
from thinwire.local_update.pier import Pier
from thinwire.local_update.slowmo import SlowMo

__all__ = [
    "DiLoCo",
    "LocalSGD",
    "LocalUpdate",
    "Method",
    "Moment",
    "MuLoCo",
    "Pier",
    "Plan",
    "PostLocalSGD",
    "SlowMo",
    "StreamingDiLoCo",
    "local_update",
]
