"""int4-loco: gradients travel as symmetric 4-bit integers in groups of 128, with averaged error feedback."""

from thinwire.recipes.recipe import Recipe
from thinwire.reducers import LoCo, Quantized, Routed

RECIPE = Recipe(
    name="int4-loco",
    reducer=Routed(Quantized("int4", feedback=LoCo())),
    wire="INT4 gradients in groups of 128, two-phase, float32 sums, averaged error feedback in INT8",
    paper="LoCo, arXiv 2407.04480",
    not_for="CPU-bound steps: INT8 memory is decoded and encoded in each",
)
