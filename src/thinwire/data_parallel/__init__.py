"""Attach a reducer to a data-parallel model."""

from thinwire.data_parallel.attach import attach
from thinwire.data_parallel.link import Link

__all__ = ["Link", "attach"]
