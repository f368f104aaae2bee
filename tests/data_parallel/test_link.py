"""What a link shows and does: verification, bytes, seconds, overlap, profiler ranges, its end."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from tests.data_parallel.toys import FP8, MANY_BUCKETS, REDUCERS, layers, numbers, parameter_bits, train, vectors
from tests.support.ranks import run_ranks


def _perturbed(rank: int) -> str:
    """`rank` changes one weight by a hair before step 2 of 6; verified before every second reduction."""
    ddp = DDP(layers(20, 30, 8), bucket_cap_mb=MANY_BUCKETS)
    link = tw.attach(ddp, FP8)
    link.verify(every=2)
    for step in range(6):
        if step == 2 and dist.get_rank() == rank:
            with torch.no_grad():
                ddp.module.layers[0].weight[3, 3] += 1e-6
        try:
            train(ddp, range(step, step + 1), batch=vectors)
        except RuntimeError as error:
            return f"step {step}: {error}"
    return "no error"


def _drifting() -> str:
    """Local() lets replicas drift, so there is nothing to verify."""
    ddp = DDP(layers(20, 30, 8))
    link = tw.attach(ddp, tw.Local())
    link.verify(every=1)
    train(ddp, 2, batch=vectors)
    link.verify(every=1)
    return parameter_bits(ddp.module)


def _seconds(reducer: Any) -> list[tuple[float, float]]:
    """Exposed and encoding seconds after each of two steps."""
    ddp = DDP(layers(20, 30, 8), bucket_cap_mb=MANY_BUCKETS)
    link = tw.attach(ddp, reducer)
    seconds = []
    for step in range(2):
        train(ddp, range(step, step + 1), batch=vectors)
        seconds.append((link.exposed_seconds, link.encode_seconds))
    return seconds


def _overlap(reducer: Any) -> bool:
    """Whether a bucket was sent while the gradient of the first layer, in the last bucket, was held back."""
    ddp = DDP(layers(60, 50, 40, 30), bucket_cap_mb=MANY_BUCKETS)
    link = tw.attach(ddp, reducer)
    train(ddp, 1, batch=lambda step: numbers(step, 60))  # one bucket until DDP rebuilds them
    before = link.ledger.sent_bytes()
    seen = []

    def hold_back(gradient: Tensor) -> None:
        deadline = time.monotonic() + 10
        while link.ledger.sent_bytes() == before and time.monotonic() < deadline:
            time.sleep(0.001)
        seen.append(link.ledger.sent_bytes() > before)

    ddp.module.layers[0].weight.register_hook(hold_back)
    train(ddp, 1, batch=lambda step: numbers(step, 60))
    return seen == [True]


def _profiled() -> set[str]:
    ddp = DDP(layers(20, 30, 8))
    tw.attach(ddp, FP8)
    everything = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=everything
    ) as profile:
        train(ddp, 1, batch=vectors)
    return {event.key for event in profile.key_averages() if "thinwire" in event.key}


def _dropped() -> tuple[list[bool], bool]:
    """Whether a model dropped with its link is collected, with all that hangs on it, and its worker ends."""

    def make() -> list[weakref.ref[Any]]:
        ddp = DDP(layers(20, 30, 8))
        link = tw.attach(ddp, FP8)
        train(ddp, 2, batch=vectors)
        return [weakref.ref(thing) for thing in (ddp, ddp.module, link, link.reducer)]

    dropped = make()
    gc.collect()
    deadline = time.monotonic() + 10
    while _workers() and time.monotonic() < deadline:
        time.sleep(0.01)
    return [reference() is None for reference in dropped], not _workers()


def _workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "thinwire"]


def _states_of_others() -> dict[str, str]:
    """What a link says to the state of the next rank, of another number of ranks, and of nobody."""
    link = tw.attach(DDP(layers(20, 30, 8)), FP8)
    own = link.state_dict()
    states: list[Any] = [None] * 3
    dist.all_gather_object(states, own)
    found = {
        "own": own,
        "next rank": states[(dist.get_rank() + 1) % 3],
        "four ranks": {**own, "world_size": 4},
        "nobody": {key: value for key, value in own.items() if key != "rank"},
    }
    return {whose: _said(lambda state=state: link.load_state_dict(state)) for whose, state in found.items()}


def _rolled_back() -> list[str]:
    link = tw.attach(DDP(layers(20, 30, 8)), FP8)
    return [
        _said(lambda names=names: link.rollback(names)) for names in (None, [link.slots[0].name], ["layers.9"])
    ]


def _said(action: Any) -> str:
    try:
        action()
    except ValueError as error:
        return str(error)
    return "fine"


def _three_ranks() -> dict[str, Any]:
    return {
        "dropped": _dropped(),  # first: no other worker lives
        "perturbed": [_perturbed(rank) for rank in range(3)],
        "drifting": _drifting(),
        "seconds": {name: _seconds(reducer) for name, reducer in REDUCERS.items()},
        "overlap": {name: _overlap(reducer) for name, reducer in REDUCERS.items()},
        "profiled": _profiled(),
        "states": _states_of_others(),
        "rolled back": _rolled_back(),
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(_three_ranks, 3)


@pytest.mark.parametrize("perturbed", range(3))
def test_verify_names_the_rank_whose_parameters_differ(ranks: list[dict[str, Any]], perturbed: int) -> None:
    for rank in ranks:
        assert f"step 3: parameters of rank {perturbed} differ" in rank["perturbed"][perturbed]
        assert "seen before reduction 4" in rank["perturbed"][perturbed]


def test_verify_lets_replicas_drift_that_are_meant_to(ranks: list[dict[str, Any]]) -> None:
    assert len({rank["drifting"] for rank in ranks}) == 3


@pytest.mark.parametrize("reducer", REDUCERS)
def test_seconds_blocked_and_seconds_encoding_grow_with_every_step(
    ranks: list[dict[str, Any]], reducer: str
) -> None:
    for rank in ranks:
        (exposed, encoding), (exposed_later, encoding_later) = rank["seconds"][reducer]
        assert 0 < exposed < exposed_later
        assert 0 < encoding < encoding_later


@pytest.mark.parametrize("reducer", REDUCERS)
def test_the_first_bucket_is_sent_while_later_gradients_are_computed(
    ranks: list[dict[str, Any]], reducer: str
) -> None:
    assert all(rank["overlap"][reducer] for rank in ranks)


def test_the_profiler_shows_encoding_sending_and_decoding(ranks: list[dict[str, Any]]) -> None:
    expected = {"thinwire::encode", "thinwire::send", "thinwire::decode"}
    assert [rank["profiled"] for rank in ranks] == [expected] * 3


def test_the_state_of_another_rank_or_number_of_ranks_is_refused_in_a_line(ranks: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(ranks):
        here = f", to be loaded on rank {number} of 3: load on each rank what that rank saved"
        assert rank["states"]["own"] == "fine"
        assert f"is of rank {(number + 1) % 3} of 3{here}" in rank["states"]["next rank"]
        assert f"is of rank {number} of 4{here}" in rank["states"]["four ranks"]
        assert f"is of rank None of 3{here}" in rank["states"]["nobody"]


def test_a_name_that_is_not_averaged_cannot_be_rolled_back(ranks: list[dict[str, Any]]) -> None:
    line = "rollback: 'layers.9' is not averaged by this link; see link.slots for the names"
    assert [rank["rolled back"] for rank in ranks] == [["fine", "fine", line]] * 3


def test_a_model_dropped_with_its_link_is_collected_and_its_worker_ends(ranks: list[dict[str, Any]]) -> None:
    assert [rank["dropped"] for rank in ranks] == [([True] * 4, True)] * 3


def _end_the_interpreter(code: int) -> None:
    """As the end of a script does; a forked rank leaves by os._exit otherwise."""
    ctypes.pythonapi.Py_Exit(code)


def _fail(gradient: Tensor) -> None:
    raise ValueError("trouble in backward")


def _script(trouble: bool) -> None:
    """A program that neither detaches nor destroys anything. With trouble, rank 1 ends by an exception while a
    collective is under way, and rank 0 by the error that follows from it."""
    ddp = DDP(layers(200, 200, 200, 200, 200), bucket_cap_mb=0.1)
    tw.attach(ddp, FP8)
    for step in range(4):
        if step == 3 and trouble and dist.get_rank() == 1:
            ddp.module.layers[1].weight.register_hook(_fail)
        try:
            train(ddp, range(step, step + 1), batch=lambda step: numbers(step, 200))
        except ValueError:
            _end_the_interpreter(3)
        except tw.CollectiveError:
            _end_the_interpreter(4)
    _end_the_interpreter(0)


def _exit_codes(trouble: bool) -> list[int]:
    return [int(str(result).split()[-1]) for result in run_ranks(_script, 2, trouble, check=False)]


def test_a_program_that_ends_without_detach_ends_in_peace() -> None:
    assert _exit_codes(trouble=False) == [0, 0]


def test_a_program_that_an_exception_in_backward_ends_is_not_aborted() -> None:
    assert _exit_codes(trouble=True) == [4, 3]
