"""DDP: one communication hook for the life of the DistributedDataParallel object, whatever is attached.

DDP lets a hook be registered once and never replaced, so what is registered is a trampoline that looks up
the link of the moment, or does what plain DDP does when there is none. Buckets come and go (DDP rebuilds
them after the first iteration); names are found by parameter identity, and state is keyed by name.

When the last bucket's hook runs, every gradient is ready: from then until DDP has seen all futures the
backward pass is blocked on communication, which is what `exposed_seconds` counts. An engine callback queued
then runs after DDP's own: it raises what went wrong on the worker, and rolls back the error memory of
parameters that no rank used (DDP drops what the hook returned for them).

Under `Join`, DDP calls the hook outside of a backward pass on ranks that have run out of data, with zeros.

(No `from __future__ import annotations` here: DDP checks the hook's annotations as objects.)
"""

import time
import weakref
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from thinwire.data_parallel.link import Link
from thinwire.reducers.views import with_strides_of

ATTRIBUTE = "_thinwire_trampoline"


class Trampoline:
    """The communication hook of one DDP model."""

    def __init__(self, ddp: DistributedDataParallel, parameters: dict[str, nn.Parameter]) -> None:
        self.link: Link | None = None
        self.averaged: frozenset[str] = frozenset()
        """Names of the parameters that the link averages."""
        self.phases: dict[timedelta | None, dict[str, dist.ProcessGroup]] = {}
        """Process groups by timeout, for the next link to use again."""
        self._ddp = weakref.ref(ddp)
        self._group: dist.ProcessGroup = ddp.process_group
        self._world_size = dist.get_world_size(self._group)
        self._parameters = {id(parameter): (name, parameter) for name, parameter in parameters.items()}
        self._may_be_unused = ddp.find_unused_parameters or ddp.static_graph
        self._copies_back = not ddp.gradient_as_bucket_view

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A copy of a DDP model has a reducer of its own, with no hook: it gets a new trampoline when attached."""
        return type(None), ()

    def hook(self, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        """Start averaging a bucket of gradients."""
        if self.link is None:
            return self._plain(bucket)
        with torch.autocast(bucket.buffer().device.type, enabled=False):
            return self._average(bucket, self.link)

    def _average(self, bucket: dist.GradBucket, link: Link) -> Future[Tensor]:  # type: ignore[name-defined]
        """In float32, also where `backward()` is called under autocast."""
        buffer = bucket.buffer()
        in_backward = torch._C._current_graph_task_id() != -1
        if bucket.index() == 0:
            self._check_join()
            link.begin(shadow=not in_backward)
        averaged = link.reducer.all_reduce(self._gradients(bucket))
        if not in_backward:
            return averaged.then(lambda done: (done.value(), buffer)[1])
        result: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else [])
        # An error must not travel through this future, whose value DDP's C++ reads: `_finish` raises it.
        averaged.add_done_callback(lambda _: result.set_result(buffer))
        if bucket.is_last():
            _after_ddp(self._finish(link, time.perf_counter()))
        return result

    def _plain(self, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        """What DDP does without a hook: multiply by 1/W, then sum."""
        self._check_join()
        buffer = bucket.buffer().mul_(1.0 / self._world_size)
        work = dist.all_reduce(buffer, group=self._group, async_op=True)
        future: Future[list[Tensor]] = work.get_future()
        return future.then(lambda f: f.value()[0])

    def _gradients(self, bucket: dist.GradBucket) -> dict[str, Tensor]:  # type: ignore[name-defined]
        """The bucket's gradients by name; empty ones, and those of parameters frozen all along, left out."""
        named = {}
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients()):
            name, _ = self._parameters[id(parameter)]
            if name in self.averaged:
                named[name] = with_strides_of(parameter, gradient)
            elif parameter.requires_grad and parameter.numel():
                raise ValueError(
                    f"{name!r} takes gradients now but was frozen when the link was attached: "
                    "detach the link and attach the reducer again"
                )
        return named

    def _check_join(self) -> None:
        ddp = self._ddp()
        if ddp is not None and ddp._join_config.enable and not ddp._divide_by_initial_world_size:
            raise ValueError(
                "Join(divide_by_initial_world_size=False) does not reach communication hooks: gradients would be "
                "divided by the initial world size all the same; leave it True, or scale the loss"
            )

    def _finish(self, link: Link, ready: float) -> Callable[[], None]:
        """What to do when DDP has taken the averaged gradients back."""
        before = self._versions()

        def finish() -> None:
            link.expose(since=ready)
            link.raise_error()
            if self._may_be_unused:
                link.rollback(self._dropped(before))

        return finish

    def _versions(self) -> dict[str, int | None]:
        """How often each gradient has been written to; None where there is none."""
        gradients = {name: parameter.grad for name, parameter in self._parameters.values()}
        return {name: None if gradient is None else gradient._version for name, gradient in gradients.items()}

    def _dropped(self, before: dict[str, int | None]) -> list[str]:
        """Parameters whose averaged gradient DDP has not taken, because no rank used them."""
        after = {name: version for name, version in self._versions().items() if name in self.averaged}
        return [
            name for name in after if after[name] is None or (self._copies_back and after[name] == before[name])
        ]


def trampoline_of(ddp: DistributedDataParallel, parameters: dict[str, nn.Parameter]) -> Trampoline:
    """The trampoline of `ddp`, registered at the first call."""
    trampoline: Trampoline | None = getattr(ddp, ATTRIBUTE, None)
    if trampoline is None:
        if ddp._use_python_reducer:
            raise ValueError(
                "torch._dynamo.config.optimize_ddp = 'python_reducer' has no gradient buckets to hook into: "
                "leave it at True or set it to False before building the DDP model"
            )
        trampoline = Trampoline(ddp, parameters)
        try:
            ddp.register_comm_hook(trampoline, Trampoline.hook)
        except RuntimeError as error:
            raise ValueError(
                "this DDP model has a communication hook already, and DDP takes one in its life (mixed_precision= "
                "and optimizers in backward register one as well): build a new DistributedDataParallel and attach "
                "before registering anything"
            ) from error
        setattr(ddp, ATTRIBUTE, trampoline)
    return trampoline


def _after_ddp(callback: Callable[[], None]) -> None:
    """Call back at the end of this backward pass, after DDP: its own callback is queued when the last hook has
    returned, so this one, queued earlier, queues `callback` behind it."""
    queue = torch.autograd.Variable._execution_engine.queue_callback
    queue(lambda: queue(callback))
