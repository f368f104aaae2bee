"""Parameter names as the bare model has them, whatever it is wrapped in. State is keyed by these."""

from __future__ import annotations

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""What torch.compile and checkpoint wrappers put between the dots of a name. (Not "module": DDP is opened by
`ddp.module`, and a model may well call a child of its own that.)"""


def plain_name(name: str) -> str:
    """`layers.0._orig_mod.weight` -> `layers.0.weight`."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)
