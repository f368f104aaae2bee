"""Streaming DiLoCo on two scalars, by hand: numbers that another implementation gives too.

Two fragments, each one weight that starts at 1; a constant gradient of 2; inner SGD with learning rate 1, outer
SGD with 2 and no momentum; six steps a round.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.support.ranks import run_ranks

ROWS = {
    (0, 0.0): (
        (1, -1, -3, -11, -13, -15, -17, -19, -21, -35),
        (1, -1, -3, -5, -7, -9, -23, -25, -27, -29),
        (-41, -47),
        (-59, -53),
    ),
    (0, 0.5): (
        (1, -1, -3, -8, -10, -12, -14, -16, -18, -24.5),
        (1, -1, -3, -5, -7, -9, -17, -19, -21, -23),
        (-30.5, -32),
        (-40.25, -38),
    ),
    (0, 1.0): (
        tuple(1 - 2 * step for step in range(10)),
        tuple(1 - 2 * step for step in range(10)),
        (-23, -23),
        (-29, -29),
    ),
    (1, 0.0): (
        (1, -1, -3, -7, -9, -11, -13, -15, -17, -27),
        (1, -1, -3, -5, -7, -9, -19, -21, -23, -25),
        (-33, -39),
        (-47, -45),
    ),
    (1, 0.5): (
        (1, -1, -3, -6, -8, -10, -12, -14, -16, -21.5),
        (1, -1, -3, -5, -7, -9, -15, -17, -19, -21),
        (-27.5, -29),
        (-35.75, -35),
    ),
    (1, 1.0): (
        tuple(1 - 2 * step for step in range(10)),
        tuple(1 - 2 * step for step in range(10)),
        (-23, -23),
        (-29, -29),
    ),
}
"""By delay and merge weight: w0 and w1 at steps 0 to 9, both after step 12, both after step 15."""


class TwoWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w0, self.w1 = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))

    def forward(self) -> Tensor:
        return 2 * (self.w0 + self.w1).sum()


def trajectories(fragments: int, every: int) -> dict[tuple[int, float], list[tuple[float, float]]]:
    """(w0, w1) at steps 0 to 15, by delay and merge weight."""
    found = {}
    for delay, merge in ROWS:
        model = TwoWeights()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        method = tw.StreamingDiLoCo(
            every=every,
            fragments=fragments,
            delay=delay,
            merge=merge,
            outer_lr=2.0,
            outer_momentum=0.0,
            reducer=tw.Dense(),
        )
        sync = tw.local_update(model, inner, method)
        weights = [(model.w0.item(), model.w1.item())]
        for _ in range(15):
            inner.zero_grad()
            model().backward()
            inner.step()
            sync.step()
            weights.append((model.w0.item(), model.w1.item()))
        sync.close()
        found[delay, merge] = weights
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_two_fragments(ranks: int) -> None:
    for found in run_ranks(trajectories, ranks, 2, 6):
        for key, (w0, w1, after_12, after_15) in ROWS.items():
            weights = found[key]
            assert tuple(w for w, _ in weights[:10]) == w0, key
            assert tuple(w for _, w in weights[:10]) == w1, key
            assert (weights[12], weights[15]) == (after_12, after_15), key


def written_out(delay: int, merge: float, every: int = 3, steps: int = 15) -> list[float]:
    """One weight: what is agreed moves by 2 x (agreed - own), as it was `delay` steps before."""
    agreed, own, taken, history = 1.0, 1.0, 0.0, [1.0]
    for step in range(1, steps + 1):
        own -= 2.0
        if (step + delay) % every == 0:
            taken = agreed - own
        if step % every == 0:
            agreed -= 2.0 * taken
            own = (1 - merge) * agreed + merge * own
        history.append(own)
    return history


def test_one_fragment_is_the_same_for_all_weights() -> None:
    for (delay, merge), weights in trajectories(1, 3).items():
        assert [w for w, _ in weights] == written_out(delay, merge)
        assert all(a == b for a, b in weights)
        assert [w for w, _ in weights[:6]] == list(ROWS[delay, merge][0][:6])
