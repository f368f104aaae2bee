"""Optimizers whose update is itself communication-aware."""

from thinwire.optim.groups import ParamGroups, param_groups

__all__ = ["ParamGroups", "param_groups"]
