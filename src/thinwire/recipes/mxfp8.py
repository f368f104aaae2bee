"""mxfp8: gradients travel as MXFP8 (E4M3 in blocks of 32 under powers of two), without feedback.

The scales are single bytes and decoding only moves exponents. Keeps no state.
"""

from thinwire.recipes.recipe import Recipe
from thinwire.reducers import Quantized, Routed

RECIPE = Recipe(
    name="mxfp8",
    reducer=Routed(Quantized("mxfp8")),
    wire="MXFP8 E4M3 gradients in blocks of 32, two-phase, float32 sums",
    paper="OCP Microscaling formats 1.0; two-phase sum of ZeRO++, arXiv 2306.10209",
    not_for="memory-tight jobs on fast links",
)
