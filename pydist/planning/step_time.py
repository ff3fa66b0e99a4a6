"""How long a training step takes: what it computes, and the communication that it does not hide.

Buckets leave in the order of the plan, each once it is complete and the link is free of those
before it. What is on its way when backward is over is *exposed*: the step waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydist.planning.costs import Costs
from pydist.planning.exchange_time import INLINE_BYTES, Shape, link_bytes, seconds


@dataclass(frozen=True)
class Compute:
    """Seconds of one rank's step, without communication.

    Attributes:
        forward_s: Of forward, with all that belongs to no other part.
        backward_s: Of backward.
        optimizer_s: Of the optimizer's step on all parameters. A sharded one takes a p-th of it.
    """

    forward_s: float
    backward_s: float
    optimizer_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s + self.optimizer_s


@dataclass(frozen=True)
class ReadyBucket:
    """Gradients that travel together.

    Attributes:
        size_bytes: Of them all.
        ready_share: The share of backward that is over when the last of them is there, above 0, at
            most 1. Buckets of a plan have growing ones. Forward needs the same parameters in the
            opposite order.
    """

    size_bytes: float
    ready_share: float


@dataclass(frozen=True)
class StepTime:
    """Of one step of one rank.

    Attributes:
        computing_s: What it computes. A sharded optimizer's step is a p-th of the whole one.
        exposed_s: What it waits for communication.
        communication_s: For how long operations of the step are on their way, hidden or not.
        link_bytes: What a host's link carries for it each way.
    """

    computing_s: float
    exposed_s: float
    communication_s: float
    link_bytes: float

    @property
    def step_s(self) -> float:
        return self.computing_s + self.exposed_s

    @property
    def efficiency(self) -> float:
        """The share of the step that is computing; 1 where there is nothing to compute."""
        return self.computing_s / self.step_s if self.step_s > 0 else 1.0


def data_parallel_step(
    compute: Compute, buckets: Sequence[ReadyBucket], costs: Costs, shape: Shape
) -> StepTime:
    """A step of pydist.DataParallel: an opening, an all-reduce of each bucket, a closing."""
    times = [seconds("all_reduce", costs, shape, bucket.size_bytes) for bucket in buckets]
    note_s = _note_s(costs, shape)
    exposed_s = _exposed_by_backward(compute, buckets, times, note_s)
    carried = sum(link_bytes("all_reduce", costs, shape, b.size_bytes) for b in buckets)
    carried += 2 * link_bytes("all_reduce", costs, shape, INLINE_BYTES)
    return StepTime(compute.total_s, exposed_s, sum(times) + 2 * note_s, carried)


def sharded_step(
    compute: Compute, buckets: Sequence[ReadyBucket], costs: Costs, shape: Shape
) -> StepTime:
    """A step with pydist.ShardedOptimizer, of stage 1 or 2.

    In backward a reduce-scatter of each bucket; then a vote; then, bucket by bucket from the last
    of the plan on, the update of the shard and an all-gather of the parameters, which the next
    forward waits for where it needs them.
    """
    scatter = [seconds("reduce_scatter", costs, shape, bucket.size_bytes) for bucket in buckets]
    gather = [seconds("all_gather", costs, shape, bucket.size_bytes) for bucket in buckets]
    note_s = _note_s(costs, shape)
    optimizer_s = compute.optimizer_s / shape.ranks
    exposed_s = _exposed_by_backward(compute, buckets, scatter, note_s) + note_s
    exposed_s += _exposed_by_forward(compute.forward_s, optimizer_s, buckets, gather)
    carried = sum(
        link_bytes(kind, costs, shape, bucket.size_bytes)
        for bucket in buckets
        for kind in ("reduce_scatter", "all_gather")
    )
    carried += 3 * link_bytes("all_reduce", costs, shape, INLINE_BYTES)
    computing_s = compute.forward_s + compute.backward_s + optimizer_s
    communication_s = sum(scatter) + sum(gather) + 3 * note_s
    return StepTime(computing_s, exposed_s, communication_s, carried)


def _note_s(costs: Costs, shape: Shape) -> float:
    """Of an opening, a closing or a vote."""
    return seconds("all_reduce", costs, shape, INLINE_BYTES)


def _exposed_by_backward(
    compute: Compute, buckets: Sequence[ReadyBucket], times_s: Sequence[float], note_s: float
) -> float:
    free_s = note_s  # the opening
    for bucket, taken_s in zip(buckets, times_s, strict=True):
        free_s = max(free_s, bucket.ready_share * compute.backward_s) + taken_s
    closed_s = max(free_s, compute.backward_s) + note_s
    return closed_s - compute.backward_s


def _exposed_by_forward(
    forward_s: float, optimizer_s: float, buckets: Sequence[ReadyBucket], times_s: Sequence[float]
) -> float:
    """What forward waits for parameters that are on their way since the optimizer's step."""
    total = sum(bucket.size_bytes for bucket in buckets)
    updated_s = free_s = 0.0
    arrived: list[float] = []
    for bucket, taken_s in zip(reversed(buckets), reversed(times_s), strict=True):
        updated_s += optimizer_s * bucket.size_bytes / total if total else 0.0
        free_s = max(free_s, updated_s) + taken_s
        arrived.append(free_s)
    shares = [0.0, *(bucket.ready_share for bucket in buckets)]
    # What follows the last gradient in backward precedes the first parameter in forward.
    now_s = optimizer_s + (1 - shares[-1]) * forward_s
    for place, at_s in zip(range(len(buckets), 0, -1), arrived, strict=True):
        now_s = max(now_s, at_s) + (shares[place] - shares[place - 1]) * forward_s
    return max(0.0, now_s - optimizer_s - forward_s)
