"""The loss of a pipeline whose micro-batches and replicas count differently."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from pydist._torch import uncompiled
from pydist.collectives import all_reduce
from pydist.errors import InvalidUsage
from pydist.job import groups
from pydist.pipelining.stage import ReplicatedStage


class WeightedLoss:
    """A loss over micro-batches and replicas of different weights, for the schedules of all stages.

    The mean that one process would compute over the whole batch: of tokens, say, of which
    micro-batches have different numbers. A schedule divides gradients by the number of
    micro-batches, and replicas average; this undoes both.

    Args:
        loss: The weighted mean over a micro-batch, such as `torch.nn.functional.cross_entropy`,
            called with outputs and targets. It must be a mean and no sum, which nobody can tell
            from a function of yours: with a sum, each micro-batch would count for its weight's
            square.
        weight: The weight of targets: `lambda t: (t != -100).sum()`. It is read by the host, so on
            GPUs each micro-batch waits for it.
        stage: This rank's, which computes the loss if it is the last one.

    Raises:
        InvalidUsage: `loss` has `reduction="sum"`, as a module or by functools.partial, or it is
            one of torch's with "none"; or, while a schedule runs, it returns more than one number.

    Example:
        >>> loss = WeightedLoss(cross_entropy, lambda t: (t != -100).sum(), stage)  # doctest: +SKIP
        >>> schedule = Schedule1F1B(stage, 4, loss_fn=loss)  # doctest: +SKIP
        >>> with loss.over(targets):  # doctest: +SKIP
        ...     schedule.step(target=targets)
    """

    def __init__(
        self,
        loss: Callable[[Any, Any], Tensor],
        weight: Callable[[Any], Tensor | float],
        stage: ReplicatedStage,
    ) -> None:
        reduction = _reduction_of(loss)
        if reduction == "sum" or (reduction == "none" and _is_torchs(loss)):
            raise InvalidUsage(
                f"loss has reduction={reduction!r}, and WeightedLoss multiplies the mean over a "
                "micro-batch by its weight: pass the loss with reduction='mean'"
            )
        self._loss, self._weight, self._stage = loss, weight, stage
        self._share: float | None = None

    @contextlib.contextmanager
    def over(self, targets: Any) -> Iterator[None]:
        """Weights the micro-batches of a step by what all replicas have. All ranks call it.

        Where nothing has any weight, the loss is 0.

        Args:
            targets: Of this replica, for the whole step; of no meaning but in the last stage.

        Raises:
            InvalidUsage: The schedule was made with `scale_grads=False`, so that gradients are as
                many times too large as there are micro-batches.
        """
        if not self._stage.is_last:
            yield
            return
        total = float(self._weight(targets))
        replicas = 1
        if (model := self._stage.replicated) is not None:
            group = model.process_group
            replicas = groups.communicator_of(group, "process_group").size
            total = float(all_reduce(torch.tensor(total, dtype=torch.float64), group=group))
        self._share = replicas / total if total else 0.0
        self._stage.scaled_by = None
        try:
            yield
        finally:
            self._share = None
        if self._stage.chunks != 1 and self._stage.scaled_by != self._stage.chunks:
            raise InvalidUsage(
                f"gradients of {self._stage.chunks} micro-batches were not divided by their "
                "number, as WeightedLoss expects: leave scale_grads=True in the schedule"
            )

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        """The micro-batch's part; the mean of all parts is the loss of the whole batch."""
        if self._share is None:
            raise InvalidUsage("the step's weights are not known: step within `loss.over(targets)`")
        if self._stage.chunks is None:
            return self._mean(outputs, targets)  # before its first step a schedule asks what comes
        weight = float(self._weight(targets))
        if weight == 0:  # and the mean of nothing is no number
            return outputs.sum() * 0  # type: ignore[no-any-return]
        return self._mean(outputs, targets) * (weight * self._share * self._stage.chunks)

    def _mean(self, outputs: Any, targets: Any) -> Tensor:
        mean = self._loss(outputs, targets)
        if mean.numel() != 1:
            raise InvalidUsage(
                f"the loss of a micro-batch is of shape {tuple(mean.shape)}, and WeightedLoss "
                "takes one number, the mean: pass the loss with reduction='mean'"
            )
        return mean


def _is_torchs(loss: Any) -> bool:
    """Whether a loss is torch's own. A class derived from one may take the mean by itself."""
    if isinstance(loss, functools.partial):
        return _is_torchs(loss.func)
    loss = uncompiled(loss)
    made_by = loss if hasattr(loss, "__qualname__") else type(loss)
    return str(made_by.__module__).startswith("torch.")


def _reduction_of(loss: Any) -> object:
    """How a loss is reduced, where it says so; None where only its author knows."""
    if isinstance(loss, functools.partial):
        return loss.keywords.get("reduction", _reduction_of(loss.func))
    return getattr(uncompiled(loss), "reduction", None)
