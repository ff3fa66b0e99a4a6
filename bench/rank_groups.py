"""Ranks that live for several benchmarks, and measure in turns."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from launch import Ranks
from replayed_times import Record
from turns import Pair, take_turns

# Of a call on all ranks, and of a benchmark: the first says more when it passes.
CALL_LIMIT_S = 45.0
BENCHMARK_LIMIT_S = 90.0
_BUDGET_S = 1.0

MeasureInTurns = Callable[..., None]


class RankGroups:
    """One group of ranks at a time: those of another would take processor time from it.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self._ranks: Ranks | None = None

    def run(self, nprocs: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls `function(*args)` on each of `nprocs` ranks; returns the values in rank order.

        Raises:
            AssertionError: a rank raised, died or hung; the message shows them all. The next call
                gets new ranks.
        """
        if self._ranks is None or self._ranks.nprocs != nprocs:
            self.close()
            self._ranks = Ranks(nprocs)
        try:
            return self._ranks.run(function, *args, timeout=CALL_LIMIT_S)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the ranks. The next call gets new ones, which have joined no job yet."""
        if self._ranks is not None:
            self._ranks.close()
        self._ranks = None


@pytest.fixture(scope="session")
def rank_groups() -> Iterator[RankGroups]:
    groups = RankGroups()
    yield groups
    groups.close()


@pytest.fixture
def measure_in_turns(rank_groups: RankGroups, record: Record) -> MeasureInTurns:
    """`measure_in_turns(nprocs, make_pair, *args)`: measures that pair on as many ranks.

    The ranks get `make_pair` by name: it stands at the top level of its module.
    """

    def measure(nprocs: int, make_pair: Callable[..., Pair], *args: object) -> None:
        record(rank_groups.run(nprocs, take_turns, make_pair, args, _BUDGET_S)[0])

    return measure
