"""`thinwire bench fidelity --run DIR`: what encoding leaves of a run's own gradients, layer by layer.

For every checkpoint of the run (`--checkpoint.every` says how many there are) the gradients of the step that
followed it are computed once more, on one process, and encoded and decoded in three ways: as they are, in
Hadamard coordinates, and in GIFT coordinates that were fitted to other batches at the same weights. Errors are
|decoded - gradient| / |gradient|. GIFT selects layers as in training, each time by the gradient of a batch that
its coordinates were not fitted to yet; the others stay as they are. In training the coordinates are up to a
refresh old, and fitted to one rank's share of a batch: there the error is somewhat larger.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from thinwire import formats
from thinwire.data_parallel.inputs import InputWatch
from thinwire.formats import Format
from thinwire.geometry import GIFT, BoundGeometry, Geometry, Hadamard, Place, Shapes
from thinwire.reducers.round_trip import round_trip
from thinwire.train.arguments import read_toml
from thinwire.train.checkpoint.export import model_tensors
from thinwire.train.checkpoint.manifest import CheckpointError, Damaged, Manifest, checkpoints_in
from thinwire.train.config import ConfigError, TrainConfig
from thinwire.train.data.sampler import GlobalSampler
from thinwire.train.data.samples import DataError, TokenData, build_data
from thinwire.train.model import Vocabulary, build_model
from thinwire.train.output import CONFIG, checkpoints
from thinwire.train.run import count_targets, summed_loss
from thinwire.usage import Parser, whole_number

DEFAULT_FORMATS = "fp8_e5m2_span,fp8_e4m3,nvfp4,int4,int4_span"
BATCHES = 4
"""Batches that GIFT's coordinates are fitted to: those after the one that is measured."""


@dataclass(frozen=True)
class Row:
    """One layer, format and step."""

    step: int
    layer: str
    format: str
    error_euclidean: float
    error_hadamard: float
    error_gift: float
    selected: bool
    """Whether GIFT takes the layer."""


@dataclass(frozen=True)
class Backward:
    """What one batch gave: gradients of matrices, (rows, columns), and their layers' inputs, (tokens, columns)."""

    gradients: Mapping[str, Tensor]
    inputs: Mapping[str, Tensor]


def main(argv: list[str]) -> int:
    """Measure, print; returns the exit code."""
    arguments = _parse(argv)
    gift = GIFT(
        rank=arguments.rank,
        power=arguments.power,
        statistic=arguments.statistic,
        sides=arguments.sides,
        damping=arguments.damping,
        refresh_every=1,
    )
    try:
        rows = []
        for step, batches in run_batches(arguments.run, arguments.steps):
            rows += measure(step, batches, arguments.formats, gift)
            if not arguments.json:
                print(table(rows, step), flush=True)
    except (ConfigError, CheckpointError, Damaged, DataError, OSError) as error:
        print(f"thinwire bench fidelity: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    if arguments.json:
        print(json.dumps({"rows": [asdict(row) for row in rows]}))
    return 0


def measure(step: int, batches: Sequence[Backward], names: Sequence[str], gift: GIFT) -> list[Row]:
    """Rows for the gradients of the first batch; GIFT is fitted to the others."""
    fresh, *others = batches
    shapes: Shapes = {name: (g.shape[0], g.shape[1]) for name, g in fresh.gradients.items()}
    rows = []
    for name in names:
        format = formats.get(name)
        turned = _bound(Hadamard(), shapes, format)
        fitted = _bound(gift, shapes, format)
        for reduction, batch in enumerate(others, 1):
            for layer, observer in fitted.observers(reduction).items():
                if layer in batch.inputs:
                    observer(batch.inputs[layer])
            fitted.open(reduction)
            for layer, gradient in batch.gradients.items():
                fitted.see(layer, gradient)
            payload = fitted.payload()
            assert payload is not None
            fitted.install(payload[None], lambda layer, change: None)
        for layer, gradient in fresh.gradients.items():
            plain, hadamard, gift_error = (
                _error(format, gradient, layer, geometry) for geometry in (None, turned, fitted)
            )
            rows.append(Row(step, layer, name, plain, hadamard, gift_error, layer in fitted.names))
    return rows


def run_batches(run: Path, steps: Sequence[int] | None) -> Iterator[tuple[int, list[Backward]]]:
    """Per checkpoint its step, the batch that followed it and BATCHES more."""
    if not (run / CONFIG).is_file():
        raise ConfigError(f"--run: {run} is not the directory of a run: it has no {CONFIG}")
    config = read_toml(run / CONFIG)
    train_data, _ = build_data(config.data, seed=config.seed)
    tokenizer = train_data.tokenizer
    vocabulary = Vocabulary(tokenizer.vocab_size, tokenizer.eos_id, tokenizer.pad_id)
    model = build_model(config.model, vocabulary, seed=config.seed)
    found = {Manifest.read(path).step: path for path in checkpoints_in(checkpoints(run))}
    missing = [step for step in steps or () if step not in found]
    if missing or not found:
        there = ", ".join(map(str, sorted(found))) or "none"
        raise ConfigError(f"--steps: {run} has no checkpoint of step {missing or 'any'}; there are {there}")
    for step in sorted(steps or found):
        manifest = Manifest.read(found[step])
        manifest.verify(found[step])
        model.load_state_dict(model_tensors(found[step], manifest), strict=False)  # tied ones follow
        position = int(manifest.numbers["position"])
        yield step, [_backward(model, config, train_data, position, n) for n in range(1 + BATCHES)]


def table(rows: Sequence[Row], step: int) -> str:
    """The layers of one step, and means of the errors relative to plain encoding."""
    width = max(len(row.layer) for row in rows)
    lines = [f"step {step}", f"{'':{width}}  {'format':14} {'plain':>8} {'hadamard':>9} {'gift':>8}"]
    here = [row for row in rows if row.step == step]
    lines += [
        f"{row.layer:{width}}  {row.format:14} {row.error_euclidean:8.4f} {row.error_hadamard:9.4f}"
        f" {row.error_gift:8.4f}{'' if row.selected else ' not selected'}"
        for row in here
    ]
    for name in dict.fromkeys(row.format for row in here):
        own = [row for row in here if row.format == name]
        taken = [row for row in own if row.selected]
        for label, some in (("all", own), ("selected", taken)):
            if some:
                hadamard = statistics.mean(row.error_hadamard / row.error_euclidean for row in some)
                gift = statistics.mean(row.error_gift / row.error_euclidean for row in some)
                label = f"ratio to plain, {label} {len(some)}"
                lines.append(f"{label:{width}}  {name:14} {1:8.4f} {hadamard:9.4f} {gift:8.4f}")
    return "\n".join(lines)


def _bound(geometry: Geometry, shapes: Shapes, format: Format) -> BoundGeometry:
    place = Place(0, 1, torch.device("cpu"), lambda matrix: round_trip(format, matrix.contiguous()))
    return geometry.bind(shapes, place)


def _error(format: Format, gradient: Tensor, layer: str, geometry: BoundGeometry | None) -> float:
    if geometry is None or layer not in geometry.names:
        decoded = round_trip(format, gradient)
    else:
        decoded = geometry.inverse(layer, round_trip(format, geometry.forward(layer, gradient)))
    return float((decoded - gradient).norm() / gradient.norm())


def _backward(model: nn.Module, config: TrainConfig, data: TokenData, position: int, number: int) -> Backward:
    """Of batch `number` from `position` on: every matrix that has a gradient which is not zero."""
    sampler = GlobalSampler(data.num_sequences, config.seed)
    batch = data.batch(sampler.take(position + number * config.batch_size, config.batch_size))
    inputs: dict[str, Tensor] = {}
    names = [name for name, parameter in model.named_parameters() if parameter.dim() >= 2]
    watch = InputWatch(model, lambda: {name: partial(inputs.__setitem__, name) for name in names}, prefix="")
    model.zero_grad()
    (summed_loss(model, batch) / max(1, count_targets(batch))).backward()
    watch.remove()
    gradients = {
        name: parameter.grad.reshape(len(parameter), -1).clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and parameter.dim() >= 2 and parameter.grad.any()
    }
    return Backward(gradients, inputs)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(prog="thinwire bench fidelity", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--run", type=Path, required=True, metavar="DIR", help="directory of a run with checkpoints"
    )
    parser.add_argument(
        "--steps", type=whole_number(0, 10**12), nargs="+", help="of these checkpoints (default all)"
    )
    parser.add_argument("--formats", default=DEFAULT_FORMATS, help=f"comma separated (default {DEFAULT_FORMATS})")
    parser.add_argument("--rank", type=whole_number(1, 4096), default=32, help="of GIFT (default 32)")
    parser.add_argument("--power", type=float, default=0.5, help="of GIFT, up to 1 (default 0.5)")
    parser.add_argument(
        "--statistic",
        choices=("gradient", "input"),
        default=GIFT.statistic,
        help=f"of GIFT (default {GIFT.statistic})",
    )
    parser.add_argument("--sides", choices=("right", "both"), default="both", help="of GIFT (default both)")
    parser.add_argument("--damping", type=float, help="of GIFT, 1e-4 to 1e4 (default: measured)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    arguments = parser.parse_args(argv)
    arguments.formats = arguments.formats.split(",")
    for key, check in (
        ("formats", lambda: [formats.get(name) for name in arguments.formats]),
        ("power", lambda: GIFT(power=arguments.power)),
        ("damping", lambda: GIFT(damping=arguments.damping)),
    ):
        try:
            check()
        except ValueError as error:
            parser.error(f"--{key}: {error}")
    return arguments
