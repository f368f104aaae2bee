"""DDP: one communication hook for the life of the DistributedDataParallel object, whatever is attached.

DDP lets a hook be registered once and never replaced, so what is registered is a trampoline that looks up
the link of the moment, or does what plain DDP does when there is none. Buckets come and go (DDP rebuilds
them after the first iteration); names are found by parameter identity, and state is keyed by name.

When the last bucket's hook runs, every gradient is ready: from then until DDP has seen all futures the
backward pass is blocked on communication, which is what `exposed_seconds` counts. An engine callback queued
then runs after DDP's own: it raises what went wrong on the worker, and rolls back the error memory of
parameters that no rank used (DDP drops what the hook returned for them).

(No `from __future__ import annotations` here: DDP checks the hook's annotations as objects.)
"""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from thinwire.data_parallel.link import Link

ATTRIBUTE = "_thinwire_trampoline"


class Trampoline:
    """The communication hook of one DDP model."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.link: Link | None = None
        self._group: dist.ProcessGroup = ddp.process_group
        self._world_size = dist.get_world_size(self._group)
        self._parameters = {id(p): (name, p) for name, p in ddp.module.named_parameters() if p.requires_grad}

    def hook(self, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        """Start averaging a bucket of gradients."""
        if self.link is None:
            return self._plain(bucket)
        if bucket.index() == 0:
            self.link.begin()
        named = {}
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients()):
            if gradient.numel():
                named[self._parameters[id(parameter)][0]] = gradient
        averaged = self.link.reducer.all_reduce(named)
        buffer = bucket.buffer()
        result: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else [])
        # An error must not travel through this future, whose value DDP's C++ reads: the callback below raises it.
        averaged.add_done_callback(lambda _: result.set_result(buffer))
        if bucket.is_last():
            _queue(lambda: _queue(_finish(self.link, self._parameters, time.perf_counter())))
        return result

    def _plain(self, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        """What DDP does without a hook: multiply by 1/W, then sum."""
        buffer = bucket.buffer().mul_(1.0 / self._world_size)
        work = dist.all_reduce(buffer, group=self._group, async_op=True)
        future: Future[list[Tensor]] = work.get_future()
        return future.then(lambda f: f.value()[0])


def trampoline_of(ddp: DistributedDataParallel) -> Trampoline:
    """The trampoline of `ddp`, registered at the first call."""
    trampoline: Trampoline | None = getattr(ddp, ATTRIBUTE, None)
    if trampoline is None:
        trampoline = Trampoline(ddp)
        try:
            ddp.register_comm_hook(trampoline, Trampoline.hook)
        except RuntimeError as error:
            raise ValueError(
                "this DDP model has a communication hook already, and DDP takes one in its life: "
                "build a new DistributedDataParallel and attach before registering anything"
            ) from error
        setattr(ddp, ATTRIBUTE, trampoline)
    return trampoline


def check_module(module: nn.Module) -> None:
    """Refuse by name what cannot be averaged."""
    for name, submodule in module.named_modules():
        if isinstance(submodule, nn.Embedding | nn.EmbeddingBag) and submodule.sparse:
            raise ValueError(
                f"{name or 'the model'!r} is an embedding with sparse=True, whose gradient is not a dense tensor: "
                "build it with sparse=False"
            )
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and not parameter.dtype.is_floating_point:
            raise ValueError(f"{name!r} is {parameter.dtype}: only real floating point parameters are averaged")


def _queue(callback: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def _finish(
    link: Link | None, parameters: dict[int, tuple[str, nn.Parameter]], ready: float
) -> Callable[[], None]:
    def finish() -> None:
        if link is None:
            return
        link.expose(since=ready)
        link.raise_error()
        unused = [name for name, parameter in parameters.values() if parameter.grad is None]
        if unused:
            link.rollback(unused)

    return finish
