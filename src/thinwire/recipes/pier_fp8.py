"""pier-fp8: with pseudo-gradients in FP8, and error feedback."""

from thinwire.local_update import Pier
from thinwire.recipes.recipe import Recipe
from thinwire.reducers import Quantized

RECIPE = Recipe(
    name="pier-fp8",
    method=Pier(reducer=Quantized("fp8_e4m3", feedback="error")),
    wire="float32 gradients for a tenth of the run, then FP8 pseudo-gradients every 50 steps",
    paper="Pier, arXiv 2511.17849; FP8-LM, arXiv 2310.18313",
    not_for="runs of fewer than 50 rounds: set local_update.every",
)
