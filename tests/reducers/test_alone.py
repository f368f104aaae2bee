"""A world of one rank."""

import torch

from thinwire.collectives import Slot, Wire
from thinwire.reducers import Quantized
from thinwire.reducers.reducer import BoundReducer

SLOTS = [Slot("w", (3, 5)), Slot("b", ())]


def _bound() -> BoundReducer:
    return Quantized("fp8_e4m3", feedback="error").bind(SLOTS, Wire())


def _owing() -> BoundReducer:
    bound = _bound()
    state = bound.state_dict()
    state["residual.w"] = torch.full((3, 5), 0.25)
    bound.load_state_dict(state)
    return bound


def _reduce(bound: BoundReducer, value: float = 1.0) -> torch.Tensor:
    w = torch.full((3, 5), value)
    bound.begin()
    bound.all_reduce({"w": w, "b": torch.tensor(1.0)}).wait()
    return w


def test_one_rank_is_an_exact_identity() -> None:
    bound = _bound()
    assert torch.equal(_reduce(bound, 1 / 3), torch.full((3, 5), 1 / 3))
    assert bound.memory_bytes() == 0


def test_what_former_ranks_owed_is_paid_once() -> None:
    bound = _owing()
    assert torch.equal(_reduce(bound), torch.full((3, 5), 1.25))
    assert torch.equal(_reduce(bound), torch.full((3, 5), 1.0))
    assert not bound.state_dict()["residual.w"].any()


def test_a_debt_outlives_a_rollback_and_a_bad_step() -> None:
    bound = _owing()
    _reduce(bound)
    bound.rollback()
    assert torch.equal(_reduce(bound, float("nan")).isnan(), torch.ones(3, 5, dtype=torch.bool))
    assert torch.equal(_reduce(bound), torch.full((3, 5), 1.25))


def test_a_debt_is_in_unscaled_units() -> None:
    bound = _owing()
    bound.set_loss_scale(8.0)
    assert torch.equal(_reduce(bound), torch.full((3, 5), 3.0))


def test_a_debt_is_saved_until_it_is_paid() -> None:
    bound = _owing()
    assert torch.equal(bound.state_dict()["residual.w"], torch.full((3, 5), 0.25))
    again = _bound()
    again.load_state_dict(bound.state_dict())
    assert torch.equal(_reduce(again), torch.full((3, 5), 1.25))


def test_a_reduce_scatter_pays_too() -> None:
    bound, piece = _owing(), torch.empty(15)
    bound.begin()
    bound.reduce_scatter({"w": torch.ones(3, 5)}, {"w": piece}).wait()
    assert torch.equal(piece, torch.full((15,), 1.25))
