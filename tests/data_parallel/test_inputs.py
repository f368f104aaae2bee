"""Geometries that want layer inputs are shown them: on refreshes only, without padding, once, compiled or not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import thinwire as tw
from tests.support.ranks import run_ranks
from thinwire.data_parallel.inputs import InputWatch
from thinwire.geometry.coordinates import unpacked

INPUT = tw.Quantized("nvfp4", feedback="error", geometry=tw.GIFT(rank=4, statistic="input", refresh_every=3))


class Attention(nn.Module):
    """q, k and v of one input; dropout; gate and up of another; padding is told by a mask that no layer sees."""

    def __init__(self, *, again: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(24, 24) for _ in range(3))
        self.drop = nn.Dropout(0.5)
        self.gate, self.up = nn.Linear(24, 40), nn.Linear(24, 40)
        self.down = nn.Linear(40, 24)
        self._again = again

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        if self._again:
            return checkpoint(self._layers, x, use_reentrant=False)  # type: ignore[no-any-return]
        return self._layers(x)

    def _layers(self, x: Tensor) -> Tensor:
        mixed = self.drop(self.q(x).tanh() * self.k(x) + self.v(x))
        return self.down(self.gate(mixed).tanh() * self.up(mixed))  # type: ignore[no-any-return]


def batch(step: int, rank: int = 0) -> Tensor:
    return torch.randn(3, 5, 24, generator=torch.Generator().manual_seed(100 * step + rank))


def watched(
    model: nn.Module, run: Callable[[nn.Module], object], names: tuple[str, ...] = ("q", "k", "v", "gate", "down")
) -> list[tuple[str, Tensor]]:
    """What an observer of these layers is shown while `run` uses the model."""
    seen: list[tuple[str, Tensor]] = []

    def observers() -> dict[str, Callable[[Tensor], None]]:
        return {f"{name}.weight": lambda rows, name=name: seen.append((name, rows)) for name in names}  # type: ignore[misc]

    watch = InputWatch(model, observers, prefix="")
    run(model)
    watch.remove()
    run(model)
    assert not any(module._forward_pre_hooks for module in model.modules())
    return seen


def test_layers_are_shown_in_order_as_rows_and_those_that_share_an_input_share_the_rows() -> None:
    seen = watched(Attention(), lambda model: model(batch(0)).sum().backward())
    assert [name for name, _ in seen] == ["q", "k", "v", "gate", "down"]
    rows = dict(seen)
    assert torch.equal(rows["q"], batch(0).view(15, 24))
    assert rows["q"] is rows["k"] is rows["v"]
    assert rows["gate"].shape == (15, 24)
    assert rows["down"].shape == (15, 40)


def test_padded_tokens_are_left_out() -> None:
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 0, 0, 0], [1, 1, 1, 0, 0]])
    seen = watched(Attention(), lambda model: model(batch(0), attention_mask=mask), ("q", "down"))
    assert [len(rows) for _, rows in seen] == [9, 9]
    assert torch.equal(seen[0][1], batch(0)[mask.bool()])


def test_a_mask_that_is_no_tensor_hides_nothing() -> None:
    mask = {"full_attention": torch.zeros(3, 5)}
    seen = watched(Attention(), lambda model: model(batch(0), attention_mask=mask), ("q",))
    assert [len(rows) for _, rows in seen] == [15]


class ByName(nn.Module):
    """A layer that gets its input by keyword, without a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.q(input=x[0, 0])  # type: ignore[no-any-return]


def test_an_input_may_be_given_by_keyword_and_be_one_vector() -> None:
    ((_, rows),) = watched(ByName(), lambda model: model(batch(0)), ("q",))
    assert torch.equal(rows, batch(0)[0, :1])


class OfItsOwn(nn.Linear):
    """A Linear that is called as its author likes."""

    def forward(self, hidden: Tensor, times: int = 1) -> Tensor:  # type: ignore[override]
        return super().forward(hidden[..., :24] * times)


class Calls(nn.Module):
    """The same layer by keyword, with a wider input, and as usual."""

    def __init__(self) -> None:
        super().__init__()
        self.q = OfItsOwn(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.q(hidden=x) + self.q(torch.cat([x, x], -1), 2) + self.q(2 * x)  # type: ignore[no-any-return]


def test_a_layer_that_is_called_with_something_else_is_passed_over() -> None:
    ((_, rows),) = watched(Calls(), lambda model: model(batch(0)), ("q",))
    assert torch.equal(rows, 2 * batch(0).view(15, 24))


def test_activation_checkpointing_shows_a_layer_once() -> None:
    seen = watched(Attention(again=True), lambda model: model(batch(0).requires_grad_()).sum().backward())
    assert [name for name, _ in seen] == ["q", "k", "v", "gate", "down"]


def test_passes_without_gradients_are_not_watched() -> None:
    def evaluate(model: nn.Module) -> None:
        with torch.no_grad():
            model(batch(0))

    assert watched(Attention(), evaluate) == []


def test_a_forward_pass_that_fails_leaves_no_hooks_behind() -> None:
    def fail(model: nn.Module) -> None:
        with pytest.raises(RuntimeError):
            model(torch.zeros(2, 7))

    watched(Attention(), fail)


class Counting(Attention):
    """Counts its passes, in place and in a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.tensor(0))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        self.passes += 1
        self.calls = self.calls + 1
        return super().forward(x, attention_mask)


@pytest.mark.slow
@pytest.mark.parametrize("inside", [False, True])
def test_a_compiled_model_is_shown_an_extra_pass_that_changes_nothing(inside: bool) -> None:
    model = Counting()

    def outputs(called: nn.Module) -> list[Tensor]:
        torch.manual_seed(3)
        return [called(batch(step)).detach() for step in range(2)]

    if inside:
        model.compile(backend="aot_eager")
        compiled: nn.Module = model
    else:
        compiled = torch.compile(model, backend="aot_eager")  # type: ignore[assignment]
    plain = outputs(compiled)
    results: list[list[Tensor]] = []
    seen = watched(compiled, lambda called: results.append(outputs(called)), ("q", "gate"))
    assert [name for name, _ in seen] == ["q", "gate"] * 2
    assert torch.equal(seen[0][1], batch(0).view(15, 24))
    assert all(torch.equal(a, b) for a, b in zip(plain, results[0]))
    assert model.passes.item() == model.calls.item() == 6  # twice plain, twice watched, twice after that


def trained(kind: str) -> dict[str, Any]:
    """Six steps with two micro-batches each; what the geometry was shown, and what it found."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    ddp = DDP(Attention(again=kind == "checkpointed"))
    whose: Literal["owner", "ranks"] = "ranks" if kind == "of ranks" else "owner"
    gift = tw.GIFT(rank=24, refresh_every=3, decay=0.0, statistics_of=whose)
    quantized = replace(INPUT, geometry=gift)
    link = tw.attach(ddp, tw.Routed(quantized, "*.weight") if kind != "after" else tw.After(2, quantized))
    shown = []
    inner = link.reducer
    for step in range(6):
        wanted = sorted(inner.observers)
        for n in range(2):
            with ddp.no_sync() if n == 0 else torch.enable_grad():
                ddp(batch(2 * step + n, rank)).square().mean().backward()
        shown.append(wanted)
        with torch.no_grad():
            for parameter in ddp.parameters():
                parameter -= 0.01 * parameter.grad
                parameter.grad = None
    link.verify()
    measured = {name: (f.error, f.plain_error) for name, f in link.fidelity.items()}
    (packed,) = (value for key, value in link.state_dict().items() if key.endswith("geometry.q.weight"))
    coordinates = unpacked(packed, [(24, 24), (24, 24)], gift.power)
    assert coordinates is not None
    side = coordinates.sides[0]
    moment = side.factor @ side.factor.T + side.rest.diag()
    link.detach()
    assert not ddp._forward_pre_hooks
    return {"shown": shown, "measured": measured, "moment": moment.tolist()}


def off(result: dict[str, Any], step: int, ranks: Iterable[int]) -> float:
    """How far the moment in use for q is from that of the inputs of this step's micro-batches on these ranks."""
    rows = torch.cat([batch(2 * step + n, rank).view(15, 24) for rank in ranks for n in range(2)])
    moment = rows.T @ rows
    return float((torch.tensor(result["moment"]) - moment / moment.diagonal().mean()).abs().max())


def test_statistics_of_inputs_are_gathered_on_refresh_reductions_only() -> None:
    """Refreshes at reductions 1, 2, 3, 4 (every 3 after the first, and at doubling distances) of 6."""
    for rank, result in enumerate(run_ranks(trained, 2, "plain")):
        wanted = [bool(names) for names in result["shown"]]
        assert wanted == [True, True, True, True, False, False], rank
        assert set(result["measured"]) == {f"{name}.weight" for name in ("q", "k", "v", "gate", "up", "down")}
        assert sorted(off(result, 3, [owner]) < 1e-4 for owner in range(2)) == [False, True]


def test_with_the_statistics_of_all_ranks_each_sees_the_inputs_of_every_layer() -> None:
    names = [f"{name}.weight" for name in ("down", "gate", "k", "q", "up", "v")]
    for result in run_ranks(trained, 2, "of ranks"):
        assert result["shown"] == [names] * 4 + [[]] * 2
        assert sorted(result["measured"]) == names
        assert off(result, 3, range(2)) < 1e-4


@pytest.mark.parametrize("kind", ["checkpointed", "after"])
def test_inputs_are_seen_under_checkpointing_and_after_a_warm_up(kind: str) -> None:
    for result in run_ranks(trained, 2, kind):
        wanted = [bool(names) for names in result["shown"]]
        assert wanted == ([False] * 2 + [True] * 4 if kind == "after" else [True] * 4 + [False] * 2)
        assert len(result["measured"]) == 6
        last = 5 if kind == "after" else 3  # reduction 4 of the geometry
        assert sorted(off(result, last, [owner]) < 1e-4 for owner in range(2)) == [False, True]


class Wide(nn.Module):
    """A layer whose moments are sketched, of inputs as well as of gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 1100), nn.Linear(1100, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())  # type: ignore[no-any-return]


def mixed(backward_too: bool) -> tuple[list[Tensor], int]:
    """The last of three means of a model that runs under autocast, and how many matrices were measured."""
    torch.manual_seed(0)
    ddp = DDP(Wide())
    link = tw.attach(ddp, INPUT)
    for step in range(3):
        ddp.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = ddp(batch(step, dist.get_rank())).float().square().mean()
            if backward_too:
                loss.backward()
        if not backward_too:
            loss.backward()
    measured = len(link.fidelity)
    link.detach()
    return [parameter.grad.clone() for parameter in ddp.parameters()], measured


def mixed_both_ways() -> bool:
    (outside, measured), (inside, _) = mixed(False), mixed(True)
    return measured == 2 and all(torch.equal(a, b) for a, b in zip(outside, inside))


def test_autocast_changes_what_the_model_computes_and_not_how_its_gradients_are_averaged() -> None:
    assert all(run_ranks(mixed_both_ways, 2))


def resumed_after_warm_up(at: int | None) -> list[Tensor]:
    """The means of step 5 with a warm-up of two reductions, saved and restored at a step."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Attention().eval()
    ddp = DDP(model)
    reducer = tw.After(2, INPUT, before=tw.Quantized("fp32"))
    link = tw.attach(ddp, reducer)
    for step in range(6):
        if step == at:
            state = link.state_dict()
            link.detach()
            link = tw.attach(ddp, reducer)
            link.load_state_dict(state)
        ddp.zero_grad()
        ddp(batch(step, rank)).square().mean().backward()
    link.detach()
    return [parameter.grad.clone() for parameter in ddp.parameters()]


def resumed_at_any_step() -> bool:
    straight = resumed_after_warm_up(None)
    return all(torch.equal(a, b) for at in range(1, 6) for a, b in zip(straight, resumed_after_warm_up(at)))


def test_a_run_resumed_past_its_warm_up_sees_the_inputs_of_the_next_reduction() -> None:
    assert all(run_ranks(resumed_at_any_step, 2))
