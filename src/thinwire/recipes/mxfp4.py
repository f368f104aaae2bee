"""mxfp4: gradients travel as MXFP4 (E2M1 in blocks of 32 under powers of two), with error feedback.

4.25 bits per element, the fewest of the 4-bit formats, and the coarsest scales.
"""

from thinwire.recipes.recipe import Recipe
from thinwire.reducers import Quantized, Routed

RECIPE = Recipe(
    name="mxfp4",
    reducer=Routed(Quantized("mxfp4", feedback="error")),
    wire="MXFP4 gradients in blocks of 32, two-phase, float32 sums, error feedback",
    paper="OCP Microscaling formats 1.0; DoubleSqueeze error feedback, arXiv 1905.05957",
    not_for="jobs that cannot spare 8 bytes per parameter",
)
