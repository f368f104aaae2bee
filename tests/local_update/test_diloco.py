"""DiLoCo and Streaming DiLoCo: what they are equal to, what they send, and how they go on after a stop."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW

import thinwire as tw
from tests.local_update.toys import Layers, apart, bits, loss, plain, train, weights
from tests.support.ranks import run_ranks

STEPS = 24
STREAMING = tw.StreamingDiLoCo(every=6, fragments=3, delay=1, merge=0.5, reducer=tw.Dense())


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def run(
    method: tw.DiLoCo | tw.StreamingDiLoCo, inner: str = "adamw", *, steps: int = STEPS, wrapped: bool = False
) -> dict[str, Any]:
    """Train; the bits of this rank's weights after every step, what was sent in each, and the last weights."""
    model = Layers(seed=rank())  # equal only because rank 0's are given to all
    module = DDP(model) if wrapped else model
    optimizer = SGD(model.parameters(), lr=0.1) if inner == "sgd" else AdamW(model.parameters(), lr=0.01)
    sync = tw.local_update(module, optimizer, method)
    history, sent, before = [], [], 0
    for step in range(steps):
        train(module, optimizer, step, rank())
        sync.step()
        history.append(bits(weights(model)))
        sent.append(sync.ledger.sent_bytes() - before)
        before = sync.ledger.sent_bytes()
    sync.verify()
    local = weights(model)
    with sync.agreed():
        agreed = plain(weights(model))
    assert bits(weights(model)) == bits(local)
    sync.finish()
    finished = plain(weights(model))
    sync.close()
    return {"history": history, "sent": sent, "agreed": agreed, "finished": finished, "fragments": sync.fragments}


def ddp_sgd() -> dict[str, list[float]]:
    model = Layers()
    module = DDP(model)
    optimizer = SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        train(module, optimizer, step, rank())
    return plain(weights(model))


def several() -> dict[str, Any]:
    """Many short runs on the same ranks."""
    average = tw.DiLoCo(every=1, outer_lr=1.0, outer_momentum=0.0)
    one = tw.StreamingDiLoCo(every=6, fragments=1, delay=0, merge=0.0, outer_lr=0.7, reducer=tw.Dense())
    return {
        "ddp": ddp_sgd(),
        "every step": run(average, "sgd"),
        "diloco": run(tw.DiLoCo(every=6)),
        "wrapped": run(tw.DiLoCo(every=6), wrapped=True),
        "one fragment": run(one),
        "streaming": run(STREAMING),
        "int8": run(tw.DiLoCo(every=6, reducer=tw.Quantized("int8", feedback="error"))),
        "e3m0": run(replace(STREAMING, reducer=tw.Quantized("fp4_e3m0"))),
    }


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run_ranks(several, 2)


def test_averaging_after_every_step_of_sgd_is_data_parallel_sgd(two: list[dict[str, Any]]) -> None:
    """A mean of steps is the step along the mean gradient; with AdamW inside it is not."""
    for found in two:
        assert apart(found["every step"]["finished"], found["ddp"]) < 1e-6


def test_ranks_agree_after_a_round_and_go_their_own_ways_within_it(two: list[dict[str, Any]]) -> None:
    for kind in ("diloco", "wrapped", "int8"):
        a, b = (found[kind]["history"] for found in two)
        assert [x == y for x, y in zip(a, b)] == [(step + 1) % 6 == 0 for step in range(STEPS)], kind


def test_all_ranks_finish_with_the_same_weights_and_agree_before(two: list[dict[str, Any]]) -> None:
    for kind in ("diloco", "streaming", "int8", "e3m0"):
        for what in ("agreed", "finished"):
            assert bits(two[0][kind][what]) == bits(two[1][kind][what])


def test_a_ddp_model_is_trained_like_a_bare_one(two: list[dict[str, Any]]) -> None:
    assert [found["wrapped"]["history"] for found in two] == [found["diloco"]["history"] for found in two]


def test_streaming_with_one_fragment_no_delay_and_no_merge_is_diloco(two: list[dict[str, Any]]) -> None:
    assert [found["one fragment"]["history"] for found in two] == [found["diloco"]["history"] for found in two]


def test_a_fragment_is_sent_once_in_a_round_and_nothing_else(two: list[dict[str, Any]]) -> None:
    """In float32 two ranks send each number once: 4 bytes."""
    model = weights(Layers())
    for found in two:
        streaming, whole = found["streaming"], found["diloco"]
        size = [4 * sum(model[name].numel() for name in names) for names in streaming["fragments"]]
        assert sorted(name for names in streaming["fragments"] for name in names) == sorted(model)
        assert max(size) <= 1.1 * sum(size) / 3
        sent = streaming["sent"]  # after steps 1, 3 and 5 of a round, or on the way to the next one
        assert [a + b for a, b in zip(sent[::2], sent[1::2])] == size * (STEPS // 6)
        assert whole["sent"] == [0, 0, 0, 0, 0, sum(size)] * (STEPS // 6)


def test_narrow_formats_send_their_bytes(two: list[dict[str, Any]]) -> None:
    for found in two:
        dense = sum(found["diloco"]["sent"])
        assert sum(found["int8"]["sent"]) < 0.6 * dense  # pieces are padded to blocks of 128
        assert apart(found["int8"]["finished"], found["diloco"]["finished"]) < 0.02


# -- one rank: written out ---------------------------------------------------------------------------------------


def outer_by_hand(method: tw.DiLoCo, steps: int) -> dict[str, Tensor]:
    """Inner AdamW and torch's SGD on the weights of the round before."""
    model = Layers()
    optimizer = AdamW(model.parameters(), lr=0.01)
    anchors = [p.detach().clone() for p in model.parameters()]
    outer = SGD(anchors, lr=method.outer_lr, momentum=method.outer_momentum, nesterov=method.outer_momentum > 0)
    for step in range(1, steps + 1):
        train(model, optimizer, step - 1, 0)
        if step % method.every == 0:
            for anchor, parameter in zip(anchors, model.parameters()):
                anchor.grad = anchor - parameter.detach()
            outer.step()
            with torch.no_grad():
                for anchor, parameter in zip(anchors, model.parameters()):
                    parameter.copy_(anchor)
    return weights(model)


@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (0.9, 0.8), (0.5, 0.0)])
def test_the_outer_step_is_that_of_torchs_sgd_bit_for_bit(lr: float, momentum: float) -> None:
    """With momentum 0 and lr below 1, that is Lookahead."""
    method = tw.DiLoCo(every=4, outer_lr=lr, outer_momentum=momentum)
    assert bits(run(method)["agreed"]) == bits(outer_by_hand(method, STEPS))


def test_alone_with_a_step_of_one_it_is_the_inner_optimizer() -> None:
    plain, model = run(tw.DiLoCo(every=5, outer_lr=1.0, outer_momentum=0.0)), Layers()
    optimizer = AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        train(model, optimizer, step, 0)
    assert apart(plain["finished"], weights(model)) < 1e-5


def test_any_optimizer_may_be_the_outer_one_and_schedulers_count_rounds() -> None:
    model = Layers()
    inner = AdamW(model.parameters(), lr=0.01)
    sync = tw.local_update(model, inner, tw.DiLoCo(every=4, outer=partial(torch.optim.Adam, lr=0.1)))
    schedule = torch.optim.lr_scheduler.ExponentialLR(sync.outer, gamma=0.5)
    rounds = 0
    for step in range(10):
        train(model, inner, step, 0)
        if sync.step():
            schedule.step()
            rounds += 1
    assert rounds == 2
    assert sync.outer.param_groups[0]["lr"] == 0.025
    assert loss(model, 99, 0).item() < 10
