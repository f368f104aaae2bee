"""gift-nvfp4: NVFP4 in GIFT coordinates, with error feedback.

4.5 bits per element where they lose least: in coordinates in which the gradient's second moment is flatter, the
error of a block-scaled format is a fraction of what it is in the gradient's own (see the docs for measured ones).
"""

from thinwire.geometry import GIFT
from thinwire.recipes.recipe import Recipe
from thinwire.reducers import Quantized, Routed

RECIPE = Recipe(
    name="gift-nvfp4",
    reducer=Routed(Quantized("nvfp4", feedback="error", geometry=GIFT())),
    wire="NVFP4 gradients in GIFT coordinates, two-phase, float32 sums, error feedback",
    paper="Wang et al., GIFT, arXiv 2607.07494; NVFP4, arXiv 2509.25149",
    not_for="CPU-bound steps: every step turns each gradient there and back",
)
