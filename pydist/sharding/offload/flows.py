"""The three flows of an offloaded step, each by itself, to be timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from pydist.sharding.offload.offloaded_step import OffloadedStep
from pydist.sharding.offload.side_streams import wait_on_host


@dataclass(frozen=True)
class Flow:
    """One of the three, of all buckets.

    Attributes:
        size_bytes: That it moves.
        run: Moves them, and returns when they are there.
    """

    size_bytes: int
    run: Callable[[], None]


def flows_of(steps: Sequence[OffloadedStep]) -> dict[str, Flow]:
    """Those of some buckets: "to host", "step" and "to device".

    The gradients of a backward are there, nothing is under way, and the optimizer has stepped
    before. Parameters are worth nothing afterwards: each run of "step" is one more by the same
    gradients.
    """
    steps = [step for step in steps if step.bucket.optimizer is not None]
    shard_bytes = sum(step.bucket.shard.nbytes for step in steps)

    def to_host() -> None:
        _wait([step.host.copy_reduced() for step in steps])

    def step_all() -> None:
        with torch.no_grad():
            for step in steps:
                step.update(step.sent_gradients())

    def to_device() -> None:
        _wait([step.send_values() for step in steps])

    return {
        "to host": Flow(shard_bytes, to_host),
        "step": Flow(sum(map(_stepped_bytes, steps)), step_all),
        "to device": Flow(shard_bytes, to_device),
    }


def _wait(events: Sequence[torch.Event]) -> None:
    for event in events:
        wait_on_host(event)


def _stepped_bytes(step: OffloadedStep) -> int:
    """Reads and writes of memory: the gradient once, values and states twice."""
    assert step.bucket.optimizer is not None
    total = 0
    for segment in step.bucket.segments:
        state = step.bucket.optimizer.state.get(segment.updated, {})
        kept = [
            value for value in state.values() if isinstance(value, torch.Tensor) and value.dim()
        ]
        masters = [segment.updated] if segment.has_master else []
        total += segment.values.nbytes
        total += 2 * sum(tensor.nbytes for tensor in (segment.values, *masters, *kept))
    return total
