"""A format made ready to run: compiled, where that pays, before the first step."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from thinwire.collectives import CHUNK, Slot, Wire
from thinwire.formats import Format, Spans
from thinwire.formats.kernels import Compiled, can_compile
from thinwire.reducers.round_trip import any_key

logger = logging.getLogger(__name__)

COMPILE_FROM = 1 << 23
"""Elements from which `compile=None` compiles the kernels: below, eager encoding is no bottleneck."""


def executable(format: Format, slots: Sequence[Slot], wire: Wire, compile: bool | None) -> Format:
    """The format with its kernels compiled now, where `compile` or the size of the slots asks for it.

    Raises ValueError where compiling was asked for and there is no compiler; says so and goes on without where
    it was not.
    """
    wanted = compile
    if wanted is None:
        wanted = sum(slot.numel for slot in slots) >= COMPILE_FROM
    if wanted and not can_compile(wire.device):
        if compile:
            raise ValueError("Quantized(compile=True) needs a C++ compiler: install g++ or leave compile unset")
        logger.warning("no C++ compiler found: %s runs uncompiled, several times slower", format.name)
        wanted = False
    if not wanted:
        return format
    if wire.rank == 0:
        logger.warning(
            "compiling the %s kernels: 20 to 30 s the first time, cached on disk afterwards", format.name
        )
    block = format.block
    whole = max(CHUNK // block, 1) * block
    tail = CHUNK // 2 // block * block + block  # of any length
    compiled = format.compiled(whole)
    for spans in ((whole,), (whole - block, block), (tail,)):
        _compile_now(compiled, tuple(filter(None, spans)), wire.device)
    return compiled


def for_another_thread(format: Format) -> Format:
    """The same format, compiled alike, with memory of its own: a compiled one serves one thread at a time."""
    run = getattr(format, "run", None)
    return format.compiled(run.chunk) if isinstance(run, Compiled) else format


def _compile_now(format: Format, spans: Spans, device: torch.device) -> None:
    """Encode and decode zeros, so that nothing is compiled in the middle of a step, while peers wait."""
    values = torch.zeros(sum(spans), device=device)
    encoded = torch.empty(format.nbytes(spans), dtype=torch.uint8, device=device)
    format.encode(values, encoded, spans=spans, key=any_key(format, spans, device))
    format.decode(encoded, values, spans=spans)
    format.decode_add(encoded, values, spans=spans)
