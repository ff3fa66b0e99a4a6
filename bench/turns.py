"""Times of a subject and its reference, which take turns: A B A B ...

A *subject* is what a benchmark is about, its *reference* something that does the same work by other
means. Both run in the same processes, round by round, so that they meet the same noise; what is
kept of a run is their ratio (`pydist.benchmarks.noise`). A round's time is that of the slowest
rank.
"""

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

import pydist
from pydist.benchmarks.machine import pin

# Fewer rounds make an interval of little worth, more hardly narrow it.
_LEAST_ROUNDS = 15
_MOST_ROUNDS = 300
# Reading the clock and meeting the others cost as much as a small call: those are timed in batches.
_BATCH_S = 1e-3
_MOST_CALLS = 500


@dataclass(frozen=True)
class Pair:
    """What takes turns. Every rank calls both.

    Attributes:
        subject: What the benchmark is about.
        reference: What it is compared with.
        reference_name: What that is, for people.
        warm_up_calls: Of each, before anything is timed.
    """

    subject: Callable[[], object]
    reference: Callable[[], object]
    reference_name: str
    warm_up_calls: int = 3


@dataclass
class Times:
    """Seconds a call, one of each for every round."""

    reference_name: str
    subject_s: list[float] = field(default_factory=list)
    reference_s: list[float] = field(default_factory=list)


def join() -> None:
    """Joins the job, pinned to a core. Does nothing in a process that has joined already."""
    if not pydist.is_initialized():
        # Before the engine's threads start: they inherit it.
        pin(int(os.environ["RANK"]))
        pydist.init("native")


def take_turns(make_pair: Callable[..., Pair], args: tuple[object, ...], budget_s: float) -> Times:
    """On each rank: measures the pair that `make_pair(*args)` makes there.

    Rank 0 decides when it is enough.

    Args:
        make_pair: Called once `join` has been.
        args: For it.
        budget_s: About how long all rounds take, if that is enough for a few of them.
    """
    join()
    pair = make_pair(*args)
    slowest = torch.zeros(1, dtype=torch.float64)
    subject_calls = _calls_of_a_round(pair.subject, pair.warm_up_calls, slowest)
    reference_calls = _calls_of_a_round(pair.reference, pair.warm_up_calls, slowest)
    times = Times(pair.reference_name)
    for _ in _rounds(budget_s):
        times.reference_s.append(_time_calls(pair.reference, reference_calls, slowest))
        times.subject_s.append(_time_calls(pair.subject, subject_calls, slowest))
    return times


def fastest_arm(
    make_arms: Callable[..., list[Callable[[], object]]], args: tuple[object, ...], budget_s: float
) -> float:
    """Seconds a call of the fastest of some ways to do the same. Every rank calls it.

    As bench/peers/all_reduce.c measures its own arms: they take turns, with nobody else's calls
    between theirs, and the median counts.

    Args:
        make_arms: Called with `args`, once `join` has been.
        args: For it.
        budget_s: About how long all rounds take, if that is enough for a few of them.
    """
    join()
    arms = make_arms(*args)
    slowest = torch.zeros(1, dtype=torch.float64)
    calls = [_calls_of_a_round(arm, 3, slowest) for arm in arms]
    times: list[list[float]] = [[] for _ in arms]
    for _ in _rounds(budget_s):
        for arm, count, seconds in zip(arms, calls, times, strict=True):
            seconds.append(_time_calls(arm, count, slowest))
    return min(statistics.median(seconds) for seconds in times)


def _rounds(budget_s: float) -> Iterator[None]:
    """As many on every rank as rank 0 finds enough."""
    more = torch.ones(1, dtype=torch.int32)
    end_s = time.perf_counter() + budget_s
    for done in itertools.count(1):
        yield
        is_enough = done >= _LEAST_ROUNDS and time.perf_counter() > end_s
        more[0] = not is_enough and done < _MOST_ROUNDS
        pydist.broadcast(more, root=0)
        if not more[0]:
            return


def _calls_of_a_round(call: Callable[[], object], warm_up_calls: int, slowest: torch.Tensor) -> int:
    """The same on every rank."""
    _time_calls(call, warm_up_calls, slowest)
    once_s = _time_calls(call, 3, slowest)
    return max(1, min(_MOST_CALLS, int(_BATCH_S / once_s)))


def _time_calls(call: Callable[[], object], calls: int, slowest: torch.Tensor) -> float:
    """Seconds a call, on the slowest rank."""
    pydist.barrier()
    start_s = time.perf_counter()
    for _ in range(calls):
        call()
    slowest[0] = (time.perf_counter() - start_s) / calls
    pydist.all_reduce(slowest, "max")
    return float(slowest[0])
