"""`thinwire bench peers`: the same method in another library ends with the same weights."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from tests.support.ranks import run_ranks
from thinwire.bench import peers

BIT_FOR_BIT = {("diloco", "torchft"), ("streaming-diloco", "torchft"), ("pier", "thinwire, offload")}
ROUNDING = 1e-6


Weights = dict[tuple[str, str], list[float]]


def every_loop(folder: str) -> Weights:
    sys.path.append(str(Path(sys.prefix, "oracles")))  # see `make install`
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    os.environ.update(RANK=str(torch.distributed.get_rank()), WORLD_SIZE="2", LOCAL_RANK="0")
    return {pair: peers.train(peers.Job(*pair, 16, 4, 5, folder))[0].tolist() for pair in peers.LOOPS}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> list[Weights]:
    """Of each rank; under streaming DiLoCo they differ."""
    found: list[Weights] = run_ranks(every_loop, 2, str(tmp_path_factory.mktemp("peers")))
    return found


@pytest.mark.parametrize("pair", [pair for pair in peers.LOOPS if pair[1] != peers.OWN])
def test_the_same_method_elsewhere_ends_with_the_same_weights(
    weights: list[Weights], pair: tuple[str, str]
) -> None:
    for of_rank in weights:
        own, other = torch.tensor(of_rank[pair[0], peers.OWN]), torch.tensor(of_rank[pair])
        if pair in BIT_FOR_BIT:
            assert torch.equal(own, other)
        torch.testing.assert_close(own, other, rtol=0, atol=ROUNDING * float(own.abs().max()))


def test_methods_differ(weights: list[Weights]) -> None:
    own = [weights[0][method, peers.OWN] for method in peers.METHODS]
    assert len({tuple(values) for values in own}) == len(own)


def test_it_measures_what_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["post-local-sgd", "--width", "16", "--every", "4", "--rounds", "3", "--repeats", "1", "--json"]
    assert peers.main(arguments) == 0
    own, torchs = json.loads(capsys.readouterr().out)["rows"]
    assert (own["library"], torchs["library"]) == ("thinwire", "torch")
    assert own["difference"] == 0.0
    assert 0.0 <= torchs["difference"] < ROUNDING
    assert own["round_seconds"] > 0


def test_an_unknown_method_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        peers.main(["fedavg"])
    assert "unknown method 'fedavg'; choose of local-sgd, post-local-sgd, diloco" in capsys.readouterr().err
