"""int4-hadamard: as int4, after a random Hadamard transform of blocks of 128 along each row.

The transform spreads an outlier over its block, so that it no longer sets the scale for everybody else.
"""

from thinwire.geometry import Hadamard
from thinwire.recipes.recipe import Recipe
from thinwire.reducers import Quantized, Routed

RECIPE = Recipe(
    name="int4-hadamard",
    reducer=Routed(Quantized("int4", feedback="error", geometry=Hadamard())),
    wire="INT4 gradients (groups of 128) in Hadamard coordinates, two-phase, float32 sums, error feedback",
    paper="SDP4Bit, arXiv 2410.15526; random Hadamard transform of QuIP#, arXiv 2402.04396",
    not_for="gradients without outliers, which gain nothing",
)
