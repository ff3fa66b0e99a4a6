"""Finds the numbers of the alpha-beta-gamma model from measured collectives.

Note [What data tell]: the time of a collective is a maximum of sums, so a number may not show at
all: on a slow link nobody sees what a processor takes for a byte. Such a number is not guessed.
After the fit, the measurements' scatter and the times' slopes say how far each number could be off;
one that could be off by more than MOST_DOUBT is refused, with what would tell it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
import numpy.typing as npt

from pydist.errors import InvalidUsage
from pydist.planning.costs import LINK_BETA, NAMES, Costs
from pydist.planning.exchange_time import (
    HOST_WAYS,
    WAYS,
    Collective,
    Shape,
    link_bytes,
    seconds,
)

# A number's standard error over the number.
MOST_DOUBT = 0.3
# Measurements are taken to scatter by this much at least, so that a few that happen to lie on a
# line don't seem to tell everything.
_LEAST_SCATTER = 0.02

_MOST_STEPS = 200
_STARTS = (1.0, 0.1, 10.0)
# Fits whose squares differ by a smaller share are equally good: what differs is rounding.
_SAME_SQUARES = 1e-6

Floats = npt.NDArray[np.float64]

# What tells a number, for errors.
_TOLD_BY = {
    "link.alpha_s": "sizes of a few bytes",
    LINK_BETA: "sizes of many MiB",
    "link.gamma_s_per_byte": "links so fast that the processor is the limit, and all_gather beside "
    "all_reduce",
    "link.message_s": "different numbers of hosts, at a few bytes",
    "link.rank_s_per_byte": "links so fast that the processor is the limit",
    "host.alpha_s": "sizes of a few bytes on one host of several ranks",
    "host.beta_s_per_byte": "all_gather of many MiB on one host of several ranks",
    "host.gamma_s_per_byte": "reduce_scatter of many MiB on one host of several ranks",
}


@dataclass(frozen=True)
class Measurement:
    """One collective that was timed.

    Attributes:
        hosts: How many.
        ranks_per_host: On each.
        size_bytes: Of the whole tensor.
        seconds: What it took, on the slowest rank.
        collective: Which.
        way: As for `exchange_time.seconds`.
        ranks_per_core: Where ranks shared cores (hosts that are namespaces of one machine share
            them, too), how many had to do with one.
        burst_bytes: Where a token bucket shapes the link, what that lets pass at full speed.
    """

    hosts: int
    ranks_per_host: int
    size_bytes: int
    seconds: float
    collective: Collective = "all_reduce"
    way: str = "auto"
    ranks_per_core: float = 1.0
    burst_bytes: int = 0

    def __post_init__(self) -> None:
        counts = (self.hosts, self.ranks_per_host, self.size_bytes)
        if min(counts) < 1 or not 0 < self.seconds < math.inf or self.hosts * counts[1] < 2:
            raise InvalidUsage(
                f"{self.hosts} hosts of {self.ranks_per_host} ranks, {self.size_bytes} bytes in "
                f"{self.seconds} s: a measurement has two ranks at least, a byte and a time above 0"
            )
        if self.collective not in get_args(Collective):
            raise InvalidUsage(
                f"the model has no {self.collective!r}; it has {', '.join(get_args(Collective))}"
            )
        if self.way != "auto" and (
            self.way not in {**WAYS, **HOST_WAYS} or self.collective != "all_reduce"
        ):
            raise InvalidUsage(
                f"the model has no way {self.way!r} of {self.collective}; of all_reduce it has "
                f"auto, {', '.join([*WAYS, *HOST_WAYS])}, of others auto"
            )

    @property
    def shape(self) -> Shape:
        return Shape(self.hosts, self.ranks_per_host)

    def predicted_s(self, costs: Costs) -> float:
        """What the model says that it takes."""
        costs = costs.crowded(self.ranks_per_core)
        call = (self.collective, costs, self.shape, self.size_bytes, self.way)
        at_once = min(self.burst_bytes, link_bytes(*call))
        return seconds(*call) - at_once * costs.link.beta_s_per_byte

    def error(self, costs: Costs) -> float:
        """What the model is off by, relative to what was measured: 0.1 if it says 10 % too much."""
        return self.predicted_s(costs) / self.seconds - 1


@dataclass(frozen=True)
class Fit:
    """What `fit` has found.

    Attributes:
        costs: With the numbers that were fitted and those that were known.
        fitted: Names of the former.
        doubt: Their standard errors, relative.
        errors: Of the measurements that were fitted, relative.
    """

    costs: Costs
    fitted: tuple[str, ...]
    doubt: tuple[float, ...]
    errors: tuple[float, ...]


def fit(measurements: Sequence[Measurement], known: Costs, names: Sequence[str]) -> Fit:
    """Least squares on relative errors (on logarithms, so that half and twice weigh alike).

    Args:
        measurements: At least one more than `names`.
        known: The numbers that are not fitted. Those that are begin from here.
        names: Of the numbers that are fitted, such as "link.alpha_s".

    Raises:
        InvalidUsage: There are too few measurements, or they can't tell the numbers: see
            Note [What data tell].
    """
    if unknown := [name for name in names if name not in NAMES]:
        raise InvalidUsage(f"the model has no {', '.join(unknown)}; it has {', '.join(NAMES)}")
    if len(measurements) <= len(names) or not names:
        raise InvalidUsage(
            f"{len(measurements)} measurements can't tell {len(names)} numbers: give one more at "
            "least than there are numbers, and one number at least"
        )
    begin = np.log([known.value(name) or 1e-9 for name in names])
    found = [_descend(measurements, known, names, begin + math.log(by)) for by in _STARTS]
    squares = [_cost(_residuals(measurements, known, names, logs)) for logs in found]
    # Of those that are as good as the best, the one that began nearest to the known numbers: where
    # measurements can't tell numbers, fits end anywhere, and that must not hang on the processor.
    enough = min(squares) * (1 + _SAME_SQUARES)
    logs = next(each for each, square in zip(found, squares, strict=True) if square <= enough)
    residuals = _residuals(measurements, known, names, logs)
    doubt = _doubt(_slopes(measurements, known, names, logs), residuals, names)
    costs = _with(known, names, logs)
    return Fit(costs, tuple(names), doubt, tuple(m.error(costs) for m in measurements))


def fit_what_shows(
    measurements: Sequence[Measurement], known: Costs, names: Sequence[str]
) -> tuple[Fit, list[str]]:
    """As `fit`, of as many numbers as the measurements can tell, the first ones of `names` first.

    Returns:
        The fit; and for each number that was left as it is known, why.

    Raises:
        InvalidUsage: They can't tell any.
    """
    found: Fit | None = None
    left = list(names)
    # What does not show beside wrong numbers may show beside those that were fitted since.
    while True:
        refused: dict[str, InvalidUsage] = {}
        for name in left:
            try:
                found = fit(measurements, known, (*(found.fitted if found else ()), name))
            except InvalidUsage as error:
                refused[name] = error
        if found is None:
            raise refused[names[0]]
        if len(refused) in (0, len(left)):
            texts = (f"{n} stays at {known.value(n):.3g} s: {why}" for n, why in refused.items())
            return found, list(texts)
        left = list(refused)


def _with(known: Costs, names: Sequence[str], logs: Floats) -> Costs:
    for name, value in zip(names, np.exp(logs), strict=True):
        known = known.with_value(name, float(value))
    return known


def _residuals(
    measurements: Sequence[Measurement], known: Costs, names: Sequence[str], logs: Floats
) -> Floats:
    costs = _with(known, names, logs)
    # One that the model says takes no time at all is told apart from all others by far.
    return np.array([math.log(max(m.predicted_s(costs), 1e-12) / m.seconds) for m in measurements])


def _cost(residuals: Floats) -> float:
    return float(residuals @ residuals)


def _slopes(
    measurements: Sequence[Measurement], known: Costs, names: Sequence[str], logs: Floats
) -> Floats:
    """By which share a time grows where a number grows by a share; one row a measurement."""
    step = 1e-5
    columns = []
    for place in range(len(names)):
        ends = []
        for sign in (1, -1):
            moved = logs.copy()
            moved[place] += sign * step
            ends.append(_residuals(measurements, known, names, moved))
        columns.append((ends[0] - ends[1]) / (2 * step))
    return np.stack(columns, axis=1)


def _descend(
    measurements: Sequence[Measurement], known: Costs, names: Sequence[str], logs: Floats
) -> Floats:
    """Levenberg and Marquardt's way down from one beginning."""
    damping = 1e-2
    residuals = _residuals(measurements, known, names, logs)
    for _ in range(_MOST_STEPS):
        slopes = _slopes(measurements, known, names, logs)
        squares = slopes.T @ slopes
        # A number that does not show keeps its place.
        pull = damping * np.diag(np.diag(squares) + 1e-9)
        step = np.linalg.solve(squares + pull, -slopes.T @ residuals)
        moved = logs + np.clip(step, -2.0, 2.0)
        after = _residuals(measurements, known, names, moved)
        gain = _cost(residuals) - _cost(after)
        if gain > 0:
            logs, residuals, damping = moved, after, max(damping / 3, 1e-9)
            if gain < 1e-10 * (1 + _cost(after)):
                break
        else:
            damping *= 4
            if damping > 1e9:
                break
    return logs


def _doubt(slopes: Floats, residuals: Floats, names: Sequence[str]) -> tuple[float, ...]:
    """Each number's standard error, relative.

    Raises:
        InvalidUsage: One is larger than MOST_DOUBT.
    """
    freedom = len(residuals) - len(names)
    scatter = max(math.sqrt(_cost(residuals) / freedom), _LEAST_SCATTER)
    sizes, axes = np.linalg.eigh(slopes.T @ slopes)
    spread = scatter / np.sqrt(np.maximum(sizes, 1e-18))
    doubt = np.sqrt((axes**2) @ (spread**2))
    if doubt.max() <= MOST_DOUBT:
        return tuple(float(value) for value in doubt)
    # The combination that they tell least, and its parts.
    worst = axes[:, int(np.argmin(sizes))]
    mixed = [name for name, part in zip(names, worst, strict=True) if abs(part) > 0.3]
    advice = "; ".join(f"{name} shows at {_TOLD_BY[name]}" for name in mixed)
    what = f"hardly show {mixed[0]}" if len(mixed) == 1 else f"can't tell {' from '.join(mixed)}"
    off = f"{doubt.max():.0%}" if doubt.max() < 10 else "any amount"
    raise InvalidUsage(
        f"the {len(residuals)} measurements {what} (it could be off by {off}): {advice}. Measure "
        "those, or leave a number as it is known."
    )
