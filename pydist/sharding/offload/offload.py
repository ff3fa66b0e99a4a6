"""The steps of an optimizer whose state is on the host, bucket by bucket.

Note [The order of a step]: gradients, of all buckets, start on their way to the host, those that
have not in backward. Then, bucket by bucket, the host waits for a bucket's gradients, steps, and
starts the new values on their way back, behind which the group's stream gathers them. So the bus
carries gradients and values of other buckets while one is stepped, and forward begins while the
last ones travel. The order is the reverse of backward's, as forward needs first what backward
completes last.

Note [Delayed steps]: the host's part runs on a thread, beside the next forward and backward, which
still have the parameters of before. The next step() waits for the thread, starts the values on
their way to the GPU and gathers them, and then gives the new gradients to the thread. So a
parameter is one step behind its gradients: step number n uses gradients of parameters that have
seen the updates up to n - 2.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pydist import _native
from pydist.job.log import logger
from pydist.sharding.buckets import Bucket
from pydist.sharding.offload.flows import Flow, flows_of
from pydist.sharding.offload.offloaded_step import OffloadedStep
from pydist.sharding.offload.side_streams import SideStreams
from pydist.sharding.offload.step_thread import StepThread
from pydist.sharding.offload.thread_share import count_of_threads


class Offload:
    """The steps of all buckets of an optimizer. All ranks make it.

    Args:
        communicator: The ranks.
        is_delayed: Whether the host steps beside the next forward and backward.
    """

    def __init__(self, communicator: _native.Communicator, *, is_delayed: bool) -> None:
        self._communicator = communicator
        self._is_delayed = is_delayed
        self._threads = _native.StepThreads(count_of_threads(communicator))
        self._streams: dict[torch.device, SideStreams] = {}
        self._steps: list[OffloadedStep] = []
        # By the reducer's number of the bucket.
        self._by_number: dict[int, OffloadedStep] = {}
        self._thread = StepThread()

    def make_step(
        self,
        bucket: Bucket,
        param_groups: Sequence[dict[str, Any]],
        make: Callable[[list[dict[str, Any]]], Optimizer],
    ) -> OffloadedStep:
        """Takes up a bucket, whose segments move to the host."""
        device = bucket.shard.device
        if device not in self._streams:
            self._streams[device] = SideStreams.of(device)
        step = OffloadedStep(
            bucket,
            param_groups,
            make,
            self._threads,
            self._streams[device],
            is_delayed=self._is_delayed,
        )
        self._steps.append(step)
        if bucket.number is not None:
            self._by_number[bucket.number] = step
        return step

    def watch(self, reducer: _native.Reducer, owner: int) -> None:
        """Lets gradients start on their way to the host as soon as they are reduced.

        Where streams can't wait for a reduction, because the host takes part in it, all start in
        the step.

        Args:
            reducer: What averages them.
            owner: The optimizer's number there.
        """
        if self._communicator.backend != "nccl":
            return
        # The reducer keeps the watcher as long as the model lives, which may outlive the optimizer.
        itself = weakref.ref(self)

        def watcher(number: int, work: _native.Work | None) -> None:
            offload = itself()
            step = None if offload is None else offload._by_number.get(number)
            if step is None:
                return
            step.host.before_reduction() if work is None else step.host.after_reduction(work)

        reducer.watch_shards(owner, watcher)

    def step(self, param_groups: Sequence[dict[str, Any]]) -> None:
        """See Note [The order of a step]. All ranks call it, after `join`."""
        order = list(reversed(self._steps))
        late = [step.has_result for step in order]
        self._upload(order)
        for step, is_new in zip(order, late, strict=True):
            step.send(param_groups, looks=not is_new)
        if self._is_delayed:
            # In stage 1 the next gradients land where these are.
            for step in order:
                step.host.before_reduction()
            self._thread.start(functools.partial(_run_on_host, order))
            return
        for step in order:
            step.run_on_host()
            step.upload()
            step.gather(self._communicator)

    def join(self) -> None:
        """Returns once no thread steps; raises what the step there has raised."""
        self._thread.join()

    def leave(self) -> None:
        """Waits for a delayed step, whose values nobody takes over any more."""
        try:
            self.join()
        except BaseException as error:
            logger.warning(
                "the last delayed step of a pydist.ShardedOptimizer has raised: %r", error
            )
            return
        if any(step.has_result for step in self._steps):
            logger.warning(
                "the last delayed step of a pydist.ShardedOptimizer has reached no parameter: call "
                "optimizer.finish() on all ranks after the last step"
            )

    def take_over(self) -> None:
        """Starts the values of a delayed step on their way. All ranks call it, after `join`.

        Raises:
            InvalidUsage: The program had written parameters meanwhile.
        """
        late = [step for step in reversed(self._steps) if step.has_result]
        self._upload(late)
        for step in late:
            step.require_unwritten()

    def _upload(self, steps: Sequence[OffloadedStep]) -> None:
        for step in steps:
            if step.has_result:
                step.upload()
                step.gather(self._communicator)

    @contextmanager
    def scaling(self, factor: Tensor, present: set[int]) -> Iterator[None]:
        """Around a multiplication of gradients in place; see `HostShard.scaling`."""
        with ExitStack() as stack:
            for step in self._steps:
                stack.enter_context(step.scaling(factor, present))
            yield

    def flows(self) -> dict[str, Flow]:
        """The three flows of a step by themselves, for benchmarks; see `flows_of`."""
        return flows_of(self._steps)

    @property
    def thread_count(self) -> int:
        """On how many threads a rank steps."""
        return self._threads.count

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned memory on this rank."""
        return sum(step.host.pinned_bytes for step in self._steps)


def _run_on_host(steps: Sequence[OffloadedStep]) -> None:
    for step in steps:
        step.run_on_host()
