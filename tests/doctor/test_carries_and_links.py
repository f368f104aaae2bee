from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks
from thinwire.doctor import carries
from thinwire.doctor.carries import NEEDED, carried_dtypes
from thinwire.doctor.links import measure_links


def _carried() -> dict[str, dict[str, str]]:
    group = dist.group.WORLD
    assert group is not None
    return carried_dtypes(group, torch.device("cpu"))


def _carried_alone() -> dict[str, str]:
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return carried_dtypes(groups[dist.get_rank()], torch.device("cpu"))["send_recv"]


def _twice_as_much(trial: carries.Trial) -> bool:
    tensor = trial.content(trial.rank)
    dist.all_reduce(tensor, group=trial.group)
    return torch.equal(tensor, 2 * trial.total())


def _carried_with_a_wrong_sum() -> str:
    group = dist.group.WORLD
    assert group is not None
    trial = carries.Trial(group, group.rank(), group.size(), torch.float32, torch.device("cpu"))
    return carries._attempt(_twice_as_much, trial)


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_find_that_gloo_carries_what_training_needs(world_size: int) -> None:
    found = run_ranks(_carried, world_size)
    assert all(other == found[0] for other in found)
    assert all(found[0][collective][dtype] == "yes" for collective, dtype in NEEDED)
    assert found[0]["all_to_all"]["int16"] != "yes"
    assert found[0]["all_gather"]["float8_e4m3fn"] != "yes"
    assert found[0]["send_recv"]["float8_e4m3fn"] == "yes"


def test_wrong_content_is_not_called_carried() -> None:
    assert run_ranks(_carried_with_a_wrong_sum, 2) == ["wrong bytes arrive"] * 2


def test_one_rank_alone_says_that_it_needs_a_partner() -> None:
    assert set(run_ranks(_carried_alone, 2)[0].values()) == {"needs two ranks"}


def _links(pairs: int | None = None) -> list[dict[str, Any]]:
    from thinwire.doctor import links

    links.ENOUGH_SECONDS = 0.001
    if pairs is not None:
        links.ALL_PAIRS_UP_TO = pairs
    return measure_links()


def test_every_pair_is_measured_both_ways_and_known_to_all_ranks() -> None:
    found = run_ranks(_links, 3)
    assert found[0] == found[1] == found[2]
    pairs = {(link["source"], link["target"]) for link in found[0]}
    assert pairs == {(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)}
    assert all(link["latency_us"] > 0 and link["bandwidth_mbit"] > 0 for link in found[0])


def test_many_ranks_are_measured_in_a_ring() -> None:
    found = run_ranks(_links, 3, 2)
    assert [(link["source"], link["target"]) for link in found[0]] == [(0, 1), (1, 2), (2, 0)]
