"""Where a run stands: the numbers that a checkpoint carries beside its tensors.

They are the same on every rank. What each rank measures for itself (bytes, seconds) is gathered from all ranks
when a checkpoint is written; a resumed run goes on counting from there.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from thinwire.train.metrics import Baseline

if TYPE_CHECKING:
    from thinwire.train.run import Run

_MEASURED = (
    "sent_bytes",
    "between_groups_bytes",
    "comm_seconds",
    "sending_seconds",
    "encode_seconds",
)  # of each rank


@dataclass
class Progress:
    step: int = 0
    """Completed steps, skipped ones included."""
    position: int = 0
    """Samples taken from the sampler by all ranks together."""
    tokens: int = 0
    """Tokens that were predicted."""
    skipped_steps: int = 0
    bad_in_a_row: int = 0
    train_loss: float | None = None
    """Of the last logged step, in nats per token."""
    val_loss: float | None = None
    """Of the last validation, in nats per byte."""
    wall_seconds: float = 0.0
    sent_bytes: list[int] = field(default_factory=list)
    """Of each rank, control traffic apart."""
    between_groups_bytes: list[int] = field(default_factory=list)
    """Of each rank: those that left its group, under local updates."""
    comm_seconds: list[float] = field(default_factory=list)
    """Of each rank: the backward pass waited for communication."""
    sending_seconds: list[float] = field(default_factory=list)
    """Of each rank: gradients were under way, exposed or hidden behind the backward pass."""
    encode_seconds: list[float] = field(default_factory=list)
    """Of each rank: encoding and decoding."""
    ddp_bytes: float = 0.0
    """What plain DDP in float32 would have sent from a rank, on as many ranks as there were at each step."""

    def __post_init__(self) -> None:
        self._since = time.perf_counter()
        self._before = dict.fromkeys(_MEASURED, 0.0)  # on this rank, at the last start or measurement
        self._measured = self.step
        self._own = [0.0, 0.0]  # tokens and skipped steps of this rank alone, not yet in the counts above

    def count_own(self, tokens: int, *, skipped: bool) -> None:
        """A step of this rank's own, under local updates."""
        self._own = [self._own[0] + tokens, self._own[1] + skipped]

    def add_up(self, run: Run) -> None:
        """Add what the ranks counted for themselves. A collective call."""
        tokens, skipped = run.agree(self._own)
        self.tokens += round(tokens)
        self.skipped_steps += round(skipped)
        self._own = [0.0, 0.0]

    def numbers(self) -> dict[str, Any]:
        """For the checkpoint's manifest."""
        return asdict(self)

    @classmethod
    def of(cls, numbers: Mapping[str, Any], run: Run) -> Progress:
        """Continue counting. On another number of ranks each goes on from the largest count."""
        progress = cls(**numbers)
        for name in _MEASURED:
            counts = getattr(progress, name)
            if len(counts) != run.world_size:
                setattr(progress, name, [max(counts, default=0)] * run.world_size)
        return progress

    def measure(self, run: Run) -> None:
        """Add what all ranks spent since the last call. A collective call."""
        now = time.perf_counter()
        averaging = run.averaging
        totals = {
            "sent_bytes": float(averaging.sent_bytes),
            "between_groups_bytes": float(averaging.between_groups_bytes),
            "comm_seconds": averaging.exposed_seconds,
            "sending_seconds": averaging.sending_seconds,
            "encode_seconds": averaging.encode_seconds,
        }
        rows = run.table([*(totals[name] - self._before[name] for name in _MEASURED), now - self._since])
        for column, name in enumerate(_MEASURED):
            counts = getattr(self, name) or [0] * run.world_size
            setattr(self, name, [count + row[column] for count, row in zip(counts, rows)])
        self.sent_bytes = [round(count) for count in self.sent_bytes]
        self.between_groups_bytes = [round(count) for count in self.between_groups_bytes]
        self.wall_seconds += rows[0][-1]
        config = run.config
        per_step = Baseline.of(run.parameters, run.world_size, config.precision, config.parallel).float32_bytes
        self.ddp_bytes += per_step * (self.step - self._measured)
        self._before, self._since, self._measured = totals, now, self.step
