"""What coordinates are worth: what a round trip through the format leaves of a gradient, with them and without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from thinwire.geometry.coordinates import MatrixCoordinates
from thinwire.geometry.geometry import Fidelity, RoundTrip

DAMPINGS = (1e-3, 1e-2, 1e-1, 1.0)
"""What is tried where no damping is set, one side after the other."""

_WORTHWHILE = 0.95  # of the plain error: above, a matrix stays as it is
_ROWS = 1024  # of a gradient, where each row stands for itself


def measured(
    coordinates: MatrixCoordinates,
    gradient: Tensor,
    round_trip: RoundTrip,
    *,
    dampings: Sequence[float],
    may_reject: bool,
) -> MatrixCoordinates:
    """The coordinates with the damping of each side that loses least of the gradient; with `may_reject` inactive
    unless that is worth it.

    A gradient that says nothing, of zeros or not finite, leaves them as they are.
    """
    one_sided = len(coordinates.sides) == 1
    sample = gradient[:: -(-len(gradient) // _ROWS)] if one_sided else gradient
    if not 0.0 < float(sample.norm()) < float("inf"):
        return coordinates
    plain = _fidelity(sample, round_trip(sample))
    best, least = coordinates, float("inf")
    for side in range(len(coordinates.sides)):
        start = best
        for damping in dampings:
            tried = start.damped(side, damping)
            error, cosine = _loss(sample, tried.inverse(round_trip(tried.forward(sample))))
            if error < least:
                best, least = replace(tried, fidelity=Fidelity(error, plain.error, cosine)), error
    if may_reject and not least < _WORTHWHILE * plain.error:
        return replace(best, active=False, fidelity=plain)
    return replace(best, active=True)


def _fidelity(exact: Tensor, got: Tensor) -> Fidelity:
    """Without a geometry."""
    error, cosine = _loss(exact, got)
    return Fidelity(error, error, cosine)


def _loss(exact: Tensor, got: Tensor) -> tuple[float, float]:
    """Relative error and cosine."""
    norm = float(exact.norm())
    return float((got - exact).norm()) / norm, float((got * exact).sum()) / (norm * max(float(got.norm()), 1e-38))
