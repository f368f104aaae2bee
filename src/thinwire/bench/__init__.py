"""`thinwire bench`: measurements on this machine, one module each, from a visible table."""

from __future__ import annotations

import importlib
import sys

BENCHES: dict[str, tuple[str, str]] = {
    "formats": ("thinwire.bench.formats", "encode, decode and decode-and-add, as a ratio to copying"),
    "collectives": ("thinwire.bench.collectives", "compressed all-reduce against gloo's own, on a slow network"),
    "fidelity": ("thinwire.bench.fidelity", "what encoding leaves of a run's gradients, layer by layer"),
    "recipes": ("thinwire.bench.recipes", "the same training job under each recipe: loss, bytes and time"),
    "local-updates": (
        "thinwire.bench.local_updates",
        "what averaging now and then does to a loss",
    ),
    "peers": ("thinwire.bench.peers", "local updates beside those of torch, accelerate and torchft"),
    "faults": ("thinwire.bench.faults", "what a run of local updates survives: killed, stopped, cut off, slowed"),
    "ablation": ("thinwire.bench.ablation", "what coordinates and error feedback do for each format's loss"),
}


def main(argv: list[str]) -> int:
    """Run the bench that `argv` names; every bench has a `main(argv) -> int` of its own."""
    if not argv or argv[0] in ("-h", "--help"):
        rows = "\n".join(f"  {name:<12} {purpose}" for name, (_, purpose) in BENCHES.items())
        sys.stdout.write(
            f"usage: thinwire bench NAME [options]\n\n{rows}\n\nthinwire bench NAME --help says more.\n"
        )
        return 0 if argv else 2
    name, *options = argv
    if name not in BENCHES:
        sys.stderr.write(f"thinwire bench: there is no bench {name!r}; there are {', '.join(BENCHES)}\n")
        return 2
    code: int = importlib.import_module(BENCHES[name][0]).main(options)
    return code
