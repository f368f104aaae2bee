"""post-local-sgd: data parallelism for half of the run, then the mean of the weights every 8 steps."""

from thinwire.local_update import PostLocalSGD
from thinwire.recipes.recipe import Recipe

RECIPE = Recipe(
    name="post-local-sgd",
    method=PostLocalSGD(),
    wire="float32 gradients for half of the run, then float32 weights every 8 steps",
    paper="Post-local SGD, arXiv 1808.07217",
    not_for="wires on which the first half is too slow",
)
