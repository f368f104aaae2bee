"""A recipe: a method by name, one choice for each question the design asks."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.reducers import Reducer


@dataclass(frozen=True)
class Recipe:
    """A named method with its paper's defaults."""

    name: str

    reducer: Reducer
    """How gradients are averaged, every step."""

    wire: str
    """What goes over the wire, in a phrase."""

    paper: str
    """Where it comes from."""

    not_for: str
    """When not to use it."""
