"""powersgd: the gradient of a matrix travels as two factors of four columns, with error feedback.

4 (rows + columns) float32 numbers per matrix in place of rows x columns, one step of power iteration from the last
factors. What the factors leave out is added to the next gradient. Costs 8 bytes per element and rank, and two
all-reduces, one after the other.
"""

from thinwire.recipes.recipe import Recipe
from thinwire.reducers import LowRank, Routed

RECIPE = Recipe(
    name="powersgd",
    reducer=Routed(LowRank(rank=4)),
    wire="two factors of 4 columns per matrix in float32, error feedback",
    paper="PowerSGD, arXiv 1905.13727",
    not_for="gradients of high rank, as large batches of text have: the loss lags behind",
)
