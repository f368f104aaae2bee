"""`thinwire export CKPT DIR`: a checkpoint as a plain Hugging Face model directory.

DIR gets config.json, model.safetensors and the tokenizer's files, and `AutoModelForCausalLM.from_pretrained`
loads it like any other model. CKPT is one checkpoint (step-00000060) or the directory of a run, of which the
newest complete checkpoint is taken. No process group, no GPU, and nothing in the checkpoint is executed.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from thinwire.train.checkpoint.manifest import JSON, MANIFEST, CheckpointError, Damaged, Manifest, checkpoints_in
from thinwire.train.checkpoint.ranks import Ranks, kind_and_line
from thinwire.train.checkpoint.storage import open_saved
from thinwire.train.data.samples import DataError
from thinwire.train.data.tokenizers import load_tokenizer

logger = logging.getLogger(__name__)


class UsageError(ValueError):
    """An argument that cannot be used; one line that names it."""


def main(argv: Sequence[str]) -> int:
    """Run the command; 0 fine, 2 an argument that cannot be used, 1 anything else (one line on stderr)."""
    from transformers.utils import logging as transformers_logging

    try:
        arguments = _parser().parse_args(list(argv))
        transformers_logging.disable_progress_bar()
        sys.stdout.write(export(arguments.checkpoint, arguments.directory) + "\n")
    except UsageError as error:
        return _fail(str(error), 2)
    except (CheckpointError, DataError, OSError) as error:
        return _fail(str(error), 1)
    return 0


def export(source: Path, directory: Path) -> str:
    """Write the model that `source` holds to `directory`; says what was written."""
    _check_is_free(directory)
    checkpoint, manifest = find_checkpoint(source)
    model = load_model(checkpoint, manifest)
    unfinished = directory.parent / f".{directory.name}.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        model.save_pretrained(str(unfinished))
        tokenizer = _save_tokenizer(manifest.tokenizer, unfinished)
        unfinished.rename(directory)  # over an empty directory, if there is one
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    parameters = sum(p.numel() for p in model.parameters())
    what = f"{manifest.model_type} with {parameters:,} parameters, {tokenizer}"
    return f"{directory}: {what}, from step {manifest.step} ({checkpoint})"


def find_checkpoint(source: Path) -> tuple[Path, Manifest]:
    """The checkpoint `source` itself, or the newest complete one of the run that it is the directory of."""
    if (source / MANIFEST).exists():
        try:
            return source, _verified(source)
        except Damaged as damage:
            raise CheckpointError(f"{source} is damaged: {damage}") from None
    if not source.is_dir():
        raise UsageError(f"CKPT: there is no directory {source}")
    found = [path for place in (source / "checkpoints", source) for path in checkpoints_in(place)]
    damaged: dict[Path, str] = {}
    for path in found:
        try:
            manifest = _verified(path)
        except Damaged as damage:
            damaged[path] = str(damage)
            continue
        for skipped, problem in damaged.items():
            logger.warning("skipping the damaged checkpoint %s: %s", skipped, problem)
        return path, manifest
    if damaged:
        problems = "; ".join(f"{path.name}: {problem}" for path, problem in damaged.items())
        raise CheckpointError(f"no usable checkpoint in {source}: {problems}")
    raise UsageError(f"CKPT: {source} is neither a checkpoint nor a run with checkpoints")


def _verified(directory: Path) -> Manifest:
    manifest = Manifest.read(directory)
    manifest.verify(directory)
    return manifest


def load_model(checkpoint: Path, manifest: Manifest) -> Any:
    """The Hugging Face model with the saved parameters, in the dtype in which they were trained."""
    from transformers import AutoModelForCausalLM

    try:
        config = _config(checkpoint, manifest.model_config)
        with torch.device("meta"):  # no memory and no random weights for what is replaced at once
            model = AutoModelForCausalLM.from_config(config)
    except CheckpointError:
        raise
    except Exception as error:  # whatever another release of transformers says to this config
        raise CheckpointError(
            f"{checkpoint}: the installed transformers builds no model from its config ({kind_and_line(error)})"
        ) from error
    _fill(checkpoint, model, model_tensors(checkpoint, manifest))
    return model


def model_tensors(checkpoint: Path, manifest: Manifest) -> dict[str, Tensor]:
    """The saved parameters and persistent buffers by name; tied ones once."""
    saved = open_saved(checkpoint, manifest, Ranks(None))
    tensors = {
        key: torch.empty(shape, dtype=dtype)
        for key, (shape, dtype) in saved.index.items()
        if key.startswith("model.")
    }
    saved.read(tensors)
    return {key.removeprefix("model."): tensor for key, tensor in tensors.items()}


def _config(checkpoint: Path, described: dict[str, JSON] | None) -> Any:
    from transformers import CONFIG_MAPPING

    if described is None:
        raise CheckpointError(f"{checkpoint} is not of a Hugging Face model: it has no model_config to export")
    if described.get("auto_map"):
        raise CheckpointError(f"{checkpoint} is of a model with Python code of its own, which export does not run")
    kind = described.get("model_type")
    if kind not in CONFIG_MAPPING:
        raise CheckpointError(f"{checkpoint} is of model type {kind!r}, which the installed transformers lacks")
    config = CONFIG_MAPPING[kind].from_dict(described)
    config.use_cache = True  # off only while training
    return config


def _fill(checkpoint: Path, model: Any, tensors: dict[str, Tensor]) -> None:
    """Put the tensors in place of the model's; those that are tied to another one follow it."""
    try:
        _, unexpected = model.load_state_dict(tensors, strict=False, assign=True)
    except RuntimeError as error:  # shapes
        raise CheckpointError(f"{checkpoint} does not fit its config: {' '.join(str(error).split())}") from error
    model.tie_weights()
    state: dict[str, Tensor] = nn.Module.state_dict(model)
    missing = [name for name, tensor in state.items() if tensor.is_meta]
    for what, names in (("lacks", missing), ("has, and the model has not,", unexpected)):
        if names:
            raise CheckpointError(f"{checkpoint} {what} {', '.join(names[:5])}")


def _save_tokenizer(described: dict[str, JSON] | None, directory: Path) -> str:
    if described is None:
        return "no tokenizer"
    tokenizer = load_tokenizer(described["name"])
    if tokenizer.info.fingerprint != described["fingerprint"]:
        raise CheckpointError(f"tokenizer {described['name']!r} is not the one that this run was trained with")
    tokenizer.save(directory)
    return f"tokenizer {described['name']}"


def _check_is_free(directory: Path) -> None:
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"DIR: {directory} is a file")
    if directory.is_dir() and any(directory.iterdir()):
        raise UsageError(f"DIR: {directory} is not empty; give a new or an empty directory")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (usage: thinwire export CKPT DIR)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="thinwire export", description="Write a checkpoint as a plain Hugging Face model directory."
    )
    parser.add_argument("checkpoint", metavar="CKPT", type=Path, help="a checkpoint, or the directory of a run")
    parser.add_argument("directory", metavar="DIR", type=Path, help="the directory to write; new or empty")
    return parser


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"thinwire export: {' '.join(message.split())}\n")
    return code
