"""gift-int4: 4-bit integers in groups of 128, in GIFT coordinates, with error feedback."""

from thinwire.geometry import GIFT
from thinwire.recipes.recipe import Recipe
from thinwire.reducers import Quantized, Routed

RECIPE = Recipe(
    name="gift-int4",
    reducer=Routed(Quantized("int4", feedback="error", geometry=GIFT())),
    wire="INT4 gradients (groups of 128) in GIFT coordinates, two-phase, float32 sums, error feedback",
    paper="Wang et al., GIFT, arXiv 2607.07494; SDP4Bit, arXiv 2410.15526",
    not_for="gradients with outliers that GIFT does not see; gift-nvfp4 has scales eight times finer",
)
