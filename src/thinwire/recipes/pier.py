"""pier: data parallelism at first, then groups of ranks that meet every 50 steps."""

from thinwire.local_update import Pier
from thinwire.recipes.recipe import Recipe

RECIPE = Recipe(
    name="pier",
    method=Pier(),
    wire="float32 gradients for a tenth of the run, then float32 pseudo-gradients every 50 steps",
    paper="Pier, arXiv 2511.17849",
    not_for="runs of fewer than 50 rounds: set local_update.every",
)
