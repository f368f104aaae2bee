"""diloco-int8: with pseudo-gradients in INT8, and error feedback."""

from thinwire.local_update import DiLoCo
from thinwire.recipes.recipe import Recipe
from thinwire.reducers import Quantized

RECIPE = Recipe(
    name="diloco-int8",
    method=DiLoCo(reducer=Quantized("int8", feedback="error")),
    wire="INT8 pseudo-gradients every 500 steps, two-phase, error feedback",
    paper="DiLoCo, arXiv 2311.08105; DoubleSqueeze error feedback, arXiv 1905.05957",
    not_for="runs of fewer than 50 rounds: set local_update.every",
)
