"""One bucket's step on this rank's segments: by pydist's kernels, or by the wrapped class."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pydist.errors import InvalidUsage
from pydist.sharding.buckets import Bucket, Segment
from pydist.sharding.element_wise import ELEMENT_WISE, groups_unchanged
from pydist.sharding.fused_step import FusedStep, fused_step
from pydist.sharding.gradient import ShardedGradient
from pydist.sharding.parameter_groups import options_of
from pydist.sharding.unhooked_step import unhooked_step


class BucketStep:
    """Updates this rank's shard of a bucket, whose optimizer it makes.

    Args:
        bucket: Without an optimizer.
        param_groups: Of whole parameters.
        make: Makes one of the wrapped class, of the groups that it is given.
    """

    def __init__(
        self,
        bucket: Bucket,
        param_groups: Sequence[dict[str, Any]],
        make: Callable[[list[dict[str, Any]]], Optimizer],
    ) -> None:
        self.bucket = bucket
        self._parts: list[_Part] = []
        group_of = {
            id(parameter): number
            for number, group in enumerate(param_groups)
            for parameter in group["params"]
        }
        segments: dict[int, list[Segment]] = {}
        for segment in bucket.segments:
            segments.setdefault(group_of[id(segment.member.parameter)], []).append(segment)
        numbers = sorted(segments)
        if not numbers:
            return
        bucket.optimizer = make(
            [
                {**options_of(param_groups[n]), "params": [s.updated for s in segments[n]]}
                for n in numbers
            ]
        )
        for number, own in zip(numbers, bucket.optimizer.param_groups, strict=True):
            fused = fused_step(bucket.optimizer, own, segments[number])
            self._parts.append(_Part(number, own, segments[number], fused))

    def run(self, param_groups: Sequence[dict[str, Any]], *, takes_back: bool = True) -> None:
        """Steps once.

        Args:
            param_groups: Of whole parameters, with the options for this step.
            takes_back: Whether parameters may have been given other memory since the last step.

        Raises:
            InvalidUsage: A gradient is sparse, or was to be averaged and is not. Nothing of the
                bucket has changed.
        """
        bucket = self.bucket
        if bucket.averages_gradients:
            _require_averaged(bucket)
        changing = bucket.take_back_strays() if takes_back else []
        changing += [p for p in bucket.parameters if p.grad is not None]
        # All ranks count up the versions of the same parameters, because the same ones have
        # gradients. A parameter that does not change keeps its version: a backward that has saved
        # it may still use it.
        torch.autograd.graph.increment_version(changing)
        if bucket.optimizer is None:
            return
        left = []
        for part in self._parts:
            part.group.update(options_of(param_groups[part.number]))
            gradients = [_gradient_of(segment) for segment in part.segments]
            if part.fused is None or not part.fused.run(gradients):
                left.append((part, gradients))
        if left:
            _step_by_class(bucket.optimizer, left)

    def forget_states(self) -> None:
        """The state was replaced."""
        for part in self._parts:
            if part.fused is not None:
                part.fused.forget()


@dataclass(frozen=True)
class _Part:
    """The segments of one group.

    Attributes:
        number: Of the group, among those of whole parameters.
        group: The one of the bucket's optimizer.
        segments: In its order.
        fused: Their step by pydist's kernels, where those can.
    """

    number: int
    group: dict[str, Any]
    segments: list[Segment]
    fused: FusedStep | None


def _step_by_class(
    optimizer: Optimizer, parts: Sequence[tuple[_Part, Sequence[Tensor | None]]]
) -> None:
    """Updates segments as torch's class does; what is not among them has no gradient."""
    stepping = []
    for part, gradients in parts:
        if part.fused is not None:
            part.fused.forget()
        if part.group.get("fused"):
            _bring_steps(optimizer, part.segments)
        for segment, gradient in zip(part.segments, gradients, strict=True):
            if gradient is not None:
                segment.refresh_master()  # which the kernels do by themselves
                segment.updated.grad = gradient.to(segment.updated.dtype)
                stepping.append(segment)
    is_new = not any(optimizer.state.values()) and type(optimizer) not in ELEMENT_WISE
    with groups_unchanged(optimizer) if is_new else contextlib.nullcontext():
        unhooked_step(optimizer)
    for segment in stepping:
        if segment.has_master:
            segment.values.copy_(segment.updated)
        segment.updated.grad = None


def _bring_steps(optimizer: Optimizer, segments: Sequence[Segment]) -> None:
    """Moves the numbers of steps beside the values, where torch's fused classes expect them."""
    for segment in segments:
        step = optimizer.state.get(segment.updated, {}).get("step")
        if isinstance(step, Tensor) and step.device != segment.updated.device:
            optimizer.state[segment.updated]["step"] = step.to(segment.updated.device)


def _gradient_of(segment: Segment) -> Tensor | None:
    whole = segment.member.parameter.grad
    if whole is None:
        return None
    if isinstance(whole, ShardedGradient):
        return segment.gradient
    if whole.is_sparse:
        raise InvalidUsage(
            f"the gradient of parameter {segment.member.name} is sparse, and "
            "pydist.ShardedOptimizer takes dense ones: build the embedding with sparse=False"
        )
    return segment.of(whole)


def _require_averaged(bucket: Bucket) -> None:
    """Raises InvalidUsage where somebody has put a gradient of this rank's in place of the mean."""
    for member in bucket.members:
        gradient = member.parameter.grad
        if gradient is not None and not isinstance(gradient, ShardedGradient):
            raise InvalidUsage(
                f"the gradient of parameter {member.name} was put there by hand, or replaced, and "
                "is this rank's alone: each rank updates a part of every parameter, so call the "
                "pydist.DataParallel model's sync_gradients() before step(), on all ranks, which "
                "averages it"
            )
