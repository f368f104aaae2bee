"""fp8-ef: gradients travel as FP8 E4M3 in blocks of 128, with error feedback in both stages.

What an encoding leaves out is added to the next one, at the sender and at the owner of the mean, so over
time nothing is lost. E4M3 has one mantissa bit more than E5M2; a block's scale gives it the range it needs.
Costs 8 bytes per element and rank.
"""

from thinwire.recipes.recipe import Recipe
from thinwire.reducers import Quantized, Routed

RECIPE = Recipe(
    name="fp8-ef",
    reducer=Routed(Quantized("fp8_e4m3", feedback="error")),
    wire="FP8 E4M3 gradients in blocks of 128, two-phase, float32 sums, error feedback",
    paper="FP8-LM, arXiv 2310.18313; DoubleSqueeze error feedback, arXiv 1905.05957",
    not_for="jobs that cannot spare 8 bytes per parameter",
)
