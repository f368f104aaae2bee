"""Every format, geometry and feedback, with routes and without, on one model of odd parameters, in five steps.

In the third an inf is in what one rank sees: all skip it. Any two values of two factors meet in one combination,
the number of ranks included; the full product belongs to the full matrix. Slow because there are many of them.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from tests.data_parallel.oddities import Exact, Named, Oddities, exact
from tests.data_parallel.toys import parameter_bits, raw, residuals
from tests.support.ranks import run_ranks
from thinwire.formats import NVFP4, BlockScaled, Format, get, names
from thinwire.geometry import Geometry
from thinwire.reducers.quantized import BoundQuantized
from thinwire.reducers.round_trip import round_trip
from thinwire.reducers.routed import BoundRouted

pytestmark = pytest.mark.slow

Worst = tuple[float, str]

STEPS, BROKEN = 5, 2
REFRESHES = 4  # of GIFT, at reductions 1, 2, 3 and 5
STOCHASTIC = ("fp8_e4m3", "fp8_e5m2_pow2", "mxfp4", "nvfp4", "int8_span", "int4")  # each element


def stochastic(name: str) -> Format:
    format = get(name)
    assert isinstance(format, BlockScaled | NVFP4)
    return replace(format, rounding="stochastic")


FORMATS = {name: get(name) for name in names()} | {f"{name}_sr": stochastic(name) for name in STOCHASTIC}
GEOMETRIES: dict[str, Geometry | None] = {
    "plain": None,
    "hadamard": tw.Hadamard(),
    "gift input right": tw.GIFT(rank=8, statistic="input", sides="right", refresh_every=2),
    "gift input both": tw.GIFT(rank=8, statistic="input", sides="both", refresh_every=2),
    "gift gradient right": tw.GIFT(rank=8, statistic="gradient", sides="right", refresh_every=2),
    "gift of ranks both": tw.GIFT(rank=8, statistics_of="ranks", sides="both", refresh_every=2),
}


class Combination(NamedTuple):
    format: str
    geometry: str
    feedback: Literal["none", "error"]
    route: Literal["alone", "routed"]
    ranks: int

    @property
    def reducer(self) -> tw.Quantized | tw.Routed:
        format, geometry = FORMATS[self.format], GEOMETRIES[self.geometry]
        reducer = tw.Quantized(format, feedback=self.feedback, geometry=geometry)
        return tw.Routed(reducer) if self.route == "routed" else reducer

    @property
    def spoiled(self) -> str:
        """The data with the inf: of a layer's input or, with routes, of a vector that goes through Dense."""
        return "vector" if self.route == "routed" else "input"


EVERY = [
    Combination(*row)
    for row in itertools.product(FORMATS, GEOMETRIES, ("none", "error"), ("alone", "routed"), (2, 3))
]


def pairwise(rows: Sequence[Combination]) -> list[Combination]:
    """Few of the rows, in which any two values of two factors still meet: greedily, the row that adds most."""
    pairs = {row: set(itertools.combinations(enumerate(row), 2)) for row in rows}
    missing = set().union(*pairs.values())
    shuffled = random.Random(0).sample(rows, len(rows))  # of equals not always those with the first values
    chosen = []
    while missing:
        chosen.append(max(shuffled, key=lambda row: len(pairs[row] & missing)))
        missing -= pairs[chosen[-1]]
    return chosen


@dataclass
class Found:
    """What one rank saw of a combination."""

    bits: list[str] = field(default_factory=list)
    """Of all parameters, after each step."""
    finite: list[bool] = field(default_factory=list)
    """Whether all gradients were, in each step."""
    off: Worst = (0.0, "")
    """The largest error of a mean to which nothing is owed, of what the format allows, and where."""
    lost: Worst = (0.0, "")
    """The largest error of the sum of applied means and of what is owed, of what float32 costs, and where."""
    owes: bool = False
    spoiled: float = 0.0
    """What the step with the inf changed in what is owed, relative to that."""
    untouched: list[str] = field(default_factory=list)
    """Parameters that did not change."""
    sent: int = 0
    refreshes: int = 0


def owed(link: tw.Link) -> Named:
    """This rank's error memory in the coordinates of the gradients."""
    kept = residuals(link)
    bound = link.reducer._parts["matched"] if isinstance(link.reducer, BoundRouted) else link.reducer
    assert isinstance(bound, BoundQuantized)
    change = bound._coordinates
    return {name: change.inverse(name, residual) if change else residual for name, residual in kept.items()}


def error_of(format: Format) -> float:
    """Of a round trip, relative."""
    values = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    return float((round_trip(format, values) - values).norm() / values.norm())


def trained(ddp: DDP, combination: Combination, means: dict[int, dict[str, Exact]]) -> Found:
    """Five steps of SGD; `means` by step, without the broken one."""
    model, found = ddp.module, Found()
    before = {name: raw(p) for name, p in model.named_parameters()}
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    balance = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in named.items()}
    error = error_of(FORMATS[combination.format])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    link = tw.attach(ddp, combination.reducer)
    for step in range(STEPS):
        optimizer.zero_grad()
        kept = owed(link) if step == BROKEN else {}
        ddp(model.data(step, combination.spoiled if step == BROKEN else "")).backward()
        gradients = {name: p.grad for name, p in named.items() if p.grad is not None}
        found.finite.append(all(bool(gradient.isfinite().all()) for gradient in gradients.values()))
        if step == BROKEN:
            for name, residual in owed(link).items():
                found.spoiled = max(found.spoiled, _ratio(residual - kept[name], float(kept[name].norm())))
        else:
            optimizer.step()
            for name, gradient in gradients.items():
                mean, size = means[step][name]
                balance[name] += gradient.double() - mean
                if combination.feedback == "none" or step == 0:
                    allowed = (4 * error + 1e-5 + _narrow(gradient)) * size
                    found.off = max(found.off, (_ratio(gradient - mean, allowed), f"{name} in step {step}"))
        found.bits.append(parameter_bits(model))
    rest = owed(link)
    for name, left in balance.items():
        if combination.feedback == "error" and left.numel():
            mine = rest.get(name, torch.zeros(left.shape)).double()
            dist.all_reduce(mine)
            found.owes |= bool(mine.any())
            allowed = 1e-5 + (0.0 if name in rest else _narrow(named[name]))  # Dense has no memory
            size = sum(of[name].size for of in means.values())
            found.lost = max(found.lost, (_ratio(left + mine, allowed * size), name))
    found.untouched = [name for name, p in model.named_parameters() if raw(p) == before[name]]
    found.sent = link.ledger.sent_bytes()
    gathers = (row for row in link.ledger.rows() if (row.phase, row.op) == ("refresh", "all_gather"))
    found.refreshes = sum(row.calls for row in gathers)
    link.detach()
    return found


def _ratio(difference: Tensor, size: float) -> float:
    norm = float(difference.norm().nan_to_num(nan=float("inf")))
    return norm / size if size else float("inf") if norm else 0.0


def _narrow(tensor: Tensor) -> float:
    """What rounding to the tensor's dtype costs."""
    return 2**-8 if tensor.dtype == torch.bfloat16 else 0.0


def each(combinations: list[Combination]) -> list[Found]:
    torch.manual_seed(1)
    model = Oddities()
    means = {step: exact(model, step) for step in range(STEPS) if step != BROKEN}
    ddp = DDP(model, find_unused_parameters=True, bucket_cap_mb=0.08)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    found = []
    for combination in combinations:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(start[name])  # a bfloat16 one that has grown would not move any more
        try:
            found.append(trained(ddp, combination, means))
        except Exception as error:
            error.add_note(f"in {combination}")
            raise
    return found


@pytest.fixture(scope="module", params=["pairwise", pytest.param("every", marks=pytest.mark.full)])
def found(request: pytest.FixtureRequest) -> dict[Combination, tuple[Found, ...]]:
    """By combination, what each rank saw."""
    rows = EVERY if request.param == "every" else pairwise(EVERY)
    seen = {}
    for ranks in (2, 3):
        mine = [row for row in rows if row.ranks == ranks]
        seen |= dict(zip(mine, zip(*run_ranks(each, ranks, mine, timeout=1 + 5 * len(mine)))))
    return seen


All = dict[Combination, tuple[Found, ...]]


def test_any_two_values_of_two_factors_meet_in_a_combination() -> None:
    rows = pairwise(EVERY)
    assert len(rows) < len(EVERY) / 7
    for one, other in itertools.combinations(range(len(EVERY[0])), 2):
        assert {(row[one], row[other]) for row in rows} == {(row[one], row[other]) for row in EVERY}


def test_after_every_step_all_ranks_hold_the_same_parameters(found: All) -> None:
    assert not [row for row, ranks in found.items() if any(rank.bits != ranks[0].bits for rank in ranks)]


def test_a_mean_is_as_exact_as_the_format(found: All) -> None:
    assert not {row: rank.off for row, ranks in found.items() for rank in ranks if rank.off[0] > 1}


def test_what_is_applied_and_what_is_owed_add_up_to_the_exact_means(found: All) -> None:
    assert not {row: rank.lost for row, ranks in found.items() for rank in ranks if rank.lost[0] > 1}
    assert not [row for row, ranks in found.items() if ranks[0].owes != (row.feedback == "error")]


def test_an_inf_is_seen_by_every_rank_and_gone_in_the_next_step(found: All) -> None:
    expected = [step != BROKEN for step in range(STEPS)]
    assert not {row: rank.finite for row, ranks in found.items() for rank in ranks if rank.finite != expected}


def test_a_step_with_an_inf_leaves_what_is_owed_as_it_was(found: All) -> None:
    """To the bit; where coordinates change in it, to the rounding of that."""
    changes = {row: max(rank.spoiled for rank in ranks) for row, ranks in found.items()}
    assert not {row: by for row, by in changes.items() if by > (1e-5 if "gift" in row.geometry else 0.0)}


def test_frozen_and_unused_parameters_and_those_with_a_gradient_of_zero_stay_as_they_are(found: All) -> None:
    expected = ["frozen", "unused", "still", "empty"]
    assert not {
        row: rank.untouched for row, ranks in found.items() for rank in ranks if rank.untouched != expected
    }


def test_all_ranks_send_the_same_number_of_bytes(found: All) -> None:
    assert not {row: sent for row, ranks in found.items() if len(sent := {rank.sent for rank in ranks}) > 1}


def test_gift_changes_its_coordinates_in_four_of_the_five_steps(found: All) -> None:
    expected = {row: REFRESHES if "gift" in row.geometry else 0 for row in found}
    assert {row: ranks[0].refreshes for row, ranks in found.items()} == expected
