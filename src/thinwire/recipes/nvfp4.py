"""nvfp4: gradients travel as NVFP4 with error feedback in both stages.

4.5 bits per element: E2M1 numbers under an E4M3 scale per block of 16. A single encoding is off by 9.5 % of a
gradient, which error feedback makes up for over the following steps. Costs 8 bytes per element and rank. The
default recipe.
"""

from thinwire.recipes.recipe import Recipe
from thinwire.reducers import Quantized, Routed

RECIPE = Recipe(
    name="nvfp4",
    reducer=Routed(Quantized("nvfp4", feedback="error")),
    wire="NVFP4 gradients, two-phase, float32 sums, error feedback",
    paper="NVIDIA, NVFP4 pretraining, arXiv 2509.25149; DoubleSqueeze error feedback, arXiv 1905.05957",
    not_for="jobs that cannot spare 8 bytes per parameter",
)
