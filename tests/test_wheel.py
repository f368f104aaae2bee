"""The core needs torch alone: a wheel, a clean virtual environment, an import.

Slow because it installs torch for real.
"""

import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

SCRIPT = """
import importlib.util
import torch
import thinwire as tw
for extra in ("transformers", "numpy", "tyro", "rich", "safetensors"):
    assert importlib.util.find_spec(extra) is None, extra
model = torch.nn.Linear(8, 8)
link = tw.attach(model, tw.recipes.get("fp8-ef").reducer)
model(torch.ones(1, 8)).sum().backward()
assert link.ledger.sent_bytes() == 0
link.verify(every=1)
"""


def _run(*command: str | Path) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_wheel_works_with_torch_alone(tmp_path: Path) -> None:
    _run(sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("thinwire-*.whl")
    clean = tmp_path / "clean"
    venv.create(clean, with_pip=True)
    python = clean / "bin" / "python"
    install = ("-m", "pip", "install", "--quiet", "--no-compile", "--constraint", ROOT / "constraints.txt")
    _run(python, *install, wheel)
    _run(python, "-c", SCRIPT)
    assert "fp8-ef" in _run(clean / "bin" / "thinwire", "recipes")
    assert (next((clean / "lib").glob("python*")) / "site-packages/thinwire/py.typed").exists()
    refused = subprocess.run([clean / "bin" / "thinwire", "train"], capture_output=True, text=True)
    assert refused.returncode == 2
    assert "pip install 'thinwire[train]'" in refused.stderr.strip().splitlines()[-1]  # torch warns of numpy
