"""The ranks of latency.py: single calls of pydist with a few bytes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

import pydist


@dataclass(frozen=True)
class Latencies:
    """Seconds, medians and means of single calls."""

    # Of a message: half a round trip.
    message_median_s: float
    message_mean_s: float
    # Of a call of the rank that takes longer.
    all_reduce_median_s: float
    all_reduce_mean_s: float


def measure(size_bytes: int, calls: int) -> Latencies:
    """Times messages and all_reduce between two ranks. Both call it.

    Args:
        size_bytes: of a tensor of float32.
        calls: of each; a tenth as many come before.
    """
    tensor = torch.zeros(size_bytes // 4)
    trips_s = _time_calls(partial(_go_and_return, tensor), calls)
    reductions_s = _time_calls(partial(pydist.all_reduce, tensor), calls)
    found = torch.tensor(
        [statistics.median(reductions_s), statistics.mean(reductions_s)], dtype=torch.float64
    )
    pydist.all_reduce(found, "max")
    # What the other rank sees of a round trip begins with a wait for the first message.
    mine = [statistics.median(trips_s) / 2, statistics.mean(trips_s) / 2]
    trips = torch.tensor(mine, dtype=torch.float64)
    pydist.broadcast(trips, root=0)
    return Latencies(*trips.tolist(), *found.tolist())


def _go_and_return(tensor: torch.Tensor) -> None:
    """Rank 0 sends, and rank 1 answers."""
    if pydist.rank() == 0:
        pydist.send(tensor, 1)
        pydist.recv(tensor, 1)
    else:
        pydist.recv(tensor, 0)
        pydist.send(tensor, 0)


def _time_calls(call: Callable[[], object], calls: int) -> list[float]:
    """Seconds of each."""
    for _ in range(max(1, calls // 10)):
        call()
    pydist.barrier()
    times_s = []
    for _ in range(calls):
        start_s = time.perf_counter()
        call()
        times_s.append(time.perf_counter() - start_s)
    return times_s
