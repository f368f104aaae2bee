"""powersgd-fp8: PowerSGD's factors in FP8.

A quarter of the bytes of `powersgd`: what E4M3 rounds away of the factors is in the error feedback too, as that is
measured against the product that all ranks apply.
"""

from thinwire.recipes.recipe import Recipe
from thinwire.reducers import LowRank, Quantized, Routed

RECIPE = Recipe(
    name="powersgd-fp8",
    reducer=Routed(LowRank(rank=4, factors=Quantized("fp8_e4m3"))),
    wire="two factors of 4 columns per matrix in FP8, error feedback",
    paper="PowerSGD, arXiv 1905.13727; FP8 factors: thinwire",
    not_for="gradients of high rank, as large batches of text have: the loss lags behind",
)
