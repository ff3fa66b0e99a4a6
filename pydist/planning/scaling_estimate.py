"""Predicts a training step on many hosts from shapes, costs and the time of a step on one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from pydist.errors import InvalidUsage
from pydist.parallel.bucket_planner import PlannedParameter
from pydist.parallel.wrapper import DataParallel
from pydist.planning.costs import Costs
from pydist.planning.exchange_time import Shape, seconds
from pydist.planning.gradient_buckets import (
    data_parallel_cap_bytes,
    gradients_of,
    ready_buckets,
    ready_shares_by_size,
    sharded_cap_bytes,
)
from pydist.planning.scaling_plan import MOST_HOSTS, ScalingPlan, ScalingRow, numbers_of_hosts
from pydist.planning.step_time import Compute, data_parallel_step, sharded_step

_ALWAYS_ASSUMED = (
    "every host has the same number of ranks, and every rank the same work: none is late",
    "the network between the hosts carries whatever their links do, and nobody else uses it",
    "all hosts exchange directly: a rank sends to its counterpart on every other host at once",
    "of two ways to average a bucket, the faster one by this model is taken",
    "averaging takes no processor time from forward and backward",
    "gradients are in the hosts' memory, in the model's dtype; copies from and to GPUs are not "
    "counted",
)


def scaling(
    model: nn.Module,
    hosts: int,
    ranks_per_host: int,
    costs: Costs,
    *,
    compute: Compute | None,
    dtype: torch.dtype | None = None,
    bucket_cap_mb: float | None = None,
    ready_shares: Mapping[str, float] | None = None,
    assumptions: Sequence[str] = (),
) -> ScalingPlan:
    """Predicts steps on 1 host, 8, 16 and so on. Each rank has the same work on any number of them.

    Args:
        model: On any device, "meta" included. Its values are never read.
        hosts: The most, up to 1024.
        ranks_per_host: On each.
        costs: Of messages and bytes.
        compute: Of a step on one rank without communication; None: unknown.
        dtype: That the model's floating-point parameters would have; default: that which they have.
        bucket_cap_mb: As for pydist.DataParallel; default: as that chooses on such links.
        ready_shares: For names of parameters, the share of backward after which the gradient is
            there; default: the share of all gradients' bytes up to it.
        assumptions: The caller's, such as where the costs are from.

    Raises:
        InvalidUsage: There are no such numbers of hosts and ranks.
    """
    if not 1 <= hosts <= MOST_HOSTS:
        raise InvalidUsage(f"{hosts} hosts: the model predicts 1 to {MOST_HOSTS}")
    if ranks_per_host < 1:
        raise InvalidUsage(f"{ranks_per_host} ranks per host: there is one at least")
    module = model.module if isinstance(model, DataParallel) else model
    gradients = gradients_of(module, dtype)
    shares = ready_shares_by_size(gradients)
    notes = [*assumptions]
    if ready_shares is None and compute is not None:
        notes.append(
            "backward completes gradients in the reverse order of registration, after shares of "
            "its time that are their shares of all bytes"
        )
    elif ready_shares is not None:
        gradients, shares = _in_order(gradients, ready_shares)
    if compute is None:
        notes.append(
            "nothing is known of the time to compute a step, so all communication is shown, hidden "
            "or not: give --step-ms or --measure-step for step times and efficiency"
        )
    rows = [
        _row(Shape(count, ranks_per_host), costs, compute, gradients, shares, bucket_cap_mb)
        for count in numbers_of_hosts(hosts)
    ]
    return ScalingPlan(tuple(rows), compute, (*notes, *_ALWAYS_ASSUMED))


def _in_order(
    gradients: Sequence[PlannedParameter], ready_shares: Mapping[str, float]
) -> tuple[list[PlannedParameter], dict[str, float]]:
    """By the moments that were seen. What got no gradient travels at the end of backward."""
    shares = {gradient.name: ready_shares.get(gradient.name, 1.0) for gradient in gradients}
    return sorted(gradients, key=lambda gradient: shares[gradient.name]), shares


def _row(
    shape: Shape,
    costs: Costs,
    compute: Compute | None,
    gradients: Sequence[PlannedParameter],
    shares: Mapping[str, float],
    bucket_cap_mb: float | None,
) -> ScalingRow:
    total_bytes = sum(gradient.size_bytes for gradient in gradients)
    ddp_cap = data_parallel_cap_bytes(
        total_bytes, bucket_cap_mb, lambda size: seconds("all_reduce", costs, shape, size)
    )
    sharded_cap = sharded_cap_bytes(total_bytes, bucket_cap_mb)
    computed = compute or Compute(0.0, 0.0)
    return ScalingRow(
        shape.hosts,
        shape.ranks,
        data_parallel_step(computed, ready_buckets(gradients, shares, ddp_cap), costs, shape),
        sharded_step(computed, ready_buckets(gradients, shares, sharded_cap), costs, shape),
    )
