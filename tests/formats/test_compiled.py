"""Compiled kernels give the bits of eager ones.

Slow on a machine that has never compiled them (half a minute of C++ compiler; cached on disk afterwards).
"""

from __future__ import annotations

import pytest
import torch

from tests.formats.coding import CASTS, FORMATS, NARROW, normal, same_bits
from thinwire.formats import NVFP4, BlockScaled, Format
from thinwire.formats.kernels import can_compile

CHUNK = 1 << 16
LONG = 1 << 19
"""Of this length even a tensor of one number per block of 16 runs compiled."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_compile(torch.device("cpu")), reason="torch.compile needs a C++ compiler"),
]


def awkward(n: int) -> torch.Tensor:
    """Blocks of all magnitudes, and a zero, a tiny, a NaN, an inf and a huge one."""
    x = normal(n, seed=n) * 10.0 ** torch.linspace(-28, 30, n // 128).repeat_interleave(128)
    blocks = x.view(-1, 128)
    blocks[3] = 0.0
    blocks[4] = 1e-35
    blocks[5, 7] = float("nan")
    blocks[6, 127] = float("-inf")
    blocks[7, 0] = 3.3e38
    return x


ONE_OF_EACH_KERNEL = ("fp8_e4m3", "mxfp8_e5m2_floor", "fp8_e4m3_span", "mxfp4", "int4", "int4_span")


@pytest.mark.parametrize(
    "name", [name if name in ONE_OF_EACH_KERNEL else pytest.param(name, marks=pytest.mark.full) for name in NARROW]
)
def test_compiled_kernels_give_the_bits_of_eager_ones(name: str) -> None:
    """The full chunk runs the specialised kernel, another length the dynamic one."""
    for n in (CHUNK, CHUNK // 2 + 384):
        assert_same_bits(FORMATS[name], CHUNK, (128 * 8, n - 128 * 8 - 256, 256))


def test_compiled_nvfp4_gives_the_bits_of_eager_one() -> None:
    """Of many spans and of one, which broadcasts the span's scale."""
    assert_same_bits(NVFP4(), LONG, (1024, LONG // 2, LONG // 4, LONG // 4 - 1024))
    assert_same_bits(NVFP4(), LONG, (LONG,))
    assert_same_bits(NVFP4(), LONG, (LONG // 2, 4096))


@pytest.mark.parametrize(
    "format",
    [
        NVFP4(rounding="stochastic"),
        *(
            pytest.param(BlockScaled(element, rounding="stochastic", scale=scale), marks=pytest.mark.full)
            for element, scale in [
                ("e4m3", "exact"),
                ("e5m2", "floor"),
                ("e2m1", "rceil"),
                ("e3m0", "exact"),
                ("int8", "exact"),
            ]
        ),
        pytest.param(BlockScaled("int4", per_span=True, rounding="stochastic"), marks=pytest.mark.full),
    ],
    ids=lambda format: format.name,
)
def test_compiled_kernels_draw_the_numbers_of_eager_ones(format: Format) -> None:
    """The hash multiplies 32-bit integers, which wrap around in both."""
    assert_same_bits(format, CHUNK, (128 * 8, CHUNK - 128 * 8 - 256, 256))


def assert_same_bits(eager: Format, chunk: int, spans: tuple[int, ...]) -> None:
    compiled, n = eager.compiled(chunk), sum(spans)
    key = torch.arange(len(spans), dtype=torch.int32) * 1_234_567_891
    x = awkward(n)
    one, other = (torch.zeros(eager.nbytes(spans), dtype=torch.uint8) for _ in range(2))
    eager.encode(x, one, spans=spans, key=key)
    compiled.encode(x, other, spans=spans, key=key)
    assert torch.equal(one, other)

    one_out, other_out = torch.empty(n), torch.empty(n)
    eager.decode(one, one_out, spans=spans)
    compiled.decode(one, other_out, spans=spans)
    assert same_bits(one_out, other_out)

    one_sum, other_sum = normal(n, seed=1), normal(n, seed=1)
    eager.decode_add(one, one_sum, spans=spans)
    compiled.decode_add(one, other_sum, spans=spans)
    assert same_bits(one_sum, other_sum)


@pytest.mark.parametrize("name", [*CASTS, *NARROW])
def test_a_compiled_format_is_the_same_format(name: str) -> None:
    format = FORMATS[name]
    assert format.compiled(CHUNK) == format
    assert format.compiled(CHUNK).name == name
    assert format.compiled(CHUNK).nbytes((128, 384)) == format.nbytes((128, 384))
