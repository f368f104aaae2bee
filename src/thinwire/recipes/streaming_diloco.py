"""streaming-diloco: a fragment of the layers at a time, sent while training goes on."""

from thinwire.local_update import StreamingDiLoCo
from thinwire.recipes.recipe import Recipe

RECIPE = Recipe(
    name="streaming-diloco",
    method=StreamingDiLoCo(),
    wire="E3M0 pseudo-gradients of a fragment every 25 steps, overlapped with the next",
    paper="Streaming DiLoCo, arXiv 2501.18512",
    not_for="runs of fewer than 50 rounds: set local_update.every",
)
