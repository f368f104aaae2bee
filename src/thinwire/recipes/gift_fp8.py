"""gift-fp8: FP8 E4M3 in GIFT coordinates, with error feedback.

Each matrix's gradient is whitened by the square roots of two second moments, of its layer's inputs and of its
own columns (rank 32 plus diagonal each, refreshed every 50 reductions by the matrix's owner), encoded there, and
turned back after the mean. The paper whitens by the first alone, sends E5M2 and sums codes of different scales;
see the docs for what differs.
"""

from thinwire.geometry import GIFT
from thinwire.recipes.recipe import Recipe
from thinwire.reducers import Quantized, Routed

RECIPE = Recipe(
    name="gift-fp8",
    reducer=Routed(Quantized("fp8_e4m3", feedback="error", geometry=GIFT())),
    wire="FP8 E4M3 gradients in GIFT coordinates, two-phase, float32 sums, error feedback",
    paper="Wang et al., GIFT, arXiv 2607.07494",
    not_for="CPU-bound steps: every step turns each gradient there and back",
)
