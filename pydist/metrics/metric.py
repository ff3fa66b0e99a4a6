"""What every metric here is: whole numbers that add up, over samples and over ranks."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from pydist._native import Communicator
from pydist.errors import InvalidUsage
from pydist.job import groups, membership
from pydist.job.arguments import a_type
from pydist.job.groups import Group

Result = TypeVar("Result", covariant=True)


def require_tensor(name: str, value: object) -> None:
    """Raises InvalidUsage where somebody passed something else."""
    if not isinstance(value, Tensor):
        raise InvalidUsage(f"{name} is {a_type(value)}; it must be a tensor.")


class Metric(ABC, Generic[Result]):
    """A measure whose state is whole numbers; adding those of two sets of samples joins the sets.

    Whole numbers add up to the same in any order. So the result is the same to the last bit
    whatever rank has which samples, in batches of whatever size. A metric of your own derives from
    this, adds to `state` in `update`, and computes the value from the sum of all ranks' states in
    `result`.

    Args:
        length: elements of `state`, the same on every rank.

    Attributes:
        state: int64, this rank's sum; on the device of what was measured last.
    """

    def __init__(self, length: int) -> None:
        self.state = torch.zeros(length, dtype=torch.int64)

    @abstractmethod
    def update(self, *args: Any, **kwargs: Any) -> None:
        """Adds samples of this rank. Talks to nobody."""

    @abstractmethod
    def result(self, state: Tensor) -> Result:
        """The value that belongs to a state, on the CPU. Talks to nobody."""

    def on(self, device: torch.device) -> Tensor:
        """`state`, moved to a device if it is on another."""
        if self.state.device != device:
            self.state = self.state.to(device)
        return self.state

    def reset(self) -> None:
        """Forgets this rank's samples."""
        self.state.zero_()

    def compute(self, group: Group | None = None, *, timeout: float | None = None) -> Result:
        """The value over the samples of all ranks. Every rank calls it.

        What was measured stays, so more can be added. Joins the job by itself (`pydist.init()`).

        Args:
            group: the ranks; by default all.
            timeout: seconds that this may take, waiting for the slowest rank included; by default
                the group's own time-out.

        Raises:
            Mismatch: the ranks compute different metrics.
        """
        if group is None:
            membership.init()
        value: Result
        (value,) = compute_all([self], groups.communicator_of(group), timeout=timeout)
        return value

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.result(self.state.cpu())!r} on this rank)"


def compute_all(
    metrics: Sequence[Metric[Any]], communicator: Communicator, *, timeout: float | None = None
) -> list[Any]:
    """The values of several metrics, by one all_reduce. All ranks call it together."""
    if not metrics:
        return []
    states = torch.cat([metric.state.cpu() for metric in metrics])
    communicator.all_reduce(states, states, label="metrics", timeout=timeout)
    parts = states.split([metric.state.numel() for metric in metrics])
    return [metric.result(part) for metric, part in zip(metrics, parts, strict=True)]
