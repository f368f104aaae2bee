"""Reducers: the mean of tensors over a group, as few bytes as you can, remembering what was left out."""

from thinwire.reducers.after import After
from thinwire.reducers.dense import Dense
from thinwire.reducers.feedback import LoCo
from thinwire.reducers.local import Local
from thinwire.reducers.low_rank import LowRank
from thinwire.reducers.quantized import Quantized
from thinwire.reducers.reducer import BoundReducer, Reducer
from thinwire.reducers.routed import Routed

__all__ = ["After", "BoundReducer", "Dense", "LoCo", "Local", "LowRank", "Quantized", "Reducer", "Routed"]
