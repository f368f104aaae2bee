"""ddp-bf16: gradients travel as bfloat16, sums are exact.

The bytes of torch's bf16_compress_hook, but ranks decode to float32 and add in rank order, so the error is
that of two roundings however many ranks there are; a ring that adds in bfloat16 rounds at every hop.
"""

from thinwire.recipes.recipe import Recipe
from thinwire.reducers import Quantized, Routed

RECIPE = Recipe(
    name="ddp-bf16",
    reducer=Routed(Quantized("bf16")),
    wire="bfloat16 gradients, two-phase, float32 sums",
    paper="torch bf16_compress_hook; two-phase sum of ZeRO++, arXiv 2306.10209",
    not_for="training that needs bit-identity with plain DDP",
)
