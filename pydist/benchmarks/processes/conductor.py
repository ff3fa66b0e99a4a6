"""Measures cases on all arms in turns, and says what came out.

Of each size, every arm has a turn in every round (A B C A B C ...), so that all meet the same
machine; ratios are taken within a round. A time is that of the slowest rank.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydist.benchmarks.collective_cases import Case
from pydist.benchmarks.noise import Ratio, percentile, ratio_of
from pydist.benchmarks.processes.rank_commands import Check, Distance, Failed, Reserve, Tell, Time
from pydist.benchmarks.processes.ranks import ROOFLINE, Ranks
from pydist.benchmarks.tuned import Tuned
from pydist.errors import Error

# A turn takes about this long where calls are short; the clock is read around all of them.
_TURN_S = 5e-3
_MOST_CALLS = 2000
_FEWEST_ROUNDS = 10
# From here on, reading the clock is less than 1 % of a call, so that a turn need not be repeated to
# learn the times of single calls.
_LONG_S = 20e-6


@dataclass(frozen=True)
class Effort:
    """How thoroughly a size is measured."""

    # Seconds for a size, all arms together; a few rounds are made in any case.
    seconds: float = 1.0
    # Calls in a turn; None for as many as fill five milliseconds.
    calls: int | None = None
    warmup: int = 5
    # Checked calls of each arm.
    checks: int = 1


@dataclass
class Series:
    """The times of one case on one arm."""

    arm: str
    case: Case
    # Seconds for a call, one mean a round.
    rounds: list[float] = field(default_factory=list)
    # Seconds of single calls.
    singles: list[float] = field(default_factory=list)
    # Elements with a wrong value in all checked calls, on all ranks; None where none was checked.
    wrong: int | None = None
    # Why the arm can't do it.
    unsupported: str | None = None
    # Calls in a turn, and whether each of them is long enough to be timed by itself.
    calls: int = 1
    are_long: bool = False

    @property
    def seconds(self) -> float:
        """For a call: the median over the rounds."""
        return statistics.median(self.rounds)

    def single(self, share: float) -> float:
        """A percentile (0 to 1) of single calls, in seconds."""
        return percentile(self.singles, share)

    def ratio_to(self, other: "Series") -> Ratio:
        """How many times as long as the other's calls this one's take."""
        return ratio_of(self.rounds, other.rounds)


class Conductor:
    """Leads the ranks of all arms. Not thread safe."""

    def __init__(self, groups: Sequence[Ranks], effort: Effort) -> None:
        self._groups = list(groups)
        self._effort = effort
        self._group_of = {arm: group for group in groups for arm in group.arms}

    @property
    def arms(self) -> list[str]:
        return list(self._group_of)

    def reserve(self, size_bytes: int) -> dict[str, str]:
        """Allocates the buffers of all arms; a description of each arm.

        Raises:
            Error: there is no room for them.
        """
        descriptions: dict[str, str] = {}
        for group in self._groups:
            answers = group.ask(Reserve(size_bytes))
            _require(answers, ", ".join(group.arms))
            descriptions |= answers[0]
        return descriptions

    def measure(
        self, cases: Sequence[Case], note: Callable[[str], None] = lambda text: None
    ) -> list[Series]:
        """Measures cases of one size on every arm.

        Args:
            cases: those that differ in place only.
            note: is told what is going on.

        Returns:
            A series for each arm and case.

        Raises:
            Error: an arm failed.
        """
        series = [Series(arm, case) for case in cases for arm in self._group_of]
        for one in series:
            note(f"{one.arm}: first calls")
            self._begin(one)
        able = [one for one in series if one.unsupported is None]
        end_s = time.perf_counter() + self._effort.seconds
        done = 0
        while done < _FEWEST_ROUNDS or time.perf_counter() < end_s:
            done += 1
            # There and back, so that no arm always comes after the same other one.
            for one in able if done % 2 else reversed(able):
                note(f"{one.arm}: round {done}")
                self._take_turn(one)
        return series

    def probe(self, arm: str, case: Case) -> float:
        """Seconds of a case on one arm, from one turn, by which to know a machine's state.

        Raises:
            Error: the arm failed.
        """
        one = Series(arm, case)
        self._warm_up(one)
        return self._slowest_mean(self._time(one, each=False))

    def distance_ns(self) -> float | None:
        """How far the first host's cores are from each other: nanoseconds of a cache line.

        Returns:
            Those to the farthest rank, from the first; None where nobody can tell: on other
            backends than the native one, or with one rank on the host.

        Raises:
            Error: a rank failed.
        """
        answers = self._group_of[ROOFLINE].ask(Distance())
        _require(answers, ROOFLINE)
        return max(answers[0], default=None)

    def tuned(self, arm: str) -> list[list[Tuned]]:
        """What the tuner has chosen on each rank that carries an arm.

        Raises:
            Error: a rank failed.
        """
        answers = self._group_of[arm].ask(Tell())
        _require(answers, arm)
        return answers

    def _begin(self, one: Series) -> None:
        """Checks results, and warms up."""
        for _ in range(self._effort.checks if one.case.count else 0):
            wrong = self._ask(one, Check(one.arm, one.case))
            if wrong is None:
                return
            one.wrong = (one.wrong or 0) + sum(wrong)
        self._warm_up(one)

    def _warm_up(self, one: Series) -> None:
        """Warms up, and learns how long a call takes."""
        warm_up = Time(one.arm, one.case, max(1, self._effort.warmup), each=True)
        answers = self._ask(one, warm_up)
        if answers is None:
            return
        once_s = min(max(times) for times in zip(*answers, strict=True))
        fitting = min(_MOST_CALLS, int(_TURN_S / once_s))
        one.calls = self._effort.calls or max(1, fitting)
        one.are_long = once_s >= _LONG_S

    def _take_turn(self, one: Series) -> None:
        if not one.are_long:
            one.rounds.append(self._slowest_mean(self._time(one, each=False)))
        times = self._time(one, each=True)
        one.singles.extend(max(of_call) for of_call in zip(*times, strict=True))
        if one.are_long:
            one.rounds.append(self._slowest_mean(times))

    @staticmethod
    def _slowest_mean(times: Sequence[Sequence[float]]) -> float:
        """The time of a turn on the slowest rank: the largest of the ranks' means."""
        return max(statistics.fmean(of_rank) for of_rank in times)

    def _time(self, one: Series, *, each: bool) -> list[list[float]]:
        """Seconds on each rank."""
        answers = self._ask(one, Time(one.arm, one.case, one.calls, each=each))
        if answers is None:
            raise Error(f"{one.arm}: {one.case.collective}: {one.unsupported}")
        return answers

    def _ask(self, one: Series, command: Check | Time) -> list[Any] | None:
        """The answers of all ranks, or None (and the reason in `one`) where the arm can't."""
        answers = self._group_of[one.arm].ask(command)
        failures = [answer for answer in answers if isinstance(answer, Failed)]
        if failures and all(failure.is_unsupported for failure in failures):
            one.unsupported = failures[0].message
            return None
        _require(answers, f"{one.arm}: {one.case.collective}")
        return answers


def _require(answers: Sequence[object], what: str) -> None:
    for rank, answer in enumerate(answers):
        if isinstance(answer, Failed):
            raise Error(f"{what}: rank {rank}: {answer.message}")
