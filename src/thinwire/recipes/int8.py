"""int8: gradients travel as symmetric 8-bit integers in groups of 128, without feedback.

On a bell-shaped group 127 levels lose less than FP8's 3 mantissa bits (0.7 % against 2.7 %); a group with an
outlier loses more. Keeps no state.
"""

from thinwire.recipes.recipe import Recipe
from thinwire.reducers import Quantized, Routed

RECIPE = Recipe(
    name="int8",
    reducer=Routed(Quantized("int8")),
    wire="INT8 gradients in groups of 128, two-phase, float32 sums",
    paper="ZeRO++, arXiv 2306.10209",
    not_for="gradients with outliers inside groups",
)
