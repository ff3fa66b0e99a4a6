"""Which gradients of a wrapped model travel together: who plans it."""

from __future__ import annotations

from collections.abc import Sequence

from pydist.parallel.bucket_planner import (
    PlannedParameter,
    best_cap_bytes,
    plan_buckets,
    typical_cap_bytes,
)
from pydist.parallel.wrapper_parts.shard_owners import HasShardOwners


class Buckets(HasShardOwners):
    """The part of `pydist.DataParallel` that plans buckets."""

    def plan_buckets(
        self, parameters: Sequence[PlannedParameter], bucket_cap_bytes: int
    ) -> list[list[int]]:
        """Cuts the gradients into buckets. Override it to choose them yourself.

        Called on rank 0 alone, by the constructor of this class, after steps whose order did not
        fit the plan (the 1st, 2nd, 4th, 8th, ... at most), and when parameters have joined. All
        ranks get what it returns.

        Args:
            parameters: Those with dense gradients, in the order in which backward is expected to
                complete them: at first the reverse of registration.
            bucket_cap_bytes: `bucket_cap_mb`, or what measurements found best; with a
                `pydist.ShardedOptimizer`, what is best for a model of that size on a typical link.

        Returns:
            The buckets in the order of launching, each a list of `PlannedParameter.index`: every
            parameter exactly once, and in one bucket only such of one `block`.
        """
        return plan_buckets(parameters, bucket_cap_bytes)

    @property
    def _is_static(self) -> bool:
        """Whether torch would take the graph for static: `_set_static_graph()` may come late."""
        told = {**self._settings.of_torch, **self._torch_attributes, **self.__dict__}
        return bool(told["static_graph"])


def planned_by(
    wrapper: Buckets | None,
    caps_bytes: tuple[int, ...],
    parameters: Sequence[PlannedParameter],
    latency_s: float,
    seconds_per_byte: float,
) -> list[list[int]]:
    """Plans the buckets of a wrapper, or, where it is gone, of its reducer; see `Planner`.

    Args:
        wrapper: The one.
        caps_bytes: The sizes at which buckets are closed; empty: as measured.
        parameters: In the order in which their gradients are expected.
        latency_s: What the smallest all-reduce takes.
        seconds_per_byte: What each byte beyond that takes.
    """
    if wrapper is not None and wrapper._torch_buckets is not None:
        return wrapper._torch_buckets.plan(parameters, is_static=wrapper._is_static)
    if not caps_bytes:
        total_bytes = sum(parameter.size_bytes for parameter in parameters)
        if wrapper is not None and any(wrapper.shard_owners()):
            caps_bytes = (typical_cap_bytes(total_bytes),)
        else:
            caps_bytes = (best_cap_bytes(total_bytes, latency_s, seconds_per_byte),)
    # Without the wrapper, a last backward of its graph is under way.
    if wrapper is None or type(wrapper).plan_buckets is Buckets.plan_buckets:
        return plan_buckets(parameters, caps_bytes)
    return wrapper.plan_buckets(parameters, max(caps_bytes))
