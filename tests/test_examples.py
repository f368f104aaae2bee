"""Examples run as their docstrings say."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_ddp_example_sends_a_quarter_of_the_bytes() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*command, str(ROOT / "examples" / "ddp.py")], capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stderr
    ratio = re.search(r"sent ([0-9.]+) x the bytes of float32", done.stdout)
    assert ratio is not None
    assert 0.25 < float(ratio[1]) < 0.27
