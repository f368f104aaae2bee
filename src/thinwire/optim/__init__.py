"""Optimizers whose update is itself communication-aware."""

from thinwire.optim.dion import Dion
from thinwire.optim.groups import ParamGroups, param_groups
from thinwire.optim.muon import Muon
from thinwire.optim.normuon import NorMuon
from thinwire.optim.polar import orthonormalize
from thinwire.optim.rest import AdamW, Lion

__all__ = ["AdamW", "Dion", "Lion", "Muon", "NorMuon", "ParamGroups", "orthonormalize", "param_groups"]
