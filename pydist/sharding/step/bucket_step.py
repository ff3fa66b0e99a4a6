"""One bucket's step on this rank's segments: by pydist's kernels, or by the wrapped class."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pydist import _native
from pydist.errors import InvalidUsage
from pydist.sharding.buckets import Bucket, Member, Segment
from pydist.sharding.gather import gather
from pydist.sharding.parameter_groups import options_of
from pydist.sharding.sharded_gradient import ShardedGradient
from pydist.sharding.step.element_wise import ELEMENT_WISE, groups_unchanged
from pydist.sharding.step.eligibility import unhooked_step
from pydist.sharding.step.fused_step import FusedStep, Gradients, fused_step


class BucketStep:
    """Updates this rank's shard of a bucket, whose optimizer it makes.

    Args:
        bucket: Without an optimizer.
        param_groups: Of whole parameters.
        make: Makes one of the wrapped class, of the groups that it is given.
        threads: On which the kernels step, on the host, whether the groups ask for them or not;
            default: torch's, where the groups do.
    """

    def __init__(
        self,
        bucket: Bucket,
        param_groups: Sequence[dict[str, Any]],
        make: Callable[[list[dict[str, Any]]], Optimizer],
        threads: _native.StepThreads | None = None,
    ) -> None:
        self.bucket = bucket
        self.parts: list[Part] = []
        self._strays: list[Member] = []
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
            fused = fused_step(bucket.optimizer, own, segments[number], threads)
            self.parts.append(Part(number, own, segments[number], fused))

    def check(self, *, takes_back: bool) -> None:
        """Raises where `run` can't be called. Changes nothing.

        Args:
            takes_back: Whether parameters may have been given other memory since the last step.

        Raises:
            InvalidUsage: A gradient is sparse, or was to be averaged and is not; a parameter was
                converted.
        """
        for member in self.bucket.members:
            gradient = member.parameter.grad
            if gradient is not None and not isinstance(gradient, ShardedGradient):
                _require_taken(member, gradient, self.bucket.averages_gradients)
        self._strays = self.bucket.strays() if takes_back else []
        for member in self._strays:
            self.bucket.require_fitting(member)

    def run(self, param_groups: Sequence[dict[str, Any]], found_inf: Tensor | None = None) -> None:
        """Steps once, after `check`.

        Args:
            param_groups: Of whole parameters, with the options for this step.
            found_inf: As for `update`, on any GPU.
        """
        torch.autograd.graph.increment_version(self.take_back())
        self.take_options(param_groups)
        if found_inf is not None:
            found_inf = found_inf.to(self.bucket.memory.device, non_blocking=True)
        gradients = [[_gradient_of(s) for s in part.segments] for part in self.parts]
        self.update(gradients, found_inf=found_inf)

    def gather(self, communicator: _native.Communicator) -> None:
        """Starts to bring the other ranks' shards, after `run`. All ranks call it."""
        gather(self.bucket, communicator)

    def take_back(self) -> list[Tensor]:
        """Strays move in again.

        Returns:
            The parameters that this step changes. They are the same on all ranks, as gradients
            are; a backward that has saved one of the others may still use it.
        """
        changing = self.bucket.take_back(self._strays)
        return changing + [p for p in self.bucket.parameters if p.grad is not None]

    def take_options(self, param_groups: Sequence[dict[str, Any]]) -> None:
        """Takes over the options for this step."""
        for part in self.parts:
            part.group.update(options_of(param_groups[part.number]))

    def update(
        self,
        gradients: Sequence[Gradients],
        scale: float = 1.0,
        found_inf: Tensor | None = None,
    ) -> None:
        """Updates the segments of each part by its gradients, which are multiplied first.

        Args:
            gradients: Of each part.
            scale: What they are multiplied by.
            found_inf: A number beside the values; where it is not 0, nothing changes. The host
                reads it only for what torch's class steps.
        """
        left: list[tuple[Part, Gradients]] = []
        for part, own in zip(self.parts, gradients, strict=True):
            if part.fused is None or not part.fused.run(own, scale, found_inf):
                left.append((part, own if scale == 1 else _scaled(own, scale)))
        if left and (found_inf is None or found_inf.item() == 0):
            assert self.bucket.optimizer is not None
            _step_by_class(self.bucket.optimizer, left)

    def uncount(self) -> None:
        """The last step by the kernels was one that `found_inf` has left out."""
        for part in self.parts:
            if part.fused is not None:
                part.fused.uncount()

    def forget_states(self) -> None:
        """The state was replaced."""
        for part in self.parts:
            if part.fused is not None:
                part.fused.forget()


@dataclass(frozen=True)
class Part:
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
    optimizer: Optimizer, parts: Sequence[tuple[Part, Sequence[Tensor | None]]]
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


def _scaled(gradients: Gradients, scale: float) -> list[Tensor | None]:
    return [None if gradient is None else gradient * scale for gradient in gradients]


def _bring_steps(optimizer: Optimizer, segments: Sequence[Segment]) -> None:
    """Where torch's fused classes expect the numbers of steps: beside the values."""
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
    return segment.of(whole)


def _require_taken(member: Member, gradient: Tensor, is_averaged: bool) -> None:
    """Raises InvalidUsage where a step can't take a gradient that pydist's reducer has not left."""
    if is_averaged:
        raise InvalidUsage(
            f"the gradient of parameter {member.name} was put there by hand, or replaced, and "
            "is this rank's alone: each rank updates a part of every parameter, so call the "
            "pydist.DataParallel model's sync_gradients() before step(), on all ranks, which "
            "averages it"
        )
    if gradient.is_sparse:
        raise InvalidUsage(
            f"the gradient of parameter {member.name} is sparse, and pydist.ShardedOptimizer takes "
            "dense ones: build the embedding with sparse=False"
        )
