"""Local SGD, post-local SGD, SlowMo and MuLoCo, beside what others and their papers' formulas compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import ExponentialLR

import thinwire as tw
from tests.local_update.toys import Layers, apart, bits, plain, train, weights
from tests.support.ranks import run_ranks

STEPS, EVERY = 24, 4


def run(method: Any, optimizers: Any = None, *, wrapped: bool = False) -> dict[str, list[float]]:
    """The weights after each step, of this rank."""
    model = Layers()
    module = DDP(model) if wrapped else model
    inner = [AdamW(model.parameters(), lr=0.01)] if optimizers is None else optimizers(model)
    sync = tw.local_update(module, inner, method)
    history = []
    for step in range(STEPS):
        one_step(module, inner, step)
        sync.step()
        history.append(weights(model))
    sync.close()
    return {"last": plain(history[-1]), "bits": [bits(now) for now in history]}  # type: ignore[dict-item]


def one_step(module: Any, optimizers: Any, step: int) -> None:
    for optimizer in optimizers[1:]:
        optimizer.zero_grad()
    train(module, optimizers[0], step, dist.get_rank())
    for optimizer in optimizers[1:]:
        optimizer.step()


def averaged_by_torch() -> dict[str, list[float]]:
    """PeriodicModelAverager, which averages the weights after steps 1, 5, 9, ... of its count."""
    model = Layers()
    optimizer = AdamW(model.parameters(), lr=0.01)
    averager = PeriodicModelAverager(period=EVERY, warmup_steps=EVERY - 1)
    for step in range(STEPS):
        train(model, optimizer, step, dist.get_rank())
        averager.average_parameters(model.parameters())
    return plain(weights(model))


def post_local_by_torch(start: int, subgroup: Any) -> dict[str, list[float]]:
    model = Layers()
    ddp = DDP(model)
    state = PostLocalSGDState(process_group=None, subgroup=subgroup, start_localSGD_iter=start)
    ddp.register_comm_hook(state, post_localSGD_hook)
    optimizer = AdamW(model.parameters(), lr=0.01)
    averager = PeriodicModelAverager(period=EVERY, warmup_steps=start - 1)
    for step in range(STEPS):
        train(ddp, optimizer, step, dist.get_rank())
        averager.average_parameters(model.parameters())
    return plain(weights(model))


def slow_momentum(slow_lr: float, beta: float, gamma: float) -> dict[str, Tensor]:
    """The paper's formulas on all ranks' weights, with an inner learning rate that falls."""
    world_size = dist.get_world_size()
    model = Layers()
    optimizer = SGD(model.parameters(), lr=0.1)
    schedule = ExponentialLR(optimizer, gamma)
    agreed = weights(model)
    slow = {name: torch.zeros_like(value) for name, value in agreed.items()}
    for step in range(1, STEPS + 1):
        train(model, optimizer, step - 1, dist.get_rank())
        if step % EVERY == 0:
            lr = optimizer.param_groups[0]["lr"]
            for name, parameter in model.named_parameters():
                mean = parameter.detach().clone()
                dist.all_reduce(mean)
                slow[name] = beta * slow[name] + (agreed[name] - mean / world_size) / lr
                agreed[name] = agreed[name] - slow_lr * lr * slow[name]
                parameter.data.copy_(agreed[name])
        schedule.step()
    return weights(model)


def slowmo(slow_lr: float, beta: float, gamma: float) -> dict[str, Tensor]:
    model = Layers()
    optimizer = SGD(model.parameters(), lr=0.1)
    schedule = ExponentialLR(optimizer, gamma)
    sync = tw.local_update(model, optimizer, tw.SlowMo(every=EVERY, slow_lr=slow_lr, slow_momentum=beta))
    for step in range(STEPS):
        train(model, optimizer, step, dist.get_rank())
        sync.step()
        schedule.step()
    sync.close()
    return weights(model)


def muon_and_adamw(model: Layers) -> list[torch.optim.Optimizer]:
    matrices = [layer.weight for layer in model.layers]
    rest = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    return [torch.optim.Muon(matrices, lr=0.02), AdamW(rest, lr=0.01)]


def several() -> dict[str, Any]:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    one = [dist.new_group([rank]) for rank in range(4)]
    rank = dist.get_rank()
    dense = tw.MuLoCo(every=EVERY, reducer=tw.Dense())
    return {
        "local SGD": run(tw.LocalSGD(every=EVERY)),
        "of torch": averaged_by_torch(),
        "post-local": run(tw.PostLocalSGD(start=8, every=EVERY, groups=2), wrapped=True)["last"],
        "post-local of torch": post_local_by_torch(8, pairs[rank // 2]),
        "post-local alone": run(tw.PostLocalSGD(start=8, every=EVERY), wrapped=True)["last"],
        "post-local of torch alone": post_local_by_torch(8, one[rank]),
        "slowmo": {
            settings: (plain(slowmo(*settings)), plain(slow_momentum(*settings)))
            for settings in ((1.0, 0.7, 1.0), (0.8, 0.6, 0.9))
        },
        "muloco": run(tw.MuLoCo(every=EVERY), muon_and_adamw),
        "muloco dense": run(dense, muon_and_adamw),
        "diloco": run(tw.DiLoCo(every=EVERY, outer_lr=0.9, outer_momentum=0.8), muon_and_adamw),
    }


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    return run_ranks(several, 4)


def test_local_sgd_is_the_periodic_averaging_of_torch(four: list[dict[str, Any]]) -> None:
    for found in four:
        assert apart(found["local SGD"]["last"], found["of torch"]) < 1e-5
        assert found["local SGD"]["bits"][-1] == four[0]["local SGD"]["bits"][-1]


@pytest.mark.parametrize("groups", ["", " alone"])
def test_post_local_sgd_is_that_of_torch(four: list[dict[str, Any]], groups: str) -> None:
    for found in four:
        assert apart(found[f"post-local{groups}"], found[f"post-local of torch{groups}"]) < 1e-5


@pytest.mark.parametrize("settings", [(1.0, 0.7, 1.0), (0.8, 0.6, 0.9)])
def test_slowmo_is_the_paper_s_formula_also_when_the_learning_rate_falls(
    four: list[dict[str, Any]], settings: tuple[float, float, float]
) -> None:
    for found in four:
        ours, formula = found["slowmo"][settings]
        assert apart(ours, formula) < 1e-5


def test_muloco_is_diloco_around_muon_and_owes_what_int4_leaves_out(four: list[dict[str, Any]]) -> None:
    for found in four:
        assert found["muloco dense"]["bits"] == found["diloco"]["bits"]
        assert found["muloco"]["bits"][-1] == four[0]["muloco"]["bits"][-1]
        assert 0 < apart(found["muloco"]["last"], found["muloco dense"]["last"]) < 0.2


def test_alone_they_send_nothing_and_local_sgd_changes_nothing() -> None:
    model, other = Layers(), Layers()
    optimizer, second = AdamW(model.parameters(), lr=0.01), AdamW(other.parameters(), lr=0.01)
    sync = tw.local_update(model, optimizer, tw.LocalSGD(every=3))
    for step in range(9):
        train(model, optimizer, step, 0)
        sync.step()
        train(other, second, step, 0)
    assert apart(weights(model), weights(other)) < 1e-6
    assert sync.ledger.sent_bytes() == 0


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: tw.PostLocalSGD(start=-1), "start must be a number of steps, or a fraction of the run's, got -1"),
        (lambda: tw.PostLocalSGD(start=5, groups=0), "groups must be at least 1, got 0"),
        (lambda: tw.LocalSGD(every=0), "every must be a whole number of at least 1, got 0"),
        (lambda: tw.SlowMo(slow_momentum=-0.5), "slow_momentum must be from 0 to less than 1, got -0.5"),
        (lambda: tw.DiLoCo(outer_lr=-1.0), "outer_lr must be a number of at least 0, got -1.0"),
        (lambda: tw.DiLoCo(outer_momentum=1.5), "outer_momentum must be from 0 to less than 1, got 1.5"),
    ],
)
def test_a_bad_setting_is_refused_with_its_name(make: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make()


def test_an_optimizer_with_a_closure_or_none_is_refused() -> None:
    model = Layers()
    with pytest.raises(ValueError, match="needs the optimizer that trains the model, got none"):
        tw.local_update(model, [], tw.LocalSGD())
    optimizer = SGD(model.parameters(), lr=0.1)
    sync = tw.local_update(model, optimizer, tw.PostLocalSGD(start=8))
    with pytest.raises(ValueError, match="closure makes cannot be averaged on a bare model"):
        optimizer.step(lambda: 0.0)
    sync.close()
    optimizer.step(lambda: 0.0)
