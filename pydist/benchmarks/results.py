"""What a run of measurements found: rows that people, programs and plots read."""

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pydist.benchmarks.machine import Machine
from pydist.benchmarks.outputs import json_text
from pydist.benchmarks.processes.conductor import Series

ROOFLINE = "roofline"


@dataclass(frozen=True)
class Row:
    """One case on one arm. Times in µs, bandwidths in GB/s (10^9 bytes)."""

    collective: str
    size_bytes: int
    count: int
    type: str
    redop: str
    root: int
    place: str
    arm: str
    # None of the following where the arm can't do it, as `unsupported` says.
    time_us: float | None = None
    p50_us: float | None = None
    p99_us: float | None = None
    algbw: float | None = None
    busbw: float | None = None
    # The roofline's time over this one's; None where there is no roofline.
    percent_of_roofline: float | None = None
    wrong: int | None = None
    rounds: int = 0
    calls_per_round: int = 0
    # This time over the first arm's in the same place: the median ratio of the rounds, and the
    # interval that holds it in 95 % of resamplings.
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    unsupported: str | None = None


def rows_of(series: Sequence[Series]) -> list[Row]:
    """The rows of one size, the first arm's first."""
    rows = []
    by_place: dict[str, dict[str, Series]] = {}
    for one in series:
        by_place.setdefault(one.case.place, {})[one.arm] = one
    for arms in by_place.values():
        first = next(iter(arms.values()))
        roofline = arms.get(ROOFLINE)
        rows += [_row(one, first, roofline) for one in arms.values()]
    return rows


def _row(one: Series, first: Series, roofline: Series | None) -> Row:
    case = one.case
    facts: dict[str, Any] = {
        "collective": case.collective,
        "size_bytes": case.size_bytes,
        "count": case.shown_count,
        "type": case.dtype,
        "redop": case.op,
        "root": case.root,
        "place": case.place,
        "arm": one.arm,
    }
    if one.unsupported is not None:
        return Row(**facts, unsupported=one.unsupported)
    if roofline is not None and roofline.unsupported is None:
        facts["percent_of_roofline"] = roofline.ratio_to(one).median * 100
    if one is not first and first.unsupported is None:
        ratio = one.ratio_to(first)
        facts |= {"ratio": ratio.median, "ratio_low": ratio.low, "ratio_high": ratio.high}
    return Row(
        **facts,
        time_us=one.seconds * 1e6,
        p50_us=one.single(0.5) * 1e6,
        p99_us=one.single(0.99) * 1e6,
        algbw=case.algorithm_bandwidth(one.seconds) / 1e9,
        busbw=case.bus_bandwidth(one.seconds) / 1e9,
        wrong=one.wrong,
        rounds=len(one.rounds),
        calls_per_round=one.calls,
    )


@dataclass
class Results:
    """Everything that is known of a run, at any moment of it."""

    command: str
    machine: Machine
    ranks: int
    is_pinned: bool
    # What each arm is, by name; the first is the one that is measured, the others are beside it.
    arms: dict[str, str]
    rows: list[Row]
    warnings: list[str]
    # Whether all that was asked for was measured.
    is_complete: bool = False

    @property
    def main(self) -> str:
        return next(iter(self.arms))

    @property
    def failed(self) -> bool:
        """Whether what was asked for could not be measured at all, on the arm that is measured."""
        own = [row for row in self.rows if row.arm == self.main]
        return any(
            all(row.time_us is None for row in own if row.collective == name)
            for name in {row.collective for row in own}
        )

    def unsupported(self) -> dict[str, set[str]]:
        """Why arms could not do some cases, by arm."""
        reasons: dict[str, set[str]] = {}
        for row in self.rows:
            if row.unsupported is not None:
                reasons.setdefault(row.arm, set()).add(row.unsupported)
        return reasons

    @property
    def wrong(self) -> int:
        """Wrong elements of all arms but the roofline, which nobody would call a result."""
        return sum(row.wrong or 0 for row in self.rows if row.arm != ROOFLINE)

    def as_json(self) -> str:
        return json_text(
            {
                "command": self.command,
                "complete": self.is_complete,
                "machine": self.machine.to_dict(),
                "ranks": self.ranks,
                "pinned": self.is_pinned,
                "arms": self.arms,
                "warnings": self.warnings,
                "rows": [asdict(row) for row in self.rows],
            }
        )

    def as_csv(self) -> str:
        text = io.StringIO()
        writer = csv.DictWriter(text, fieldnames=list(Row.__dataclass_fields__))
        writer.writeheader()
        writer.writerows(asdict(row) for row in self.rows)
        return text.getvalue()
