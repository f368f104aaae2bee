"""GIFT: gradients in coordinates in which few bits suffice (arXiv 2607.07494), with options that go beyond it.

Every matrix has an *owner*, a rank that finds its coordinates, from its own data alone unless told otherwise: what
must be equal on all ranks is the geometry, not the statistic. On a refresh reduction the owner

    1. measures, on its own gradient, the error of a round trip through the format: without a geometry, and with
       the one in use under several dampings of each side; chooses the best, or none
    2. blends the second moment of its gradient's rows, or of its layer's inputs, into the one in use (with
       `statistics_of="ranks"` that of all ranks together)
    3. fits coordinates to it (`whitening.py`) and sends them to all ranks, which install them together:
       what was seen in reduction t takes effect at t+1

So damping and choice are measured on gradients that the coordinates were not fitted to. Refreshes come at
reductions 1, 2, 3, 5, 9, 17, ... (gradients change fast at first), then every `refresh_every`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from thinwire.geometry.coordinates import MatrixCoordinates, packed_size, unpacked
from thinwire.geometry.geometry import BoundGeometry, Fidelity, Observer, Place, Rebase, Shapes
from thinwire.geometry.measuring import DAMPINGS, measured
from thinwire.geometry.moments import Moment, new_moment, packed_moment_size
from thinwire.geometry.ownership import Portions, share_out
from thinwire.geometry.seen import Seen
from thinwire.geometry.whitening import whitening

Select: TypeAlias = Literal["auto", "all"] | tuple[str, ...] | Callable[[str], bool]

_NOT_MEASURED = Fidelity(float("nan"), float("nan"), float("nan"))
_FIRST_DAMPING = 1e-1  # until there is a measurement


@dataclass(frozen=True)
class GIFT:
    """Whitened coordinates of rank `rank` plus diagonal.

    Per refresh the owner of a matrix of n columns sends 4 ((rank + 1) n + rank + 1) bytes and a few to each
    other rank (all_gather), once more with n rows for both sides; with `statistics_of="ranks"` every rank
    first sends it the smaller of 2 n (n + 1) and 4 n (2 rank + 17) bytes (all_to_all). Each change of coordinates
    costs 4 rows n rank floating-point operations on every rank.
    """

    rank: int = 32
    """Leading directions that are scaled one by one."""
    power: float = 0.5
    """Of the second moment: 1/2 makes the error smallest, 1 is the paper's."""
    statistic: Literal["gradient", "input"] = "input"
    """Whose second moment: that of the gradient's rows, or of the layer's inputs (A of K-FAC, the paper's), seen
    by forward hooks on refresh reductions; matrices that are no Linear layer's take the gradient's."""
    statistics_of: Literal["owner", "ranks"] = "owner"
    """Whose data: "owner" that of the matrix's owner, which costs nothing on the wire; "ranks" the mean over all
    ranks."""
    sides: Literal["auto", "right", "both"] = "auto"
    """"right" changes the coordinates of each row; "both" also those of each column, by the second moment of the
    gradient's columns: for whole matrices only, not for shards of rows. "auto": "right" of a model that FSDP2
    shards, else "both"."""
    refresh_every: int = 50
    """Reductions between refreshes."""
    decay: float = 0.5
    """Weight of the second moment in use when a new one is blended in."""
    damping: float | None = None
    """Added to the diagonal, in units of its mean, 1e-4 to 1e4. None: chosen by measurement, for each side."""
    select: Select = "auto"
    """Which matrices: "auto" measures at every refresh, "all", a tuple of names and globs, or a predicate of the
    name."""
    freeze_after: int | None = None
    """Reductions after which nothing is refreshed any more."""

    def __post_init__(self) -> None:
        select, damping, freeze = self.select, self.damping, self.freeze_after
        for key, fine, what in [
            ("rank", _whole(self.rank, 1), "a whole number of at least 1"),
            ("power", _within(self.power, 0, 1) and self.power > 0, "a number above 0 and up to 1"),
            ("statistic", self.statistic in ("gradient", "input"), "'gradient' or 'input'"),
            ("statistics_of", self.statistics_of in ("owner", "ranks"), "'owner' or 'ranks'"),
            ("sides", self.sides in ("auto", "right", "both"), "'auto', 'right' or 'both'"),
            ("refresh_every", _whole(self.refresh_every, 1), "a whole number of at least 1"),
            ("decay", _within(self.decay, 0, 1) and self.decay < 1, "a number from 0 and below 1"),
            ("damping", damping is None or _within(damping, 1e-4, 1e4), "None or a number from 1e-4 to 1e4"),
            (
                "select",
                callable(select) or bool(isinstance(select, tuple) and select) or select in ("auto", "all"),
                "'auto', 'all', a tuple of names and globs, or a predicate of the name",
            ),
            # The second refresh is the first that measures what the first one found.
            ("freeze_after", freeze is None or _whole(freeze, 2), "None or a whole number of at least 2"),
        ]:
            if not fine:
                raise ValueError(f"GIFT {key} must be {what}, got {getattr(self, key)!r}")

    def bind(self, shapes: Shapes, place: Place) -> BoundGeometry:
        if isinstance(self.select, tuple):
            for pattern in self.select:
                if not any(fnmatchcase(name, pattern) for name in shapes):
                    raise ValueError(
                        f"GIFT select: no matrix is called {pattern!r}; there are {', '.join(shapes)}"
                    )
        if self.sides == "both" and place.shares_rows:
            raise ValueError("GIFT sides='both' mixes the rows of a matrix, which FSDP2 shards: leave sides out")
        return BoundGIFT(self, self._selected(shapes), place)

    def refresh_bytes(self, shapes: Shapes, world_size: int) -> int:
        """An all_gather of the largest payload every `refresh_every` reductions, and what goes to the owners."""
        if self.freeze_after is not None or world_size == 1 or not shapes:
            return 0
        place = Place(0, world_size, torch.device("cpu"), lambda matrix: matrix)
        bound = BoundGIFT(self, self._selected(shapes), place)
        return (world_size - 1) * 4 * (bound.payload_length + bound.statistics_length) // self.refresh_every

    def due(self, reduction: int) -> bool:
        """Whether reduction number `reduction`, from 1, refreshes."""
        if self.freeze_after is not None and reduction > self.freeze_after:
            return False
        past = reduction - 1
        early = past < self.refresh_every and past & (past - 1) == 0  # 0, 1, 2, 4, 8, ...
        return early or past % self.refresh_every == 0

    def _selected(self, shapes: Shapes) -> Shapes:
        return {name: shape for name, shape in shapes.items() if self._selects(name) and min(shape) > 1}

    def _selects(self, name: str) -> bool:
        if isinstance(self.select, tuple):
            return any(fnmatchcase(name, pattern) for pattern in self.select)
        return self.select(name) if callable(self.select) else True


class BoundGIFT:
    """The coordinates of all matrices, and the moments of those that this rank owns."""

    def __init__(self, config: GIFT, shapes: Shapes, place: Place) -> None:
        self._config = config
        self._place = place
        self._sides = config.sides if config.sides != "auto" else "right" if place.shares_rows else "both"
        self._lengths = {
            name: (columns, rows) if self._sides == "both" else (columns,)
            for name, (rows, columns) in shapes.items()
        }
        sizes = {name: self._size(name) for name in shapes}
        self._owners = share_out(sizes, place.world_size)
        self._payloads = Portions(self._owners, sizes, place.world_size)
        self._shared = config.statistics_of == "ranks" and place.world_size > 1
        seen = {name: 1 + sum(self._moment_sizes(name)) for name in shapes}
        self._statistics = Portions(self._owners, seen, place.world_size)
        self._coordinates: dict[str, MatrixCoordinates] = {}
        self._arriving: dict[str, Moment] = {}  # of layer inputs, on the way to the next reduction
        self._inputs: dict[str, Moment] = {}  # of those of the open one
        self._seen: dict[str, Seen] = {}
        self._measured: dict[str, MatrixCoordinates] = {}
        self._refreshing = False
        self._input: tuple[Tensor, Moment | None, Moment] | None = None
        """Of the layer before: its input, and what it had seen before and with it."""

    @property
    def names(self) -> frozenset[str]:
        return frozenset(name for name, coordinates in self._coordinates.items() if coordinates.active)

    @property
    def description(self) -> str:
        config = self._config
        return f"GIFT(rank={config.rank}, power={float(config.power)}, sides={self._sides!r})"

    @property
    def mixes_rows(self) -> bool:
        return self._sides == "both"

    @property
    def coordinates(self) -> Mapping[str, MatrixCoordinates]:
        """What is installed, by matrix."""
        return self._coordinates

    def forward(self, name: str, matrix: Tensor) -> Tensor:
        return self._coordinates[name].forward(matrix)

    def inverse(self, name: str, matrix: Tensor) -> Tensor:
        return self._coordinates[name].inverse(matrix)

    def open(self, reduction: int) -> None:
        self._refreshing = self._config.due(reduction)
        self._inputs, self._arriving, self._input = self._arriving, {}, None

    @property
    def fidelity(self) -> Mapping[str, Fidelity]:
        return {name: c.fidelity for name, c in self._coordinates.items() if c.fidelity.error == c.fidelity.error}

    def observers(self, reduction: int) -> Mapping[str, Observer]:
        if self._config.statistic == "gradient" or not self._config.due(reduction):
            return {}
        return {name: partial(self._observe, name) for name in self._owners if self._shared or self._owns(name)}

    def see(self, name: str, gradient: Tensor) -> None:
        if not self._refreshing or name not in self._owners or not (self._shared or self._owns(name)):
            return
        if name in self._coordinates and self._owns(name):
            damping = self._config.damping
            self._measured[name] = measured(
                self._coordinates[name],
                gradient,
                self._place.round_trip,
                dampings=DAMPINGS if damping is None else (damping,),
                may_reject=self._config.select == "auto",
            )
        inputs = self._inputs.get(name)
        first = self._moment_of(gradient) if inputs is None else inputs
        others = (self._moment_of(gradient.T),) if self.mixes_rows else ()
        self._seen[name] = Seen((first, *others), inputs is not None)

    def statistics(self) -> Tensor | None:
        if not (self._refreshing and self._shared):
            return None
        statistics = self._zeros(self._place.world_size, self.statistics_length)
        for owner, row in enumerate(statistics):
            for name, portion in self._statistics.of(owner):
                if owner != self._place.rank and name in self._seen:
                    row[portion] = self._seen[name].packed()
        return statistics

    def combine(self, statistics: Tensor) -> None:
        for name, portion in self._statistics.of(self._place.rank):
            for packed in statistics[:, portion]:
                if name in self._seen:
                    empty = partial(self._new, self._lengths[name][0])
                    self._seen[name] = self._seen[name].plus(packed, self._moment_sizes(name), empty)

    def payload(self) -> Tensor | None:
        if not self._refreshing:
            return None
        payload = self._zeros(self.payload_length)
        for name, portion in self._payloads.of(self._place.rank):
            coordinates = self._refreshed(name)
            if coordinates is not None:
                payload[portion] = coordinates.packed()
        self._forget()
        return payload

    def install(self, payloads: Tensor, rebase: Rebase) -> None:
        self._refreshing = False
        for owner in range(self._place.world_size):
            for name, portion in self._payloads.of(owner):
                self._change(name, self._unpacked(name, payloads[owner, portion]), rebase)

    def state_dict(self) -> dict[str, Any]:
        return {
            f"geometry.{name}": self._coordinates[name].packed()
            if name in self._coordinates
            else self._zeros(self._size(name))
            for name in self._lengths
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saved = [key.removeprefix("geometry.") for key in state if key.startswith("geometry.")]
        if foreign := [name for name in saved if name not in self._lengths]:
            raise ValueError(f"the reducer state has coordinates for {foreign[0]!r}, which this GIFT leaves alone")
        for name in self._lengths:
            packed = state.get(f"geometry.{name}")
            if not isinstance(packed, Tensor) or packed.shape != (self._size(name),):
                raise ValueError(f"the reducer state has no coordinates for {name!r} that fit this GIFT")
        self._coordinates.clear()
        for name in self._lengths:
            coordinates = self._unpacked(name, state[f"geometry.{name}"].to(self._place.device, torch.float32))
            if coordinates is not None:
                self._coordinates[name] = coordinates
        self._forget()
        self._arriving.clear()
        self._input = None
        self._refreshing = False

    def memory_bytes(self) -> int:
        seen = [moment for each in self._seen.values() for moment in each.moments]
        moments = {id(moment): moment for moment in (*seen, *self._inputs.values(), *self._arriving.values())}
        installed = sum(4 * self._size(name) for name in self._coordinates)
        return installed + sum(moment.nbytes for moment in moments.values())

    # -- seeing --------------------------------------------------------------------------------------------

    def _observe(self, name: str, rows: Tensor) -> None:
        """Inputs of a layer (tokens, columns). Consecutive layers that get the very same ones, now as before (q, k
        and v; gate and up), share a moment."""
        earlier = self._arriving.get(name)
        if self._input is None or self._input[0] is not rows or self._input[1] is not earlier:
            moment = self._new(rows.shape[1]) if earlier is None else earlier
            self._input = (rows, earlier, moment.with_rows(rows))
        self._arriving[name] = self._input[2]

    def _new(self, n: int) -> Moment:
        return new_moment(n, self._rank(n), self._place.device, travels=self._shared)

    def _moment_of(self, rows: Tensor) -> Moment:
        return self._new(rows.shape[1]).with_rows(rows)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float32, device=self._place.device)

    def _forget(self) -> None:
        self._inputs.clear()
        self._seen.clear()
        self._measured.clear()

    # -- finding coordinates -------------------------------------------------------------------------------

    def _refreshed(self, name: str) -> MatrixCoordinates | None:
        """The next coordinates of an owned matrix: those in use where nothing was seen or nothing usable."""
        current = self._measured.get(name, self._coordinates.get(name))
        seen = self._seen.get(name)
        if seen is None:
            return current
        sides = []
        for index, moment in enumerate(seen.moments):
            earlier, damping = None, self._config.damping or _FIRST_DAMPING
            if current is not None:
                side = current.sides[index]
                earlier, damping = (side.factor, side.rest), side.damping
            split = moment.split(self._rank(self._lengths[name][index]), earlier, self._config.decay)
            if split is None:
                return current
            sides.append(whitening(*split, damping=damping, power=self._config.power))
        if current is None:
            return MatrixCoordinates(tuple(sides), active=True, fidelity=_NOT_MEASURED)
        return replace(current, sides=tuple(sides))

    def _change(self, name: str, new: MatrixCoordinates | None, rebase: Rebase) -> None:
        if new is None:
            return
        old = self._coordinates.get(name)
        self._coordinates[name] = new
        leave = old is not None and old.active
        if leave or new.active:

            def change(u: Tensor) -> Tensor:
                g = old.inverse(u) if old is not None and leave else u
                return new.forward(g) if new.active else g

            rebase(name, change)

    # -- payloads ------------------------------------------------------------------------------------------

    def _rank(self, n: int) -> int:
        return min(self._config.rank, n)

    def _ranks(self, name: str) -> list[tuple[int, int]]:
        """(length, rank) of each side."""
        return [(n, self._rank(n)) for n in self._lengths[name]]

    def _moment_sizes(self, name: str) -> list[int]:
        return [packed_moment_size(n, rank) for n, rank in self._ranks(name)]

    def _size(self, name: str) -> int:
        return packed_size(self._ranks(name))

    @property
    def payload_length(self) -> int:
        """Numbers in every rank's payload: as many as in the longest."""
        return self._payloads.length

    @property
    def statistics_length(self) -> int:
        """Numbers in a row of the statistics that ranks send each other."""
        return self._statistics.length if self._shared else 0

    def _owns(self, name: str) -> bool:
        return self._owners[name] == self._place.rank

    def _unpacked(self, name: str, packed: Tensor) -> MatrixCoordinates | None:
        return unpacked(packed, self._ranks(name), self._config.power)


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _within(value: object, least: float, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most
