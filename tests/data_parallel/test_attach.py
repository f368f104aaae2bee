"""What attach accepts, and what it refuses in a sentence, on every rank alike."""

from __future__ import annotations

import copy
import os
import pickle
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from tests.data_parallel.toys import FP8, bits, layers, train, vectors
from tests.support.ranks import run_ranks


class Named(nn.Module):
    """One linear layer under a name of choice, and more of them on request."""

    def __init__(self, name: str, more: int = 0) -> None:
        super().__init__()
        for child in (name, *(f"extra{i}" for i in range(more))):
            self.add_module(child, nn.Linear(4, 5))


def _refusals() -> dict[str, str]:
    first = dist.get_rank() == 0

    def second_attach() -> None:
        ddp = DDP(layers(4, 5))
        tw.attach(ddp, tw.Dense())
        tw.attach(ddp, tw.Dense())

    def foreign_hook() -> None:
        ddp = DDP(layers(4, 5))
        ddp.register_comm_hook(None, fp16_compress_hook)
        tw.attach(ddp, tw.Dense())

    def python_reducer() -> None:
        ddp = DDP(layers(4, 5))
        ddp._use_python_reducer = True
        tw.attach(ddp, tw.Dense())

    return {
        "names": _message(lambda: tw.attach(DDP(Named("left" if first else "right")), tw.Dense())),
        "reducers": _message(lambda: tw.attach(DDP(layers(4, 5)), tw.Dense() if first else FP8)),
        "second": _message(second_attach),
        "foreign": _message(foreign_hook),
        "python reducer": _message(python_reducer),
        "bare": _message(lambda: tw.attach(layers(4, 5), tw.Dense())),
        "FSDP1": _message(
            lambda: tw.attach(FullyShardedDataParallel(layers(4, 5), device_id=torch.device("cpu")), tw.Dense())
        ),
        "no reducer": _message(lambda: tw.attach(DDP(layers(4, 5)), "fp8")),  # type: ignore[arg-type]
    }


def _message(action: Any) -> str:
    try:
        action()
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _attached_again_and_again() -> list[tuple[int, int, int]]:
    """Threads of Python and of the process, and open files, after each round of attach, train and detach."""
    ddp = DDP(layers(20, 30, 8))
    counts = []
    for _ in range(4):
        link = tw.attach(ddp, tw.Routed(FP8, "*weight"))
        train(ddp, 2, batch=vectors)
        link.detach()
        link.detach()
        counts.append(tuple(len(os.listdir(f"/proc/self/{what}")) for what in ("task", "fd")))
    return [(threading.active_count(), *count) for count in counts]


def _copies() -> dict[str, bool]:
    """Copies of an attached model and of its DDP wrapper are plain, and can be attached in turn."""
    ddp = DDP(layers(20, 30, 8))
    tw.attach(ddp, tw.Dense())
    train(ddp, 2, batch=vectors)
    module = pickle.loads(pickle.dumps(ddp.module))
    again = copy.deepcopy(ddp)
    link = tw.attach(again, tw.Dense())
    for model in (ddp, again):
        train(model, range(2, 4), batch=vectors)
    return {
        "pickled": bits(module) == bits(copy.deepcopy(module)) != bits(ddp.module),
        "attached": bits(again.module) == bits(ddp.module) and link.ledger.sent_bytes() > 0,
    }


def _two_ranks() -> dict[str, Any]:
    return {"refusals": _refusals(), "counts": _attached_again_and_again(), "copies": _copies()}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(_two_ranks, 2)


@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        ("names", "ValueError", "parameter 0 is 'left.weight torch.float32 (5, 4)' on rank 0 and 'right.weight"),
        ("reducers", "ValueError", "different reducers: 'Dense()' on rank 0 and \"Quantized("),
        ("second", "ValueError", "has a link already: call its detach()"),
        ("foreign", "ValueError", "has a communication hook already"),
        ("python reducer", "ValueError", "optimize_ddp = 'python_reducer'"),
        ("bare", "TypeError", "in a world of 2 ranks, got Layers: wrap it first"),
        ("FSDP1", "TypeError", "attach does not know FullyShardedDataParallel: shard with fully_shard"),
        ("no reducer", "TypeError", "attach needs a reducer such as tw.Quantized"),
    ],
)
def test_what_attach_refuses_it_refuses_in_a_sentence_on_every_rank(
    ranks: list[dict[str, Any]], what: str, error: str, message: str
) -> None:
    for rank in ranks:
        assert rank["refusals"][what].startswith(f"{error}: "), rank["refusals"][what]
        assert message in rank["refusals"][what]


def test_attaching_again_and_again_uses_no_more_threads_and_sockets(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        threads, tasks, files = zip(*rank["counts"])
        assert set(threads) == {1}
        assert max(tasks) <= tasks[0] + 2
        assert max(files) <= files[0] + 2


def test_copies_of_an_attached_model_are_plain_and_can_be_attached(ranks: list[dict[str, Any]]) -> None:
    assert [rank["copies"] for rank in ranks] == [{"pickled": True, "attached": True}] * 2


def _ranks_with_one_layer_too_many() -> str:
    ddp = DDP(Named("same"))
    if dist.get_rank() == 2:  # after DDP's own check of shapes
        ddp.module.add_module("other", nn.Linear(4, 5))
    return _message(lambda: tw.attach(ddp, FP8))


def test_of_three_ranks_the_one_with_another_model_is_named() -> None:
    messages = run_ranks(_ranks_with_one_layer_too_many, 3)
    assert len(set(messages)) == 1
    assert "parameter 2 is absent on rank 0 and 'other.weight torch.float32 (5, 4)' on rank 2" in messages[0]


def test_wrappers_do_not_show_in_the_names_and_children_called_as_they_like_do() -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = torch.compile(nn.Linear(4, 5))
            self.my_orig_mod = checkpoint_wrapper(torch.compile(nn.Linear(4, 5, bias=False)))

    link = tw.attach(Parent(), tw.Dense())
    assert [slot.name for slot in link.slots] == ["module.weight", "module.bias", "my_orig_mod.weight"]


def test_without_a_process_group_any_module_is_a_world_of_one_rank() -> None:
    plain, attached = layers(20, 30, 8), layers(20, 30, 8)
    link = tw.attach(attached, FP8)
    for model in (plain, attached):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            optimizer.zero_grad()
            x = torch.randn(4, 20, generator=torch.Generator().manual_seed(step))
            model(x).square().mean().backward()
            optimizer.step()
    link.verify(every=1)
    assert bits(plain) == bits(attached)
    assert link.world_size == 1
    assert link.ledger.sent_bytes() == link.ledger.sent_bytes(control=True) == 0
    assert link.control_all_reduce(torch.ones(2)).tolist() == [1.0, 1.0]
    link.load_state_dict(link.state_dict())
    link.detach()
