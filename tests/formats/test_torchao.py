"""NVFP4 and the MX formats against torchao: the same bytes, but for two deliberate differences.

torchao holds NVFP4's block scales at 2^-6, the smallest normal E4M3; ours go on through the subnormals to zero,
so blocks below a 28672th of the span's largest magnitude keep more bits. And a block that is zero, tiny or not
finite has its own scale byte here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.formats import oracle
from tests.formats.coding import decoded, encoded, normal
from thinwire.formats import NVFP4, BlockScaled

INF = torch.tensor(float("inf"))


@pytest.fixture(scope="module")
def torchao() -> Iterator[SimpleNamespace]:
    """Its functions, from beside the environment (see `make install`); importing them takes seconds."""
    sys.path.append(str(Path(sys.prefix, "oracles")))
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

    yield SimpleNamespace(to_mx=to_mx, nvfp4_quantize=nvfp4_quantize, rules=ScaleCalculationMode)
    sys.path.pop()


def outlier(n: int) -> Tensor:
    x = normal(n)
    x[77] = 3e4
    return x


DATA = {
    "random": normal(1 << 18),
    "of bfloat16": (normal(1 << 16) * 4).bfloat16().float(),
    "whole numbers": (normal(1 << 16) * 4).round(),
    "of all sizes": normal(1 << 18) * 10.0 ** torch.linspace(-28, 37, 1 << 13).repeat_interleave(32),
    "constant": torch.full((4096,), 1 / 3),
    "zero": torch.zeros(4096),
    "denormal": normal(4096) * 1e-40,
    "with an outlier": outlier(1 << 16),
    "the largest": normal(4096).sign() * torch.finfo(torch.float32).max,
}
data = pytest.mark.parametrize("x", DATA.values(), ids=DATA.keys())


def nvfp4_parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The span scale, the bytes of block scales, and packed codes (blocks, 8)."""
    buffer, blocks = encoded(NVFP4(), x), x.numel() // 16
    codes, scales = buffer[: 8 * blocks], buffer[8 * blocks :]
    return scales[:4].view(torch.float32), scales[4 : 4 + blocks], codes.view(-1, 8)


@data
def test_nvfp4_is_torchaos_down_to_its_smallest_block_scale(x: Tensor, torchao: SimpleNamespace) -> None:
    span_scale, scales, codes = nvfp4_parts(x)
    their_scales, their_codes = torchao.nvfp4_quantize(x.view(1, -1), per_tensor_scale=span_scale.clone())
    amax = x.view(-1, 16).abs().amax(1)
    tiny_span = bool(amax.max() < 1e-30)
    shared = (amax >= amax.max() / 28672) & (not tiny_span)
    assert bool(shared.any()) != tiny_span
    assert torch.equal(scales[shared], their_scales.view(torch.uint8).view(-1)[shared])
    assert torch.equal(codes[shared], their_codes.view(-1, 8)[shared])
    if tiny_span:
        assert not bool(scales.any())


def test_below_it_nvfp4_blocks_keep_more_bits_than_torchaos(torchao: SimpleNamespace) -> None:
    x = normal(1 << 12)
    x[0] = 2e5  # amax / 28672 is 7
    span_scale, scales, _ = nvfp4_parts(x)
    their_scales, their_codes = torchao.nvfp4_quantize(x.view(1, -1), per_tensor_scale=span_scale.clone())
    their_scales = their_scales.view(torch.uint8).view(-1)
    small = slice(1, None)
    assert bool((their_scales[small] == 0x08).all())  # 2^-6
    assert bool((scales[small] < 0x08).all())
    theirs = torch.cat([their_codes.view(-1), span_scale.view(torch.uint8), their_scales])
    spans = (x.numel(),)
    padded = torch.zeros(NVFP4().nbytes(spans), dtype=torch.uint8)
    padded[: theirs.numel()] = theirs
    our_error, their_error = (
        (decoded(NVFP4(), buffer, spans) - x)[16:].norm() for buffer in (encoded(NVFP4(), x), padded)
    )
    assert our_error < 0.7 * their_error


@pytest.mark.parametrize("rule", ["rceil", "floor", "ceil", "even"])
@pytest.mark.parametrize("element", ["e4m3", "e5m2", "e2m1"])
@data
def test_mx_formats_are_torchaos(x: Tensor, element: str, rule: str, torchao: SimpleNamespace) -> None:
    assert_mx_equal(x, element, rule, torchao)


@pytest.mark.parametrize("rule", ["rceil", "floor", "ceil", "even"])
@pytest.mark.parametrize("element", ["e4m3", "e5m2", "e2m1"])
def test_mx_formats_are_torchaos_at_the_edges_of_binades(
    element: str, rule: str, torchao: SimpleNamespace
) -> None:
    """But one ulp above max x 2^k: there torchao's rceil takes a log2 that float32 rounds to k; ours is exact."""
    edges = oracle.MAX[element] * 2.0 ** torch.arange(-60.0, 60.0)
    powers = 2.0 ** torch.arange(-90.0, 90.0)
    amax = torch.cat([edges, edges.nextafter(0 * edges), powers, powers.nextafter(0 * powers)])
    if rule != "rceil":
        amax = torch.cat([amax, edges.nextafter(INF), powers.nextafter(INF)])
    assert_mx_equal((amax[:, None] * torch.linspace(-1, 1, 32)).flatten(), element, rule, torchao)


def assert_mx_equal(x: Tensor, element: str, rule: str, torchao: SimpleNamespace) -> None:
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e2m1": torch.float4_e2m1fn_x2}[element]
    their_scales, their_codes = torchao.to_mx(x.view(1, -1), dtype, 32, torchao.rules[rule.upper()])
    format = BlockScaled(element, block=32, scale=rule)  # type: ignore[arg-type]
    blocks = x.numel() // 32
    buffer, tiny = encoded(format, x), x.view(-1, 32).abs().amax(1) < 1e-30
    scales, codes = buffer[:blocks], buffer[blocks : blocks + their_codes.numel()].view(blocks, -1)
    assert torch.equal(scales[~tiny], their_scales.view(torch.uint8).view(-1)[~tiny])
    assert torch.equal(codes[~tiny], their_codes.view(torch.uint8).view(blocks, -1)[~tiny])
    assert bool((scales[tiny] == 127).all())
    assert not bool((codes[tiny] & ~(0x80 if element != "e2m1" else 0x88)).any())  # zeros of either sign
