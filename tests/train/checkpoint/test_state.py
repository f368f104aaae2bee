from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.support.ranks import run_ranks
from tests.train import small_run
from tests.train.small_run import Awkward, advance, bits, content, fresh, load, rank, save_steps
from thinwire.train.checkpoint import state as state_module
from thinwire.train.checkpoint.checkpointer import Checkpointer, CheckpointError
from thinwire.train.checkpoint.state import Ranks, TrainState, collect

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def _there_and_back(directory: Path, state: TrainState, other: TrainState) -> None:
    checkpointer = Checkpointer(directory)
    checkpointer.save(1, state)
    checkpointer.wait()
    assert Checkpointer(directory).load_latest(other) == 1


# -- bit for bit -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 3])
def test_everything_comes_back_bit_for_bit_on_every_rank(tmp_path: Path, world_size: int) -> None:
    held = run_ranks(save_steps, world_size, tmp_path, [3])
    for before, (step, after) in zip(held, run_ranks(load, world_size, tmp_path)):
        assert step == 3
        assert after == before[3]


def test_it_works_without_a_process_group(tmp_path: Path) -> None:
    assert load(tmp_path) == (None, content(fresh(99)))
    held = save_steps(tmp_path, [2])
    assert load(tmp_path) == (2, held[2])


def _draws() -> tuple[Any, ...]:
    return bits(torch.rand(3)), random.random(), random.gauss(0, 1), bits(nn.functional.dropout(torch.ones(9)))


def _draw_after_saving(directory: Path) -> tuple[Any, ...]:
    torch.manual_seed(rank() + 7)
    random.seed(rank() + 7)
    random.gauss(0, 1)  # leaves a second one cached
    checkpointer = Checkpointer(directory)
    checkpointer.save(1, fresh(rank() + 7))
    checkpointer.wait()
    return _draws()


def _draw_after_loading(directory: Path) -> tuple[Any, ...]:
    assert Checkpointer(directory).load_latest(fresh(99)) == 1
    return _draws()


def test_every_rank_goes_on_with_its_own_random_numbers(tmp_path: Path) -> None:
    before = run_ranks(_draw_after_saving, 2, tmp_path)
    assert before[0] != before[1]
    assert run_ranks(_draw_after_loading, 2, tmp_path) == before


def test_tied_weights_are_saved_once_and_stay_tied(tmp_path: Path) -> None:
    state, other = fresh(), fresh(99)
    assert [key for key in collect(state, Ranks(None))[0] if "embed" in key or "head" in key][:1] == [
        "model.embed.weight"
    ]
    assert "model.head.weight" not in collect(state, Ranks(None))[0]
    _there_and_back(tmp_path, state, other)
    assert other.model.head.weight is other.model.embed.weight
    assert torch.equal(other.model.embed.weight, state.model.embed.weight)


def test_the_optimizer_state_keeps_its_dtype(tmp_path: Path) -> None:
    state, other = fresh(), fresh(99)
    advance(state)
    entry = state.optimizer.state[state.model.narrow]  # type: ignore[union-attr]
    assert entry["exp_avg"].dtype == torch.bfloat16
    entry["exp_avg_sq"] = entry["exp_avg_sq"].float() + 1e-6  # as an optimizer with wider state would have it
    _there_and_back(tmp_path, state, other)
    assert other.optimizer.state[other.model.narrow]["exp_avg_sq"].dtype == torch.float32  # type: ignore[union-attr]
    assert content(other) == content(state)


def test_a_parameter_that_never_had_a_gradient_stays_without_state(tmp_path: Path) -> None:
    state, other = fresh(), fresh(99)
    advance(state)
    _there_and_back(tmp_path, state, other)
    assert other.model.unused not in other.optimizer.state  # type: ignore[union-attr]


def test_loading_replaces_the_state_of_an_optimizer_that_has_stepped(tmp_path: Path) -> None:
    state, other = fresh(), fresh(99)
    other.model.unused.grad = torch.ones(2, 2)
    advance(other, 3)
    _there_and_back(tmp_path, state, other)
    assert content(other) == content(state)
    assert not other.optimizer.state  # type: ignore[union-attr]


class _Odd(torch.optim.SGD):
    """Plain numbers and None in the state, a tensor for a learning rate."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] |= {
                    "calls": self.state[parameter].get("calls", 0) + 1,
                    "note": None,
                    "rate": 1 / 3,
                }


def test_numbers_in_optimizer_state_and_several_optimizers_work(tmp_path: Path) -> None:
    def build(seed: int) -> TrainState:
        torch.manual_seed(seed)
        model = Awkward()
        odd = _Odd([model.embed.weight], lr=torch.tensor(0.125 * (seed + 1)), momentum=0.5)
        muon = torch.optim.Muon([model.hidden.weight], lr=0.1)
        return TrainState(model, (odd, muon), None, {"position": 0})

    state, other = build(0), build(1)
    advance(state, 2)
    _there_and_back(tmp_path, state, other)
    assert content(other) == content(state)
    assert other.optimizers[0].state[other.model.embed.weight]["calls"] == 2
    for run in (state, other):
        torch.manual_seed(5)
        advance(run)
    assert content(other) == content(state), "and they train on alike"


def test_views_and_other_memory_orders_are_saved_as_what_they_show(tmp_path: Path) -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            whole = torch.randn(10, 8)
            self.column = nn.Parameter(whole[:, 2:5])
            self.rows = nn.Parameter(whole[3:5])
            self.turned = nn.Parameter(torch.randn(4, 3).t())

    first, second = Views(), Views()
    states = [TrainState(m, torch.optim.SGD(m.parameters(), lr=1.0)) for m in (first, second)]
    _there_and_back(tmp_path, *states)
    assert {name: bits(p) for name, p in first.named_parameters()} == {
        n: bits(p) for n, p in second.named_parameters()
    }


def _wrapped_keys() -> tuple[list[str], list[str]]:
    bare = fresh(link=False)
    wrapped = fresh(link=False)
    wrapped.model = DistributedDataParallel(torch.compile(wrapped.model), find_unused_parameters=True)
    return [list(collect(state, Ranks(None))[0]) for state in (bare, wrapped)]  # type: ignore[return-value]


def test_wrappers_do_not_show_in_the_names() -> None:
    (bare, wrapped) = run_ranks(_wrapped_keys, 1)[0]
    assert bare == wrapped
    assert "model.hidden.weight" in bare


def _keys(directory: Path) -> list[str]:
    state = fresh()
    advance(state)
    return list(collect(state, Ranks(torch.distributed.new_group(backend="gloo")))[0])


def test_all_ranks_save_the_same_keys(tmp_path: Path) -> None:
    keys = run_ranks(_keys, 2, tmp_path)
    assert keys[0] == keys[1]
    assert {"link.matrices.residual.hidden.weight", "rng.torch", "rng.python"} <= set(keys[0])


def _sharded(seed: int) -> TrainState:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 5, bias=False))  # 7 and 5 rows do not divide evenly
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return TrainState(model, torch.optim.AdamW(model.parameters(), lr=0.1))


def _whole(state: TrainState) -> dict[str, Any]:
    found = {name: bits(p.full_tensor()) for name, p in state.model.named_parameters()}  # type: ignore[attr-defined]
    for index, entry in state.optimizer.state_dict()["state"].items():  # type: ignore[union-attr]
        found |= {f"{index}.{kind}": bits(getattr(t, "full_tensor", lambda t=t: t)()) for kind, t in entry.items()}
    return found


def _save_sharded(directory: Path) -> dict[str, Any]:
    state = _sharded(0)
    state.model(torch.ones(2, 3)).sum().backward()
    state.optimizer.step()  # type: ignore[union-attr]
    checkpointer = Checkpointer(directory)
    checkpointer.save(1, state)
    checkpointer.close()
    return _whole(state)


def _load_sharded(directory: Path) -> dict[str, Any]:
    state = _sharded(1)
    assert Checkpointer(directory).load_latest(state) == 1
    return _whole(state)


@pytest.mark.parametrize("after", [2, 3])
def test_a_sharded_model_comes_back_on_any_number_of_ranks(tmp_path: Path, after: int) -> None:
    held = run_ranks(_save_sharded, 2, tmp_path)
    assert run_ranks(_load_sharded, after, tmp_path) == [held[0]] * after


# -- another number of ranks -------------------------------------------------------------------------------


def _owed(state: TrainState) -> dict[str, list[float]]:
    assert isinstance(state.link, small_run.StandInLink)
    return {name: tensor.flatten().tolist() for name, tensor in state.link.residuals.items()}


def _save_residuals(directory: Path) -> dict[str, list[float]]:
    state = fresh(rank() + 1)  # other error memories on each rank
    advance(state, 2)
    checkpointer = Checkpointer(directory)
    checkpointer.save(2, state)
    checkpointer.close()
    return _owed(state)


def _load_residuals(directory: Path) -> tuple[dict[str, list[float]], tuple[Any, ...], str, dict[str, Any]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("thinwire.train").addHandler(handler)
    state_module._READ_AT_ONCE = 100  # some of the tensors at a time
    state = fresh(99)
    assert Checkpointer(directory).load_latest(state) == 2
    return _owed(state), _draws(), "\n".join(lines), content(state)


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3), (2, 1)])
def test_on_another_world_size_what_is_owed_is_kept_and_shared_equally(
    tmp_path: Path, before: int, after: int
) -> None:
    saved = run_ranks(_save_residuals, before, tmp_path)
    loaded = run_ranks(_load_residuals, after, tmp_path)
    for name in saved[0]:
        total = sum(np.array(rows[name]) for rows in saved)
        for rows, _, _, _ in loaded:
            np.testing.assert_allclose(rows[name], total / after, rtol=1e-6, atol=1e-6)
    draws = [draw for _, draw, _, _ in loaded]
    assert len(set(draws)) == after, "every rank draws its own random numbers"
    assert f"was saved on {before} ranks, now {after}" in loaded[0][2]
    assert "error memory of 7 tensors" in loaded[0][2]
    assert all("was saved on" not in text for _, _, text, _ in loaded[1:]), "rank 0 speaks"


@pytest.mark.parametrize("name", ["geometry.weight", "same.residual.bias", "plain"])
def test_a_parameters_name_does_not_say_what_kind_of_state_it_has(name: str) -> None:
    for kind in ("residual.", "geometry.", "same."):
        assert state_module._kind(f"link.matched.{kind}{name}") == kind
    assert state_module._kind("link.statistics") is None


def test_resuming_twice_on_another_world_size_gives_the_same_state(tmp_path: Path) -> None:
    run_ranks(_save_residuals, 2, tmp_path)
    first = [found[3] for found in run_ranks(_load_residuals, 1, tmp_path)]
    assert [found[3] for found in run_ranks(_load_residuals, 1, tmp_path)] == first


def test_per_rank_state_that_cannot_be_split_is_named(tmp_path: Path) -> None:
    run_ranks(_save_steps_with_statistics, 2, tmp_path)
    state = fresh()
    state.link = _Statistics()
    with pytest.raises(CheckpointError, match=r"saved on 2 ranks, now 1, and link\.statistics cannot be split"):
        Checkpointer(tmp_path).load_latest(state)


class _Statistics:
    def state_dict(self) -> dict[str, Any]:
        return {"statistics": torch.zeros(3)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("not reached")


def _save_steps_with_statistics(directory: Path) -> None:
    state = fresh()
    state.link = _Statistics()
    checkpointer = Checkpointer(directory)
    checkpointer.save(1, state)
    checkpointer.wait()


# -- refusals ----------------------------------------------------------------------------------------------


class _Wider(Awkward):
    def __init__(self) -> None:
        super().__init__(width=7)


class _More(Awkward):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.ones(2, dtype=torch.float16))


def _adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **options)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            lambda s: setattr(s, "model", _Wider()),
            r"model\.hidden\.bias: saved 'float32 \(6,\)', now 'float32 \(7,\)'",
        ),
        (lambda s: setattr(s, "model", _More()), r"model\.extra: saved '\(absent\)', now 'float16 \(2,\)'"),
        (
            lambda s: setattr(s.model, "scale", nn.Parameter(torch.tensor(1.0).double())),
            r"model\.scale: saved 'float32 \(\)', now 'float64 \(\)'",
        ),
        (
            lambda s: setattr(s, "optimizer", torch.optim.SGD([s.model.embed.weight], lr=1.0)),
            r"optimizer 0\.class: saved 'AdamW', now 'SGD'",
        ),
        (
            lambda s: setattr(s, "optimizer", (s.optimizer, torch.optim.SGD([s.model.embed.weight], lr=1.0))),
            r"optimizer 1: saved '\(absent\)', now",
        ),
        (
            lambda s: setattr(s, "optimizer", torch.optim.AdamW([s.model.scale])),
            r"optimizer 0\.parameters of group 0: saved \['unused', 'scale', .*\], now \['scale'\]",
        ),
        (
            lambda s: s.link.residuals.pop("scale"),
            r"link\.matrices\.residual\.scale: saved 'float32 \(1,\)', now '\(absent\)'",
        ),
    ],
)
def test_a_checkpoint_of_something_else_names_what_differs_and_changes_nothing(
    tmp_path: Path, change: Any, named: str
) -> None:
    save_steps(tmp_path, [1])
    state = fresh(99)
    change(state)
    if isinstance(state.model, _Wider | _More):
        state.optimizer = _adamw(state.model)
        state.link = small_run.StandInLink(state.model)
    before = content(state)
    with pytest.raises(
        CheckpointError, match=rf"step-00000001 is a checkpoint of another run: .*{named}"
    ) as raised:
        Checkpointer(tmp_path).load_latest(state)
    assert "\n" not in str(raised.value)
    assert content(state) == before


def test_what_cannot_be_saved_is_named() -> None:
    model = nn.Module()
    model.wide = nn.Parameter(torch.zeros(2, dtype=torch.complex128))
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=1.0))
    with pytest.raises(CheckpointError, match=r"model\.wide is torch\.complex128"):
        collect(state, Ranks(None))

    state = fresh()
    state.optimizer.state[state.model.scale]["history"] = [torch.zeros(2)]  # type: ignore[union-attr]
    with pytest.raises(CheckpointError, match=r"optimizer\.history\.scale\[0\] is a Tensor"):
        collect(state, Ranks(None))

    stranger = TrainState(Awkward(), torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=1.0))
    with pytest.raises(
        CheckpointError, match=r"SGD, group 0: a parameter of shape \(3,\) is not one of the model's"
    ):
        collect(stranger, Ranks(None))
