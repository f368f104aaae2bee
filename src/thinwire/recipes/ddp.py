"""ddp: plain data parallelism.

Every step the mean of all gradients in float32, by the backend's own ring all-reduce. Bit-identical to
torch's DistributedDataParallel; the baseline of every comparison.
"""

from thinwire.recipes.recipe import Recipe
from thinwire.reducers import Dense

RECIPE = Recipe(
    name="ddp",
    reducer=Dense(),
    wire="float32 gradients, ring all-reduce",
    paper="Li et al., PyTorch Distributed, arXiv 2006.15704",
    not_for="links on which gradients take longer than the step computes",
)
