"""The random generators of one rank (torch CPU, its CUDA device, Python's) as uint8 tensors."""

from __future__ import annotations

import hashlib
import logging
import random
import struct
from collections.abc import Mapping

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_PYTHON = struct.Struct("<q625Q?d")  # version; the Mersenne twister's words and position; gauss_next


def collect() -> dict[str, Tensor]:
    version, words, gauss = random.getstate()
    packed = _PYTHON.pack(version, *words, gauss is not None, gauss or 0.0)
    tensors = {
        "rng.torch": torch.get_rng_state(),
        "rng.python": torch.frombuffer(bytearray(packed), dtype=torch.uint8),
    }
    if torch.cuda.is_available():
        tensors["rng.cuda"] = torch.cuda.get_rng_state()
    return tensors


def restore(rows: Mapping[str, Tensor]) -> None:
    """Set the generators that `rows` has; says so where this machine has one more or one less."""
    torch.set_rng_state(rows["rng.torch"])
    version, *words, has_gauss, gauss = _PYTHON.unpack(rows["rng.python"].numpy().tobytes())
    random.setstate((version, tuple(words), gauss if has_gauss else None))
    if "rng.cuda" in rows and torch.cuda.is_available():
        torch.cuda.set_rng_state(rows["rng.cuda"])
    elif "rng.cuda" in rows:
        logger.warning("the checkpoint has the state of a CUDA generator, here is no CUDA: dropout will differ")
    elif torch.cuda.is_available():
        logger.warning("the checkpoint has no state of a CUDA generator, here is one: dropout will differ")


def reseed(seed: int, rank: int, step: int) -> None:
    """Other draws on every rank and at every step, and the same ones whenever this is resumed again."""
    digest = hashlib.sha256(f"{seed}/{rank}/{step}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "little"))
    random.seed(int.from_bytes(digest[8:16], "little"))
