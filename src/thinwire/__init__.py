"""Communication-efficient distributed training for PyTorch."""

from thinwire import optim, recipes
from thinwire.collectives import CollectiveError
from thinwire.data_parallel import Link, attach
from thinwire.geometry import GIFT, Hadamard
from thinwire.local_update import (
    DiLoCo,
    LocalSGD,
    MuLoCo,
    Pier,
    PostLocalSGD,
    SlowMo,
    StreamingDiLoCo,
    local_update,
)
from thinwire.reducers import After, Dense, Local, LoCo, LowRank, Quantized, Routed

__all__ = [
    "GIFT",
    "After",
    "CollectiveError",
    "Dense",
    "DiLoCo",
    "Hadamard",
    "Link",
    "LoCo",
    "Local",
    "LocalSGD",
    "LowRank",
    "MuLoCo",
    "Pier",
    "PostLocalSGD",
    "Quantized",
    "Routed",
    "SlowMo",
    "StreamingDiLoCo",
    "attach",
    "local_update",
    "optim",
    "recipes",
]
