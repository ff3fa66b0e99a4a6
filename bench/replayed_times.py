"""Hands measured times and their ratio to pytest-benchmark.

Note [Replayed times]
pytest-benchmark calls what it measures, and reads a clock before and after. Here the ranks measure:
in turns with a reference, and the slowest counts. So it is given a clock of ours, and a function
that moves the clock on by what was measured in the next round. Its tables and its files then hold
the subject's times. Its own timing of a function in this process would hold our messages to the
ranks, too.
"""

from collections.abc import Callable

import pytest
from other_processes import OtherProcesses
from pytest_benchmark.fixture import BenchmarkFixture
from turns import Times

from pydist.benchmarks.noise import ratio_of

Record = Callable[[Times], None]


class ReplayedClock:
    """Stands still but for what is put in; see Note [Replayed times]."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def read(self) -> float:
        return self._now_s

    def move_on(self, seconds: float) -> None:
        self._now_s += seconds


# pytest-benchmark takes a clock from a mark, before any fixture exists.
CLOCK = ReplayedClock()


@pytest.fixture
def record(benchmark: BenchmarkFixture) -> Record:
    """`record(times)`: the subject's times for the tables, the ratio for comparisons later."""
    others = OtherProcesses()

    def hand_over(times: Times) -> None:
        ratio = ratio_of(times.subject_s, times.reference_s)
        benchmark.extra_info.update(
            ratio=ratio.median,
            low=ratio.low,
            high=ratio.high,
            reference=times.reference_name,
            others=others.share(),
        )
        seconds = iter(times.subject_s)
        benchmark.pedantic(  # type: ignore[no-untyped-call]
            lambda: CLOCK.move_on(next(seconds)), rounds=len(times.subject_s)
        )

    return hand_over
