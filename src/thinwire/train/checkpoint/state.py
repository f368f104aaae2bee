"""What a run is at a step boundary, as one flat dictionary of tensors and one of numbers.

    model.<parameter or buffer>              shared by all ranks, saved once; tied ones under their first name
    optimizer.<kind>.<parameter>             likewise, e.g. optimizer.exp_avg.lm_head.weight
    link.<name>                              differs between ranks: (R, *shape), row r is rank r's
    rng.torch, rng.python, rng.cuda          likewise

Under local updates the ranks' weights and optimizers differ within a round:

    model.<parameter or buffer>              those agreed on last
    own.<parameter or buffer>                (R, *shape), each rank's
    optimizer.<kind>.<parameter>             (R, *shape), each rank's

Under a key that all ranks share, torch.distributed.checkpoint keeps one rank's tensor; so what differs
between ranks is a DTensor, sharded over a leading rank dimension. Everything that is not a tensor goes into JSON.

On another number of ranks the error memories are added up and shared out equally. They are in units of the
mean (each rank divides before it sums), so what is still owed is their sum, and the sum is what is kept:
each of W' ranks gets 1/W' of it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from thinwire.data_parallel.parameters import plain_name
from thinwire.local_update import LocalUpdate
from thinwire.train.checkpoint import generators, optimizer_state
from thinwire.train.checkpoint.manifest import JSON, CheckpointError
from thinwire.train.checkpoint.ranks import Ranks
from thinwire.train.checkpoint.saved import Saved, json_value

logger = logging.getLogger(__name__)

_RESIDUAL = "residual."  # in the key of an error memory, which is a rank's own, and
_SAME = ("geometry.", "same.")  # of coordinates and factors, which all ranks hold alike
_PLACE = ("rank", "world_size")  # whose state it is: known where it is loaded
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)
_UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
_STORABLE = frozenset((*_FLOATS, *_SIGNED, *_UNSIGNED, torch.complex64))  # what safetensors can read back
_READ_AT_ONCE = 256 << 20  # bytes of the old ranks' error memory held while they are added up


class Bound(Protocol):
    """Whatever holds per-rank communication state: the link of `tw.attach`, or what `tw.local_update` returns."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass
class TrainState:
    """Everything that a checkpoint holds. Only meaningful at a step boundary (after `optimizer.step()`).

    The random generators of this process (torch CPU, this rank's CUDA device, Python's `random`) are part
    of it without being a field. `numbers` is read by every save and updated in place by a load; its values
    must be the same on all ranks (plain JSON: step, position, tokens, skipped_steps, ...).
    """

    model: nn.Module  # the bare model; the wrappers of DDP and torch.compile are looked through
    optimizer: Optimizer | Sequence[Optimizer]
    link: Bound | None = None
    numbers: dict[str, JSON] = field(default_factory=dict)
    seed: int = 0  # with rank and step, reseeds the generators when the world size has changed

    @property
    def local_update(self) -> LocalUpdate | None:
        """What averages the ranks' weights now and then, if they differ."""
        return self.link if isinstance(self.link, LocalUpdate) else None

    @property
    def optimizers(self) -> list[Optimizer]:
        return [self.optimizer] if isinstance(self.optimizer, Optimizer) else list(self.optimizer)


def collect(state: TrainState, ranks: Ranks) -> tuple[dict[str, Tensor], dict[str, JSON]]:
    """The state as (tensors, numbers). Tensors may share memory with the live ones: copy before going on."""
    link_tensors, link_numbers = _link_state(state.link)
    own = link_tensors | generators.collect()
    optimizer_tensors, optimizer_numbers = optimizer_state.collect(state.optimizers, _names(state.model))
    if state.local_update is None:
        tensors = model_tensors(state.model) | optimizer_tensors
    else:
        own |= optimizer_tensors | _own_tensors(state.model)
        with state.local_update.agreed():
            tensors = {key: tensor.clone() for key, tensor in model_tensors(state.model).items()}
    tensors |= {key: ranks.stacked(local) for key, local in own.items()}
    for key, tensor in tensors.items():
        if tensor.dtype not in _STORABLE:
            raise CheckpointError(f"{key} is {tensor.dtype}, which the safetensors storage cannot hold")
    numbers = {"optimizer": optimizer_numbers, "link": link_numbers}
    return {key: _compact(tensor) for key, tensor in tensors.items()}, numbers


def restore(state: TrainState, saved: Saved, ranks: Ranks) -> None:
    """Fill `state` from a checkpoint, bit for bit. Whatever could differ is compared before it is changed."""
    if state.local_update is not None:
        _restore_differing(state, saved, ranks)
        return
    same_size = saved.world_size == ranks.size
    tensors = model_tensors(state.model)
    saved.compare("model.", {key: (tensor.shape, tensor.dtype) for key, tensor in tensors.items()})
    names = _names(state.model)
    optimizer_targets = optimizer_state.targets(saved, state.optimizers, names)
    link_tensors, _ = _link_state(state.link)
    rows = {key: torch.zeros_like(local, device="cpu") for key, local in link_tensors.items()}
    _check_link(saved, rows, ranks)

    tensors |= {key: target.tensor for key, target in optimizer_targets.items()}
    if same_size:
        shapes = {key: saved.index[key] for key in saved.index if key.startswith("rng.")}
        rows |= {key: torch.zeros(shape[1:], dtype=dtype) for key, (shape, dtype) in shapes.items()}
        tensors |= {key: ranks.stacked(row) for key, row in rows.items()}
    saved.read(tensors)

    if same_size:
        rows = {key: _own_row(tensors[key]) for key in rows}
        generators.restore(rows)
    else:
        _share_out(saved, rows, ranks)
        generators.reseed(state.seed, ranks.rank, saved.step)
    optimizer_state.restore(saved, state.optimizers, names, optimizer_targets)
    if state.link is not None:
        own = state.link.state_dict()
        numbers = {**saved.state["link"], **{place: own[place] for place in _PLACE if place in own}}
        state.link.load_state_dict(_placed(numbers, own, rows))


def _restore_differing(state: TrainState, saved: Saved, ranks: Ranks) -> None:
    """As `restore`, where each rank has weights and optimizers of its own. What a bound method keeps depends on
    where in a round it was, so its keys are those that were saved."""
    if saved.world_size != ranks.size:
        raise CheckpointError(
            f"{saved.name} was saved on {saved.world_size} ranks, now {ranks.size}: under local updates every "
            "rank has weights of its own, so the run goes on with as many"
        )
    model = _own_tensors(state.model)
    saved.compare("own.", {key: ((ranks.size, *tensor.shape), tensor.dtype) for key, tensor in model.items()})
    names = _names(state.model)
    rows = {
        key: torch.zeros(shape[1:], dtype=dtype)
        for key, (shape, dtype) in saved.index.items()
        if not key.startswith("model.")
    }
    own = replace(saved, index={key: (row.shape, row.dtype) for key, row in rows.items()})
    targets = optimizer_state.targets(own, state.optimizers, names)
    stacked = {key: ranks.stacked(row) for key, row in rows.items()}
    saved.read(stacked)
    rows = {key: _own_row(tensor) for key, tensor in stacked.items()}
    with torch.no_grad():
        for key, tensor in (model | {key: target.tensor for key, target in targets.items()}).items():
            tensor.copy_(rows[key])
    generators.restore({key: row for key, row in rows.items() if key.startswith("rng.")})
    optimizer_state.restore(saved, state.optimizers, names, targets)
    assert state.link is not None
    present = state.link.state_dict()
    places = {key: present[key] for key in present if key.rpartition(".")[2] in _PLACE}
    numbers = {**saved.state["link"], **places}
    tensors = {key.removeprefix("link."): row for key, row in rows.items() if key.startswith("link.")}
    state.link.load_state_dict({**numbers, **tensors})


# -- model -------------------------------------------------------------------------------------------------


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel and torch.compile."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers; a tensor with several names (tied weights) once, under the first."""
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in unwrapped(model).state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise CheckpointError(f"model state {name!r} is a {type(value).__name__}; only tensors can be saved")
        if id(value) not in seen:
            seen.add(id(value))
            tensors[f"model.{plain_name(name)}"] = value.detach()
    return tensors


def _own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """As `model_tensors`, of this rank."""
    return {f"own.{key.removeprefix('model.')}": tensor for key, tensor in model_tensors(model).items()}


def _names(model: nn.Module) -> dict[int, str]:
    return {id(parameter): plain_name(name) for name, parameter in unwrapped(model).named_parameters()}


# -- link --------------------------------------------------------------------------------------------------


def _link_state(link: Bound | None) -> tuple[dict[str, Tensor], dict[str, JSON]]:
    """(tensors under `link.<dotted name>`, the rest in its own nesting)."""
    content = dict(link.state_dict()) if link is not None else {}
    for place in _PLACE:
        content.pop(place, None)
    return dict(_leaves("link.", content)), json_value("link", _without_tensors(content))


def _leaves(prefix: str, content: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for name, value in content.items():
        if isinstance(value, Tensor):
            yield prefix + name, value.detach()
        elif isinstance(value, Mapping):
            yield from _leaves(f"{prefix}{name}.", value)


def _without_tensors(content: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _without_tensors(value) if isinstance(value, Mapping) else value
        for name, value in content.items()
        if not isinstance(value, Tensor)
    }


def _placed(
    numbers: Mapping[str, JSON],
    template: Mapping[str, Any],
    rows: Mapping[str, Tensor],
    prefix: str = "link.",
) -> dict[str, Any]:
    """The link's state as it was saved: the saved numbers, and `rows` where `template` has tensors."""
    content = dict(numbers)
    for name, value in template.items():
        if isinstance(value, Tensor):
            content[name] = rows[prefix + name]
        elif isinstance(value, Mapping):
            content[name] = _placed(content.get(name, {}), value, rows, f"{prefix}{name}.")
    return content


def _check_link(saved: Saved, rows: Mapping[str, Tensor], ranks: Ranks) -> None:
    if saved.world_size == ranks.size:
        saved.compare("link.", {key: ((ranks.size, *row.shape), row.dtype) for key, row in rows.items()})
        return
    for key, (shape, dtype) in saved.index.items():
        if key.startswith("link."):
            if _kind(key) is None:
                raise CheckpointError(
                    f"{saved.name} was saved on {saved.world_size} ranks, now {ranks.size}, "
                    f"and {key} cannot be split anew"
                )
            if key in rows and (shape[1:], dtype) != (rows[key].shape, rows[key].dtype):
                saved.compare(key, {key: ((saved.world_size, *rows[key].shape), rows[key].dtype)})


def _kind(key: str) -> str | None:
    """Which of the marks a key of the link has: the first, as what follows may be any parameter's name."""
    marks = [mark for mark in (_RESIDUAL, *_SAME) if mark in key]
    return min(marks, key=key.index, default=None)


def _share_out(saved: Saved, rows: dict[str, Tensor], ranks: Ranks) -> None:
    """Set every error memory to 1/W' of the sum over the ranks that saved it, added in their order, and the
    coordinates that it is in."""
    kept = [key for key in saved.index if key.startswith("link.") and key in rows]
    lost = [key for key in saved.index if key.startswith("link.") and key not in rows]
    batch: dict[str, Tensor] = {}
    for key in kept:
        shape, dtype = saved.index[key]
        batch[key] = torch.empty(shape, dtype=dtype)
        if key == kept[-1] or sum(tensor.nbytes for tensor in batch.values()) >= _READ_AT_ONCE:
            saved.read(batch)
            for name, old in batch.items():
                if _kind(name) in _SAME:
                    rows[name].copy_(old[0])
                    continue
                for row in old:
                    rows[name] += row
                rows[name] /= ranks.size
            batch.clear()
    if ranks.rank == 0:
        logger.warning(
            "%s was saved on %d ranks, now %d: the error memory of %d tensors is added up and shared out "
            "equally, the random generators are seeded anew from seed, rank and step",
            saved.name,
            saved.world_size,
            ranks.size,
            sum(_kind(key) == _RESIDUAL for key in kept),
        )
        if lost:
            logger.warning("%s: no place here for %s, dropped", saved.name, ", ".join(lost))


# -- tensors -----------------------------------------------------------------------------------------------


def _compact(tensor: Tensor) -> Tensor:
    """The tensor, contiguous and alone in its storage: a view would drag the whole buffer into the copy."""
    if isinstance(tensor, DTensor):
        local = _compact(tensor.to_local())
        mesh, placements = tensor.device_mesh, tensor.placements
        shape, stride = tensor.shape, _contiguous_stride(tensor.shape)
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
    tensor = tensor.contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _contiguous_stride(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _own_row(stacked: Tensor) -> Tensor:
    return (stacked.to_local() if isinstance(stacked, DTensor) else stacked)[0]
