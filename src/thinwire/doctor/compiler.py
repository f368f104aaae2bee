"""Does torch.compile work here? A tiny kernel is compiled, with an empty cache, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

from thinwire.formats.kernels import cpp_compiler

TIMEOUT_SECONDS = 240

# Compiled and eager must give the same bits.
SCRIPT = """
import sys, torch

def kernel(x, out):
    out.copy_((x * 0.5 + 1.0).abs())

x = torch.linspace(-3, 3, 4096, device=sys.argv[1])
eager, compiled = torch.empty_like(x), torch.empty_like(x)
kernel(x, eager)
torch.compile(kernel, fullgraph=True)(x, compiled)
assert torch.equal(eager, compiled), "the compiled kernel gives other bits than the eager one"
"""


@dataclass(frozen=True)
class CompileCheck:
    """How the trial ended."""

    works: bool
    compiler: str | None
    """Path of the C++ compiler that was found."""
    seconds: float
    error: str | None = None
    """The line that says why it does not work."""


def check_compile(device: str) -> CompileCheck:
    """Compile on `device` ("cpu" or "cuda") and compare with the eager result; at most four minutes."""
    compiler = cpp_compiler()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="thinwire-doctor-", ignore_cleanup_errors=True) as cache:
        try:
            done = subprocess.run(
                [sys.executable, "-c", SCRIPT, device],
                env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                timeout=TIMEOUT_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return CompileCheck(False, compiler, TIMEOUT_SECONDS, f"no result after {TIMEOUT_SECONDS} s")
    seconds = time.monotonic() - begin
    if done.returncode == 0:
        return CompileCheck(True, compiler, seconds)
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or ["it wrote nothing"]
    errors = [line for line in lines if "Error" in line] or lines
    return CompileCheck(False, compiler, seconds, errors[-1])
