"""muloco: DiLoCo around Muon, with pseudo-gradients in INT4."""

from thinwire.local_update import MuLoCo
from thinwire.recipes.recipe import Recipe

RECIPE = Recipe(
    name="muloco",
    method=MuLoCo(),
    optimizer="muon",
    wire="INT4 pseudo-gradients every 30 steps, two-phase, error feedback",
    paper="MuLoCo, arXiv 2505.23725",
    not_for="models without hidden matrices",
)
