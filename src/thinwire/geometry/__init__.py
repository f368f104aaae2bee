"""Geometries: invertible linear changes of the coordinates of matrix gradients. No communication of their own."""

from thinwire.geometry.geometry import BoundGeometry, Fidelity, Geometry, Observer, Place, Shapes
from thinwire.geometry.gift import GIFT
from thinwire.geometry.hadamard import Hadamard

__all__ = ["GIFT", "BoundGeometry", "Fidelity", "Geometry", "Hadamard", "Observer", "Place", "Shapes"]
