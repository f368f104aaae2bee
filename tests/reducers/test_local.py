"""Local: no averaging."""

from __future__ import annotations

import pytest
import torch

from tests.reducers.gradients import bind, equal, gradients, plain, reduce
from tests.support.ranks import run_ranks
from thinwire.collectives import Slot
from thinwire.reducers import Local, Routed

SLOTS = (Slot("embed.weight", (64, 64)), Slot("block.bias", (60,)))


def local() -> int:
    bound, wire = bind(Local(), SLOTS)
    named = gradients(SLOTS, 0, wire.rank)
    before = plain(named)
    assert equal(plain(reduce(bound, named)), before)
    assert bound.replicas == "drift"
    assert Routed(Local(), "embed*").bind(SLOTS, wire).replicas == "drift"
    piece = {"block.bias": torch.zeros(20)}
    bound.reduce_scatter({"block.bias": named["block.bias"]}, piece).wait()
    assert torch.equal(piece["block.bias"], named["block.bias"][20 * wire.rank : 20 * wire.rank + 20])
    with pytest.raises(ValueError, match=r"the piece of 'block.bias' on rank . has 20 elements, got 19"):
        bound.reduce_scatter({"block.bias": named["block.bias"]}, {"block.bias": torch.zeros(19)})
    wire.close()
    return wire.ledger.sent_bytes()


def test_local_leaves_tensors_alone_and_sends_nothing() -> None:
    assert run_ranks(local, 3) == [0, 0, 0]
