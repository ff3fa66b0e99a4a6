"""The buckets in which a model's gradients will travel, found from shapes alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from pydist.parallel.bucket_planner import (
    PlannedParameter,
    best_cap_bytes,
    cap_bytes_of,
    plan_buckets,
    typical_cap_bytes,
)
from pydist.parallel.rank_local import RankLocal
from pydist.parallel.trained_parameters import ids_of_sparse
from pydist.planning.step_time import ReadyBucket

# At these sizes DataParallel measures the link (csrc/reducer/link_speed.cc).
_SMALL_BYTES = 4096
_LARGE_BYTES = 4 << 20


def gradients_of(model: nn.Module, dtype: torch.dtype | None) -> list[PlannedParameter]:
    """The gradients that travel, in the order in which backward is expected to complete them.

    Args:
        model: On any device.
        dtype: That its floating-point parameters would have; default: that which they have.
    """
    left_out = ids_of_sparse(model) | {id(p) for _, p in RankLocal(model).parameters()}
    found: list[PlannedParameter] = []
    blocks: dict[torch.dtype, int] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or id(parameter) in left_out:
            continue
        kind = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
        block = blocks.setdefault(kind, len(blocks))
        size_bytes = parameter.numel() * kind.itemsize
        found.append(PlannedParameter(len(found), name, size_bytes, block, True))
    return found[::-1]


def ready_shares_by_size(gradients: Sequence[PlannedParameter]) -> dict[str, float]:
    """For each gradient the share of all bytes that backward has completed with it."""
    total = sum(gradient.size_bytes for gradient in gradients)
    shares, done = {}, 0
    for gradient in gradients:
        done += gradient.size_bytes
        shares[gradient.name] = done / total if total else 1.0
    return shares


def data_parallel_cap_bytes(
    total_bytes: int, bucket_cap_mb: float | None, all_reduce_s: Callable[[int], float]
) -> int:
    """How pydist.DataParallel chooses the size of buckets.

    Args:
        total_bytes: Of all gradients.
        bucket_cap_mb: The user's choice.
        all_reduce_s: What an all-reduce of so many bytes takes, which it measures.
    """
    if (chosen := cap_bytes_of(bucket_cap_mb)) is not None:
        return chosen
    small_s = all_reduce_s(_SMALL_BYTES)
    slope = (all_reduce_s(_LARGE_BYTES) - small_s) / (_LARGE_BYTES - _SMALL_BYTES)
    return best_cap_bytes(total_bytes, small_s, slope)


def sharded_cap_bytes(total_bytes: int, bucket_cap_mb: float | None) -> int:
    """How pydist.ShardedOptimizer chooses the size of buckets, in the same arguments."""
    return cap_bytes_of(bucket_cap_mb) or typical_cap_bytes(total_bytes)


def ready_buckets(
    gradients: Sequence[PlannedParameter], ready_shares: Mapping[str, float], cap_bytes: int
) -> list[ReadyBucket]:
    """Buckets in the order of launching, each with the share of backward after which it is there.

    Args:
        gradients: In the order in which backward completes them.
        ready_shares: For each of their names, when; growing in that order.
        cap_bytes: Of a bucket.
    """
    by_index = {gradient.index: gradient for gradient in gradients}
    found: list[ReadyBucket] = []
    for members in plan_buckets(gradients, cap_bytes):
        ready_share = max(ready_shares[by_index[index].name] for index in members)
        size_bytes = sum(by_index[index].size_bytes for index in members)
        found.append(ReadyBucket(size_bytes, ready_share))
    return found
