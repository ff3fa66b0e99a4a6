"""Ratios of times that were measured in turns, and whether the machine let them tell anything.

Times of a shared machine drift by tens of percent within minutes, so no absolute time is compared
with one of another run. What is compared takes turns instead (A B A B ...): the two times of a
round meet about the same machine, and their ratio says something even where neither time does.
"""

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from pydist.errors import InvalidUsage

_RESAMPLES = 1000
_CONFIDENCE = 0.95
# Of single times: with quartiles this far apart (as a share of the median), somebody else is using
# the machine, and differences of a few percent are beyond it.
_NOISY_SPREAD = 0.25


@dataclass(frozen=True)
class Ratio:
    """A median of ratios, and the interval that holds it in 95 % of resamplings of the rounds."""

    median: float
    low: float
    high: float

    @property
    def tells(self) -> bool:
        """Whether the interval excludes 1: one of the two is faster."""
        return self.low > 1 or self.high < 1

    def __str__(self) -> str:
        digits = 2 if self.median < 10 else 1 if self.median < 100 else 0
        return f"{self.median:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of the values lie, linearly interpolated."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def bootstrap_interval(
    rounds: int, statistic: Callable[[Sequence[int]], float]
) -> tuple[float, float]:
    """The interval that holds a statistic in 95 % of resamplings of the rounds.

    Args:
        rounds: how many rounds were measured, 1 or more.
        statistic: takes indices of rounds, some of them repeatedly, others not at all.

    Returns:
        Its lower and upper end (Efron's percentile bootstrap, with a fixed seed).
    """
    generator = random.Random(0)
    everyone = range(rounds)
    values = [statistic(generator.choices(everyone, k=rounds)) for _ in range(_RESAMPLES)]
    tail = (1 - _CONFIDENCE) / 2
    return percentile(values, tail), percentile(values, 1 - tail)


def ratio_of(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """The median ratio of two series of times that took turns: one of each a round.

    Raises:
        InvalidUsage: the series differ in length, or are empty.
    """
    if len(numerators) != len(denominators) or not numerators:
        raise InvalidUsage(
            f"a ratio needs two series of as many rounds, 1 or more; these have {len(numerators)} "
            f"and {len(denominators)}."
        )
    ratios = [a / b for a, b in zip(numerators, denominators, strict=True)]
    low, high = bootstrap_interval(
        len(ratios), lambda rounds: statistics.median(ratios[i] for i in rounds)
    )
    return Ratio(statistics.median(ratios), low, high)


def spread_of(times: Sequence[float]) -> float:
    """The distance of the quartiles, as a share of the median."""
    middle = statistics.median(times)
    return _between_quartiles(times) / middle if middle else 0.0


def _between_quartiles(times: Sequence[float]) -> float:
    return percentile(times, 0.75) - percentile(times, 0.25)


def is_noisy(times: Sequence[float]) -> bool:
    """Whether times of one and the same thing vary so much that somebody else uses the machine."""
    return len(times) > 3 and spread_of(times) > _NOISY_SPREAD


@dataclass(frozen=True)
class TwoGroups:
    """Times that fall into two groups, as those of a machine that has changed its state do."""

    # Medians.
    low: float
    high: float
    # Of the times: how many are in the low group.
    share_low: float


def two_groups(times: Sequence[float]) -> TwoGroups | None:
    """The two groups that times of one and the same thing fall into; None where they are one.

    They are cut where the sum of their squared distances from the two means is least (Otsu 1979).
    They are two where a tenth of the times or more, and three at least, are in each, the medians
    differ by a quarter or more, and the gap between the groups is wider than the quartiles of
    either are apart.
    """
    ordered = sorted(times)
    count = len(ordered)
    least = max(3, -(-count // 10))
    if count < 2 * least or ordered[0] <= 0:
        return None
    sums = list(accumulate(ordered, initial=0.0))

    def distance(cut: int) -> float:
        """What Otsu's sum lacks to that of one group."""
        means = sums[cut] / cut, (sums[-1] - sums[cut]) / (count - cut)
        return cut * (count - cut) * (means[1] - means[0]) ** 2

    cut = max(range(least, count - least + 1), key=distance)
    below, above = ordered[:cut], ordered[cut:]
    low, high = statistics.median(below), statistics.median(above)
    gap = above[0] - below[-1]
    if high < 1.25 * low or gap <= max(map(_between_quartiles, (below, above))):
        return None
    return TwoGroups(low, high, cut / count)


def are_of_two_places(distances_ns: Sequence[float]) -> bool:
    """Whether cores were moved between times at which a cache line took so many nanoseconds.

    Cores that share a cache take 25 to 60 ns, others 210 to 320 (Zen 5).
    """
    return max(distances_ns, default=0) > 3 * min(distances_ns, default=0)


def noise_of_steps(times: Sequence[float]) -> list[str]:
    """A warning where times of one and the same step are noisy."""
    if not is_noisy(times):
        return []
    return [
        f"the quartiles of one and the same step are {spread_of(times):.0%} of its median apart: "
        "something else uses this machine"
    ]
