"""One bucket's step: the wrapped class on this rank's segments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pydist.errors import InvalidUsage
from pydist.parameter_groups import options_of
from pydist.sharded_gradient import ShardedGradient
from pydist.sharded_parameters import Bucket, Segment


def equip(
    bucket: Bucket,
    param_groups: Sequence[dict[str, Any]],
    make: Callable[[list[dict[str, Any]]], Optimizer],
) -> None:
    """Makes the optimizer of a bucket's segments.

    Args:
        bucket: Without one.
        param_groups: Of whole parameters.
        make: Makes one of the wrapped class, of the groups that it is given.
    """
    group_of = {
        id(parameter): number
        for number, group in enumerate(param_groups)
        for parameter in group["params"]
    }
    own = []
    for number, group in enumerate(param_groups):
        updated = [
            segment.updated
            for segment in bucket.segments
            if group_of[id(segment.member.parameter)] == number
        ]
        if updated:
            own.append({**options_of(group), "params": updated, "number": number})
    if own:
        bucket.optimizer = make(own)


def step_bucket(bucket: Bucket, param_groups: Sequence[dict[str, Any]]) -> None:
    """Updates this rank's shard of a bucket.

    Args:
        bucket: Its gather is over.
        param_groups: Of whole parameters, with the options for this step.
    """
    bucket.take_back_strays()
    if bucket.has_masters:
        for segment in bucket.segments:
            segment.refresh_master()
    torch.autograd.graph.increment_version(bucket.parameters)
    if bucket.optimizer is None:
        return
    for group in bucket.optimizer.param_groups:
        group.update(options_of(param_groups[group["number"]]))
    stepping = []
    for segment in bucket.segments:
        gradient = _gradient_of(segment)
        if gradient is not None and segment.has_master:
            gradient = gradient.to(segment.updated.dtype)
        segment.updated.grad = gradient
        if gradient is not None:
            stepping.append(segment)
    _unhooked_step(bucket.optimizer)
    for segment in stepping:
        if segment.has_master:
            segment.values.copy_(segment.updated)
        segment.updated.grad = None
    if bucket.has_masters:
        for segment in bucket.segments:
            segment.version = segment.member.parameter._version


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


def _unhooked_step(optimizer: Optimizer) -> None:
    """Steps without the hooks and profiles of an optimizer of its own: it is a part of one."""
    step = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]
    step(optimizer)
