"""diloco: 500 steps of each rank's own between averages."""

from thinwire.local_update import DiLoCo
from thinwire.recipes.recipe import Recipe

RECIPE = Recipe(
    name="diloco",
    method=DiLoCo(),
    wire="float32 pseudo-gradients every 500 steps",
    paper="DiLoCo, arXiv 2311.08105",
    not_for="runs of fewer than 50 rounds: set local_update.every",
)
