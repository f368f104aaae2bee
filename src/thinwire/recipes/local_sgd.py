"""local-sgd: the mean of the weights every 8 steps."""

from thinwire.local_update import LocalSGD
from thinwire.recipes.recipe import Recipe

RECIPE = Recipe(
    name="local-sgd",
    method=LocalSGD(),
    wire="float32 weights every 8 steps",
    paper="Local SGD, arXiv 1805.09767",
    not_for="many ranks or long rounds: the loss suffers, diloco's does less",
)
