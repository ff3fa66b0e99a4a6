"""The ranks of all_reduce.py: pydist's all_reduce and gloo's take turns, in the same processes."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial

import joining
import torch
import torch.distributed as dist
from turns import Pair, Times, fastest_arm, take_turns

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


def measure(size_bytes: int, budget_s: float, is_symmetric: bool = False) -> Times:
    """Times of pydist and of gloo, once both are known to be right. Every rank calls it.

    Args:
        size_bytes: Of the tensor, float32.
        budget_s: Seconds.
        is_symmetric: Whether pydist's tensor is in symmetric memory; gloo's never is.
    """
    _check(_zeros(size_bytes, is_symmetric))
    return take_turns(_pair, (size_bytes, is_symmetric), budget_s)


def measure_alone(size_bytes: int, budget_s: float, is_symmetric: bool = False) -> float:
    """Seconds of pydist's, in place or out of place, whichever is faster. Every rank calls it.

    Args:
        size_bytes: Of the tensor, float32.
        budget_s: Seconds.
        is_symmetric: Whether the tensors are in symmetric memory.
    """
    return fastest_arm(_arms, (size_bytes, is_symmetric), budget_s)


def _arms(size_bytes: int, is_symmetric: bool) -> list[Callable[[], object]]:
    own, tensor, out = (_zeros(size_bytes, is_symmetric) for _ in range(3))
    return [partial(pydist.all_reduce, own), partial(pydist.all_reduce, tensor, out=out)]


def _zeros(size_bytes: int, is_symmetric: bool) -> torch.Tensor:
    shape = size_bytes // 4
    return pydist.symmetric_empty(shape).zero_() if is_symmetric else torch.zeros(shape)


def _pair(size_bytes: int, is_symmetric: bool) -> Pair:
    return Pair(
        partial(pydist.all_reduce, _zeros(size_bytes, is_symmetric)),
        partial(dist.all_reduce, torch.zeros(size_bytes // 4), group=_gloo[0]),
        "gloo",
    )


def _check(tensor: torch.Tensor) -> None:
    """Small integers, which every order of summation adds up exactly."""
    ranks = pydist.world_size()
    size_bytes = tensor.nbytes
    ones = torch.arange(tensor.numel()).remainder_(7).add_(1).to(torch.float32)
    tensor.copy_(ones * (pydist.rank() + 1))
    pydist.all_reduce(tensor)
    wrong = int((tensor != ones * (ranks * (ranks + 1) // 2)).sum())
    if wrong:
        raise AssertionError(f"all_reduce of {size_bytes} bytes: {wrong} elements are wrong")
