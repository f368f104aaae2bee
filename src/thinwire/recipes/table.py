"""`thinwire recipes`: the table of recipes, with bytes computed from the layout they would use."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from thinwire import recipes
from thinwire.collectives import Slot
from thinwire.recipes.recipe import Recipe
from thinwire.usage import Parser, whole_number

HIDDEN = 512
FEED_FORWARD = 1376


@dataclass(frozen=True)
class Row:
    """One recipe; the fields are the keys of `--json`."""

    name: str
    sent_bytes_per_param_per_step: float
    """Scales included, for the layer of `example_slots`."""
    paper: str


def example_slots() -> list[Slot]:
    """The parameters of one Llama layer, 512 wide: what the table counts bytes for."""
    shapes = {
        **{f"attention.{name}.weight": (HIDDEN, HIDDEN) for name in ("q", "k", "v", "o")},
        "mlp.gate.weight": (FEED_FORWARD, HIDDEN),
        "mlp.up.weight": (FEED_FORWARD, HIDDEN),
        "mlp.down.weight": (HIDDEN, FEED_FORWARD),
        "input_norm.weight": (HIDDEN,),
        "post_attention_norm.weight": (HIDDEN,),
    }
    return [Slot(name, shape) for name, shape in shapes.items()]


def rows(world_size: int) -> list[Row]:
    """A row per recipe."""
    return [_row(recipes.get(name), world_size) for name in recipes.names()]


def main(argv: list[str]) -> int:
    """Print the table; returns the exit code."""
    parser = Parser(prog="thinwire recipes", description="Methods by name, and what each sends.")
    parser.add_argument("--workers", type=whole_number(1, 2**20), default=2, metavar="W", help="ranks (default 2)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    arguments = parser.parse_args(argv)
    table = rows(arguments.workers)
    if arguments.json:
        print(json.dumps({"workers": arguments.workers, "rows": [asdict(row) for row in table]}))
        return 0
    width = max(len(row.name) for row in table)
    print(f"{'recipe':{width}}  bytes/param/step  over the wire  (source)")
    for row in table:
        recipe = recipes.get(row.name)
        print(f"{row.name:{width}}  {row.sent_bytes_per_param_per_step:16.3f}  {recipe.wire}  ({row.paper})")
        print(f"{'':{width}}  {'':16}  not for {recipe.not_for}")
    print(f"\nSent by each of {arguments.workers} ranks, for one Llama layer {HIDDEN} wide, scales included.")
    return 0


def _row(recipe: Recipe, world_size: int) -> Row:
    slots = example_slots()
    sent = recipe.sent_bytes_per_step(slots, world_size)
    return Row(recipe.name, sent / sum(slot.numel for slot in slots), recipe.paper)
