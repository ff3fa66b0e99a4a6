"""What a run's file says, as columns that curves are drawn from."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydist.errors import InvalidUsage
from pydist.monitoring.step_file import NAME, as_number, lines_in

# Curve by name: the values of each step, in the order of steps. None where there is none.
Column = list[float | None]


@dataclass(frozen=True)
class SlowestRank:
    """Who has held up the others.

    Attributes:
        rank: Its number.
        lag_s: The mean of its lag over the steps, in seconds.
        share: Of the steps, in how many it was the slowest.
    """

    rank: int
    lag_s: float
    share: float


@dataclass
class Records:
    """The steps of a run.

    Attributes:
        steps: Their numbers, ascending.
        elapsed_s: Seconds of the run at the end of each.
        curves: By name; those of the program's own values are "value:NAME".
        unreadable: Lines that say nothing readable, such as a half last one.
        slowest: None where no lags are told, or all are alike.
    """

    steps: list[int] = field(default_factory=list)
    elapsed_s: list[float] = field(default_factory=list)
    curves: dict[str, Column] = field(default_factory=dict)
    unreadable: int = 0
    slowest: SlowestRank | None = None

    def known(self, name: str) -> list[float]:
        """The finite values of a curve."""
        return [v for v in self.curves.get(name, []) if v is not None and math.isfinite(v)]

    def median(self, name: str) -> float | None:
        """The median of a curve's finite values; None without any."""
        known = self.known(name)
        return statistics.median(known) if known else None

    def not_finite(self, name: str) -> list[int]:
        """The steps at which a curve is NaN or infinite."""
        column = self.curves.get(name, [])
        return [
            step
            for step, value in zip(self.steps, column, strict=True)
            if value is not None and not math.isfinite(value)
        ]


def read_records(folder: Path) -> Records:
    """Reads a run.

    Where a step was taken twice, since training went on from an earlier checkpoint, the later line
    counts.

    Raises:
        InvalidUsage: the file can't be read.
    """
    rows: dict[int, tuple[float, dict[str, float]]] = {}
    lags = _Lags()
    records = Records()
    try:
        with open(folder / NAME, "rb") as file:
            for line in lines_in(file):
                if line is None:
                    records.unreadable += 1
                else:
                    elapsed_s = as_number(line.get("elapsed_s")) or 0.0
                    elapsed_s = elapsed_s if math.isfinite(elapsed_s) else 0.0
                    rows[line["step"]] = (elapsed_s, _numbers(line))
                    lags.add(_ranks(line).get("lag_s"))
    except OSError as error:
        raise InvalidUsage(f"{folder / NAME} can't be read: {error}") from error
    records.steps = sorted(rows)
    records.elapsed_s = _ascending([rows[step][0] for step in records.steps])
    names = dict.fromkeys(name for step in records.steps for name in rows[step][1])
    for name in names:
        records.curves[name] = [rows[step][1].get(name) for step in records.steps]
    records.slowest = lags.slowest()
    return records


def _ranks(line: dict[str, Any]) -> dict[str, Any]:
    ranks = line.get("ranks")
    return ranks if isinstance(ranks, dict) else {}


def _numbers(line: dict[str, Any]) -> dict[str, float]:
    """What a line says of each curve."""
    values = line.get("values")
    told: dict[str, Any] = {}
    if isinstance(values, dict):
        told = {f"value:{name}": value for name, value in values.items()}
    ranks = _ranks(line)
    told |= {name: line.get(name) for name in ("samples_per_s", "waiting_share", "bytes", "step_s")}
    for name in ("lag_s", "rss_bytes", "peak_rss_bytes", "gpu_bytes", "peak_gpu_bytes"):
        told[name] = max(_known(ranks.get(name)), default=None)
    numbers = {name: as_number(value) for name, value in told.items()}
    return {name: value for name, value in numbers.items() if value is not None}


def _known(each: Any) -> list[float]:
    numbers = map(as_number, each if isinstance(each, list) else [])
    return [value for value in numbers if value is not None and math.isfinite(value)]


def _ascending(times: list[float]) -> list[float]:
    """A step that was taken again may have an earlier time than one after it, which was not."""
    highest = -math.inf
    ascending = []
    for each in times:
        highest = max(highest, each)
        ascending.append(highest)
    return ascending


class _Lags:
    """Adds up the lags of each rank."""

    def __init__(self) -> None:
        self._sums: Counter[int] = Counter()
        self._slowest: Counter[int] = Counter()
        self._steps: Counter[int] = Counter()

    def add(self, lags: Any) -> None:
        known = {}
        for rank, lag in enumerate(lags if isinstance(lags, list) else []):
            number = as_number(lag)
            if number is not None and math.isfinite(number):
                known[rank] = number
        if len(known) < 2:
            return
        for rank, number in known.items():
            self._sums[rank] += number  # type: ignore[assignment]
            self._steps[rank] += 1
        self._slowest[max(known, key=lambda rank: known[rank])] += 1

    def slowest(self) -> SlowestRank | None:
        means = {rank: self._sums[rank] / count for rank, count in self._steps.items()}
        if not means or max(means.values()) == min(means.values()):
            return None
        rank = max(means, key=lambda each: means[each])
        return SlowestRank(rank, means[rank], self._slowest[rank] / self._slowest.total())
