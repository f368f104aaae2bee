"""int4: gradients travel as symmetric 4-bit integers in groups of 128, with error feedback."""

from thinwire.recipes.recipe import Recipe
from thinwire.reducers import Quantized, Routed

RECIPE = Recipe(
    name="int4",
    reducer=Routed(Quantized("int4", feedback="error")),
    wire="INT4 gradients in groups of 128, two-phase, float32 sums, error feedback",
    paper="ZeRO++, arXiv 2306.10209; SDP4Bit, arXiv 2410.15526",
    not_for="gradients with outliers inside groups: int4-hadamard spreads them",
)
