import json

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks
from thinwire import recipes
from thinwire.collectives import Slot, Wire
from thinwire.recipes import table


def _sent_bytes() -> dict[str, tuple[int, float]]:
    """By recipe: those of the first reduction, in which no geometry is refreshed yet; and computed, with refreshes
    on average. Under local updates: of a round."""
    slots, found = table.example_slots(), {}
    for name in recipes.names():
        recipe = recipes.get(name)
        reducer, every = recipe.reducer, 1
        if recipe.method is not None:
            plan = recipe.method.plan(100)
            reducer, every = plan.reducer, plan.every
        assert reducer is not None
        wire = Wire()
        bound = reducer.bind(slots, wire)
        bound.begin()
        bound.all_reduce({slot.name: torch.ones(slot.shape) for slot in slots}).wait()
        computed = every * recipe.sent_bytes_per_step(slots, dist.get_world_size())
        found[name] = (wire.ledger.sent_bytes(), round(computed, 3))
        wire.close()
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_bytes_that_the_table_computes_are_the_bytes_sent(world_size: int) -> None:
    for found in run_ranks(_sent_bytes, world_size):
        for name, (sent, computed) in found.items():
            refreshes = computed - sent
            assert 0 < refreshes < 0.01 * sent if name.startswith("gift") else refreshes == 0, name


def test_an_unknown_recipe_is_answered_with_the_names() -> None:
    with pytest.raises(ValueError, match="unknown recipe 'fp9'; choose one of ddp, ddp-bf16, fp8, fp8-ef"):
        recipes.get("fp9")


def test_recipes_are_values_that_compare_and_print() -> None:
    assert recipes.get("fp8-ef") == recipes.get("fp8-ef")
    assert "Quantized(format='fp8_e4m3', feedback='error'" in repr(recipes.get("fp8-ef").reducer)


def test_the_table_as_json_has_a_row_per_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert table.main(["--json", "--workers", "4"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["name"] for row in rows] == list(recipes.names())
    bytes_of = {row["name"]: row["sent_bytes_per_param_per_step"] for row in rows}
    assert bytes_of["ddp"] == pytest.approx(2 * 3 / 4 * 4)
    assert bytes_of["fp8-ef"] / bytes_of["ddp"] < 0.26


def test_the_human_table_names_every_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert table.main([]) == 0
    out = capsys.readouterr().out
    assert all(name in out and recipes.get(name).not_for in out for name in recipes.names())


def test_bad_usage_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        table.main(["--workers", "0"])
    expected = "thinwire recipes: argument --workers: '0' is not a whole number from 1 to 1048576\n"
    assert capsys.readouterr().err == expected


def test_sent_bytes_of_one_rank_are_zero() -> None:
    for name in recipes.names():
        assert recipes.get(name).sent_bytes_per_step([Slot("w", (64, 64))], 1) == 0


def test_a_recipe_averages_gradients_or_weights() -> None:
    for recipe in map(recipes.get, recipes.names()):
        assert (recipe.reducer is None) == (recipe.method is not None)
