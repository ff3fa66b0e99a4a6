"""The ranks of all_reduce.py: pydist's all_reduce and gloo's take turns, in the same processes."""

from __future__ import annotations

from datetime import timedelta
from functools import partial

import joining
import torch
import torch.distributed as dist
from turns import Pair, Times, take_turns

import pydist
from pydist.benchmarks import machine

_gloo: list[dist.ProcessGroup] = []


def join() -> str:
    """Joins as joining.py does, and makes a group on gloo. Every rank calls it."""
    backend = joining.join()
    with machine.unpinned():
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=joining.TIMEOUT_S))
    assert group is not None
    _gloo.append(group)
    return backend


def measure(size_bytes: int, budget_s: float) -> Times:
    """Times of pydist and of gloo, once both are known to be right. Every rank calls it."""
    _check(size_bytes)
    return take_turns(_pair, (size_bytes,), budget_s)


def _pair(size_bytes: int) -> Pair:
    tensor = torch.zeros(size_bytes // 4)
    return Pair(
        partial(pydist.all_reduce, tensor),
        partial(dist.all_reduce, tensor, group=_gloo[0]),
        "gloo",
    )


def _check(size_bytes: int) -> None:
    """Small integers, which every order of summation adds up exactly."""
    ranks = pydist.world_size()
    ones = torch.arange(size_bytes // 4).remainder_(7).add_(1).to(torch.float32)
    tensor = ones * (pydist.rank() + 1)
    pydist.all_reduce(tensor)
    wrong = int((tensor != ones * (ranks * (ranks + 1) // 2)).sum())
    if wrong:
        raise AssertionError(f"all_reduce of {size_bytes} bytes: {wrong} elements are wrong")
