"""slowmo: the mean of the weights every 12 steps, with a slow momentum."""

from thinwire.local_update import SlowMo
from thinwire.recipes.recipe import Recipe

RECIPE = Recipe(
    name="slowmo",
    method=SlowMo(),
    wire="float32 weights every 12 steps",
    paper="SlowMo, arXiv 1910.00643",
    not_for="runs of fewer than 50 rounds",
)
