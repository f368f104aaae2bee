"""fp32, bf16 and fp16 on the wire: rounded to nearest even, as ml_dtypes and numpy round."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from tests.formats.coding import encoded, round_trip, same_bits
from thinwire.formats import Cast, get

DTYPES = {"fp32": np.float32, "bf16": ml_dtypes.bfloat16, "fp16": np.float16}


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("low", [0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_casts_round_as_numpy_and_ml_dtypes_do(name: str, low: int) -> None:
    """65,536 upper halves of float32 patterns, with lower halves at and around the ties of bfloat16."""
    x = ((np.arange(1 << 16, dtype=np.uint32) << 16) | low).view(np.float32)
    with np.errstate(all="ignore"):
        expected = x.astype(DTYPES[name]).astype(np.float32)
    assert same_bits(round_trip(get(name), torch.from_numpy(x)), torch.from_numpy(expected))


def test_fp32_carries_every_bit() -> None:
    bits = torch.randint(-(2**31), 2**31 - 1, (4096,), generator=torch.Generator().manual_seed(0))
    x = bits.to(torch.int32).view(torch.float32)
    assert torch.equal(encoded(get("fp32"), x).view(torch.int32), x.view(torch.int32))


def test_a_cast_to_another_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Cast knows float32, bfloat16 and float16, got torch\.int8"):
        Cast(torch.int8)
