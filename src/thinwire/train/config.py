"""What a training job is: frozen, typed, printable.

`TrainConfig` holds every setting of a run with its default; the docstring under a field is its help text.
`check` refuses what cannot work, by the key's name, before any worker starts. How a configuration comes from a
TOML file and from flags is in `arguments.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from thinwire.train.data.samples import DataConfig
from thinwire.usage import out_of_range, shown

MOST_STEPS = 10**12


class ConfigError(ValueError):
    """A setting that cannot be used; the message is one line that names its key."""


@dataclass(frozen=True)
class ModelConfig:
    name: str = "llama-tiny"
    """A preset with random weights (llama-nano, llama-tiny, llama-small, llama-300m, llama-600m, gpt2, gpt2-xl),
    or a Hugging Face model id or directory whose weights are loaded."""
    random_weights: bool = False
    """Take only the architecture of a model id or directory and start from random weights."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more compute."""
    find_unused_parameters: bool = False
    """For models in which some parameters receive no gradient in some steps; slower."""
    trust_remote_code: bool = False
    """Run Python code that comes with a model id or directory. Off: such a model is refused."""


@dataclass(frozen=True)
class OptimizerConfig:
    name: Literal["adamw", "muon"] = "adamw"
    """adamw, or muon for the hidden matrices with AdamW for everything else."""
    lr: float = 3e-3
    """Peak learning rate. Muon's is scaled to AdamW's update size, so one number serves both."""
    beta1: float = 0.9
    """AdamW's decay of the gradient average."""
    beta2: float = 0.95
    """AdamW's decay of the squared-gradient average."""
    eps: float = 1e-8
    """AdamW's denominator offset."""
    momentum: float = 0.95
    """Muon's momentum."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; vectors (norms, biases) have none."""
    clip: float = 1.0
    """Largest norm of the averaged gradient; 0: no clipping."""


@dataclass(frozen=True)
class ScheduleConfig:
    warmup_steps: int | None = None
    """Steps of linear warm-up. Not set: a tenth of the run, at most 100."""
    decay: Literal["cosine", "constant"] = "cosine"
    """What the learning rate does after the warm-up."""
    final_fraction: float = 0.1
    """Where the cosine ends, as a fraction of the peak."""


@dataclass(frozen=True)
class CheckpointConfig:
    every: int = 100
    """Steps between checkpoints; 0: only the last step and a stop by signal write one."""
    keep: int = 3
    """How many of the latest checkpoints are kept."""
    snapshots: Path | None = None
    """A directory in memory, such as /dev/shm, for snapshots at the end of every round of local updates, or every
    50 steps: under torchrun --max-restarts the run goes on from the newest. For workers of one machine."""


@dataclass(frozen=True)
class LoggingConfig:
    every: int = 10
    """Steps between lines of metrics.jsonl."""
    tensorboard: bool = True
    """Write TensorBoard events."""
    progress: bool = True
    """Show a progress bar (on a terminal) or a line per logged step (elsewhere); off: only start and end."""


@dataclass(frozen=True)
class LocalUpdateConfig:
    every: int | None = None
    """Steps between averages under a recipe with local updates. Not set: the recipe's."""
    groups: int | None = None
    """Groups of consecutive workers that average gradients in every step, where the recipe knows groups."""


@dataclass(frozen=True)
class TrainConfig:
    recipe: str = "nvfp4"
    """How gradients are averaged; `thinwire recipes` lists the names."""
    workers: int = 2
    """Worker processes to start on this machine. Under torchrun, torchrun decides."""
    steps: int = 600
    """Optimizer steps of the whole run."""
    seed: int = 0
    """Seeds the weights, the order of the data and everything random."""
    out: Path | None = None
    """Directory of the run. Not set: the first free runs/RECIPE-NUMBER."""
    resume: bool = False
    """Continue from the newest usable checkpoint of the run in `out`."""
    batch_size: int = 8
    """Sequences per optimizer step over all workers together: another world size is the same training."""
    accumulation: int = 1
    """Micro-batches that a worker cuts its share of a step's sequences into."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """ddp: every worker holds the model. fsdp: weights, gradients and optimizer are in shards (FSDP2)."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: run forward and backward under autocast; weights, gradients and optimizer stay float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where there is one."""
    threads: int | None = None
    """Compute threads per worker on the CPU. Not set: the machine's cores shared among its workers."""
    port: int = 0
    """Port of the rendezvous of the workers started here; 0: a free one."""
    timeout: float = 300.0
    """Seconds after which a collective that makes no progress ends the run."""
    max_bad_steps: int = 10
    """Steps in a row with a non-finite loss or gradient (each is skipped on all ranks) that end the run."""
    verify_every: int = 100
    """Steps between checks that all ranks hold the same parameters; 0: never."""
    validation_every: int = 100
    """Steps between validations; 0: only at the end."""
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    local_update: LocalUpdateConfig = field(default_factory=LocalUpdateConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    @property
    def warmup_steps(self) -> int:
        """The steps of warm-up that this run takes."""
        explicit = self.schedule.warmup_steps
        return min(100, self.steps // 10) if explicit is None else explicit


def check(config: TrainConfig, *, world_size: int) -> None:
    """Refuse what cannot run, naming the key. Starts no worker and reads no text.

    Of a model id or directory it reads the configuration, for the positions that the model has.
    """
    _check_ranges(config)
    config.data.check()
    _check_names(config, world_size)
    c = config
    if c.batch_size < world_size * c.accumulation:
        raise ConfigError(
            f"batch_size: {c.batch_size} sequences cannot be shared by {world_size} workers with accumulation "
            f"{c.accumulation}; it must be at least {world_size * c.accumulation}"
        )
    if c.warmup_steps > c.steps:
        raise ConfigError(f"schedule.warmup_steps: {c.warmup_steps} is longer than the run of {c.steps} steps")
    if c.resume and c.out is None:
        raise ConfigError("resume: needs --out DIR, the directory of the run to continue")


def _check_ranges(config: TrainConfig) -> None:
    """Every number within its own limits. The upper ones are far from any real job, and arithmetic still holds."""
    c = config
    limits: list[tuple[str, float | None, float, float]] = [
        ("workers", c.workers, 1, 1024),
        ("steps", c.steps, 1, MOST_STEPS),
        ("seed", c.seed, 0, 2**32 - 1),
        ("batch_size", c.batch_size, 1, 2**20),
        ("accumulation", c.accumulation, 1, 2**20),
        ("threads", c.threads, 1, 1024),
        ("port", c.port, 0, 65535),
        ("timeout", c.timeout, 1, 10**7),
        ("max_bad_steps", c.max_bad_steps, 1, MOST_STEPS),
        ("verify_every", c.verify_every, 0, MOST_STEPS),
        ("validation_every", c.validation_every, 0, MOST_STEPS),
        ("optimizer.lr", c.optimizer.lr, 1e-30, 1e6),
        ("optimizer.eps", c.optimizer.eps, 1e-30, 1e6),
        ("optimizer.weight_decay", c.optimizer.weight_decay, 0, 1e6),
        ("optimizer.clip", c.optimizer.clip, 0, 1e30),
        ("schedule.warmup_steps", c.schedule.warmup_steps, 0, MOST_STEPS),
        ("schedule.final_fraction", c.schedule.final_fraction, 0, 1),
        ("checkpoint.every", c.checkpoint.every, 0, MOST_STEPS),
        ("checkpoint.keep", c.checkpoint.keep, 1, MOST_STEPS),
        ("logging.every", c.logging.every, 1, MOST_STEPS),
    ]
    for key, value, least, most in limits:
        wrong = None if value is None else out_of_range(key, value, least, most)
        if wrong:
            raise ConfigError(wrong)
    for key in ("beta1", "beta2", "momentum"):
        value = getattr(c.optimizer, key)
        if not 0 <= value < 1:
            raise ConfigError(f"optimizer.{key}: must be at least 0 and below 1, got {shown(value)}")


def _check_names(config: TrainConfig, world_size: int) -> None:
    """The recipe exists, the model can hold the sequences, the device is there."""
    import torch

    from thinwire import recipes
    from thinwire.train.averaging import method_of
    from thinwire.train.model import longest_sequence

    if config.recipe not in recipes.names():
        raise ConfigError(f"recipe: no recipe is called {config.recipe!r}; there are {', '.join(recipes.names())}")
    method = method_of(config)  # refuses settings that do not fit
    if method is not None and config.parallel != "ddp":
        raise ConfigError(f"parallel: recipe {config.recipe} averages weights of whole models: use ddp")
    groups = config.local_update.groups
    if groups is not None and world_size % groups:
        raise ConfigError(f"local_update.groups: {world_size} workers cannot be cut into {groups} equal groups")
    longest = longest_sequence(config.model)
    if longest is not None and config.data.sequence_length > longest:
        raise ConfigError(
            f"data.sequence_length: {config.data.sequence_length} is above the {longest} positions "
            f"of {config.model.name}"
        )
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: cuda was asked for, but this torch sees no CUDA device")
    if uses_cuda(config) and config.precision == "bfloat16" and not torch.cuda.is_bf16_supported():
        raise ConfigError("precision: this CUDA device has no bfloat16; use float32")


def uses_cuda(config: TrainConfig) -> bool:
    """Whether the workers of this job compute on CUDA devices."""
    import torch

    return config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
