"""torch.distributed.checkpoint with its safetensors storage: tensors of all ranks to files and back.

Nothing that it reads is unpickled (its default storage unpickles). Every rank copies and writes only its share:
its own rows of what differs between ranks, and an even part of what does not.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save
from torch.distributed.tensor import DTensor

from thinwire.train.checkpoint.manifest import CheckpointError, Manifest, sweep
from thinwire.train.checkpoint.ranks import Ranks, kind_and_line
from thinwire.train.checkpoint.saved import Saved

_FILE_BYTES = 512 << 20

# Without a process group torch says that it assumes a single process. So do we.
warnings.filterwarnings("ignore", "torch.distributed is (disabled|unavailable)", module="torch.distributed")


def write(tensors: Mapping[str, Tensor], directory: Path, ranks: Ranks) -> Future[Any]:
    """Copy this rank's share and write it to `directory` in the background. All ranks call this together.

    A failure of any rank is a `CheckpointException` on all, after every rank has stopped writing.
    """
    if ranks.rank == 0:
        sweep(directory.parent)
    _check_keys(tensors, ranks)  # and nobody makes the directory before rank 0 has swept
    upload = async_save(
        _share(tensors, ranks),
        storage_writer=HuggingFaceStorageWriter(str(directory), _files(tensors), save_distributed=True),
        planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        process_group=ranks.group,
        no_dist=ranks.group is None,
    )
    assert not isinstance(upload, AsyncSaveResponse)  # only from stagers that copy in the background
    return upload


def open_saved(directory: Path, manifest: Manifest, ranks: Ranks) -> Saved:
    """A verified checkpoint directory, to be read by these ranks together."""
    try:
        metadata = HuggingFaceStorageReader(str(directory)).read_metadata()
    except (SafetensorError, OSError, ValueError, TypeError, LookupError) as error:
        raise CheckpointError(
            f"{directory} has a file that this storage did not write: {kind_and_line(error)}"
        ) from error
    index = {
        key: (entry.size, entry.properties.dtype)
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }

    def read(tensors: dict[str, Tensor]) -> None:
        missing = sorted(set(tensors) - set(index))
        if missing:
            raise CheckpointError(f"{directory.name} does not hold {', '.join(missing[:5])}")
        try:
            load(
                tensors,
                storage_reader=HuggingFaceStorageReader(str(directory)),
                planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=ranks.group,
                no_dist=ranks.group is None,
            )
        except CheckpointException as error:
            raise CheckpointError(f"{directory} could not be read: {first_failure(error)}") from error

    return Saved(directory.name, manifest.step, manifest.world_size, index, manifest.state, read)


def _check_keys(tensors: Mapping[str, Tensor], ranks: Ranks) -> None:
    """The ranks share out the keys without talking about it, so they must have the same ones."""
    listings = ranks.all_gather([f"{key} {tuple(tensor.shape)}" for key, tensor in tensors.items()])
    for rank, listing in enumerate(listings):
        differing = sorted(set(listing) ^ set(listings[0]))
        if differing or listing != listings[0]:
            what = ", ".join(differing[:5]) or "their order"
            raise CheckpointError(f"rank {rank} and rank 0 do not have the same state to save: {what}")


def _share(tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """What this rank writes."""
    share: dict[str, Tensor] = {}
    filled = [0] * ranks.size
    for key, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            share[key] = tensor
            continue
        writer = filled.index(min(filled))
        filled[writer] += tensor.nbytes
        if writer == ranks.rank:
            share[key] = tensor
    return share


def _files(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """In which of each rank's files a key goes, from 1: the storage holds a whole file in memory (twice)."""
    files: dict[str, int] = {}
    number, filled = 1, 0
    for key, tensor in tensors.items():
        size = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes
        if filled and filled + size > _FILE_BYTES:
            number, filled = number + 1, 0
        files[key] = number
        filled += size
    return files


def first_failure(error: CheckpointException) -> str:
    """The rank and what it met, in one line."""
    rank, (cause, _) = min(error.failures.items())
    return f"rank {rank}: {kind_and_line(cause)}"
