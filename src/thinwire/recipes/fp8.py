"""fp8: gradients travel as FP8 E5M2 in blocks of 128, without feedback.

E5M2 has the range of fp16 and 2 mantissa bits, a relative error of about 5 % per element and encoding,
which is unbiased noise beside that of a mini-batch. Scales are powers of two, a byte each: exact ones would cost
another 2 % of the bytes for an error that is 3 % smaller. Keeps no state: nothing to save, 4 bytes per element
of work memory. Vectors and small matrices stay float32.
"""

from thinwire.recipes.recipe import Recipe
from thinwire.reducers import Quantized, Routed

RECIPE = Recipe(
    name="fp8",
    reducer=Routed(Quantized("fp8_e5m2_pow2")),
    wire="FP8 E5M2 gradients in blocks of 128 under powers of two, two-phase, float32 sums",
    paper="FP8-LM, arXiv 2310.18313; two-phase sum of ZeRO++, arXiv 2306.10209",
    not_for="memory-tight jobs on fast links",
)
