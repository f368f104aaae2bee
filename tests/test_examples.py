"""Examples run as their docstrings say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(("example", "least", "most"), [("ddp.py", 0.25, 0.27), ("fsdp2.py", 0.14, 0.15)])
def test_the_examples_send_what_they_say(example: str, least: float, most: float) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*command, str(ROOT / "examples" / example)], capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stderr
    ratio = re.search(r"sent ([0-9.]+) x the bytes of float32", done.stdout)
    assert ratio is not None
    assert least < float(ratio[1]) < most
