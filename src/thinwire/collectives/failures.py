"""What is said when a collective fails: which rank says it, what failed, and who does not answer.

A rank whose collective failed cannot ask its peers over the connections that failed, so it leaves a note in the
store of the process group and looks for theirs. A rank that leaves none is dead, stopped or stuck.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

import torch.distributed as dist

from thinwire.usage import first_line

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 3.0
"""How long a rank whose collective failed waits for the others to say that they are alive."""


class CollectiveError(RuntimeError):
    """A collective failed or timed out. The message names this rank, the op, the slots and who is missing."""


def is_of_a_collective(error: BaseException) -> bool:
    """Whether torch raised this because a collective failed, perhaps by the end of another rank."""
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo" in str(error))


def describe(what: str, error: Exception, *, rank: int, ranks: Sequence[int], group_name: str) -> str:
    """One line: `what` failed on `rank`, for which reason, and which of the `ranks` of the group do not answer.

    All ranks that see a failure of this group call this, within a few seconds; ranks are those of the world.
    """
    missing = _silent(rank, ranks, group_name)
    who = f"; no answer from rank {', '.join(map(str, missing))}" if missing else ""
    return f"rank {rank}: {what}{who}: {first_line(error)}"


def _silent(rank: int, ranks: Sequence[int], group_name: str) -> list[int]:
    """Ranks that do not say in time that they saw a failure too.

    Where the network is what failed, a request to the store would never return, so another thread makes it.
    """
    if len(ranks) == 1:
        return []
    missing: list[int] = []
    asking = threading.Thread(target=lambda: missing.extend(_ask_store(rank, ranks, group_name)), daemon=True)
    asking.start()
    asking.join(PATIENCE_SECONDS + 1.0)
    return list(missing)


def _ask_store(rank: int, ranks: Sequence[int], group_name: str) -> list[int]:
    key = f"thinwire/failed/{group_name}"
    missing = set(ranks)
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set(f"{key}/{rank}", "alive")
        deadline = time.monotonic() + PATIENCE_SECONDS
        while missing and time.monotonic() < deadline:
            missing -= {other for other in missing if store.check([f"{key}/{other}"])}
            time.sleep(0.05)
    except (RuntimeError, ValueError) as error:  # its process may be the dead one, or the group is destroyed
        logger.debug("the store cannot tell which rank failed: %s", error)
        return []
    return sorted(missing)
