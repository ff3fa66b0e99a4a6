"""What a run of measurements found: rows that people, programs and plots read."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pydist.benchmarks.machine import Machine
from pydist.benchmarks.noise import are_of_two_places, two_groups
from pydist.benchmarks.outputs import json_text
from pydist.benchmarks.processes.conductor import Series
from pydist.benchmarks.processes.ranks import LINK, ROOFLINE

# As few as need the ranks' cores to speak with each other, and little else.
PROBE_BYTES = 8
# What shows a bound, and is no way to carry a collective.
BOUNDS = (ROOFLINE, LINK)


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
    # Where the rounds' times fall into two groups: the medians of both, and the share of the rounds
    # that are in the first.
    low_us: float | None = None
    high_us: float | None = None
    share_low: float | None = None
    # This time over the first arm's in the same place: the median ratio of the rounds, and the
    # interval that holds it in 95 % of resamplings.
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    unsupported: str | None = None
    # Between hosts: the bytes that the host with the most to do has to send to others (or receive),
    # and the link's time over this one's. None on one host, or where the link isn't known.
    across_bytes: float | None = None
    percent_of_link: float | None = None


def rows_of(series: Sequence[Series], across_bytes: float | None = None) -> list[Row]:
    """The rows of one size, the first arm's first.

    Args:
        series: of all arms and places.
        across_bytes: what the cases have to send between hosts; None where that isn't known.
    """
    rows = []
    by_place: dict[str, dict[str, Series]] = {}
    for one in series:
        by_place.setdefault(one.case.place, {})[one.arm] = one
    for arms in by_place.values():
        first = next(iter(arms.values()))
        rows += [_row(one, first, arms, across_bytes) for one in arms.values()]
    return rows


def _row(one: Series, first: Series, arms: Mapping[str, Series], across_bytes: float | None) -> Row:
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
        "across_bytes": across_bytes,
    }
    if one.unsupported is not None:
        return Row(**facts, unsupported=one.unsupported)
    for bound, name in ((ROOFLINE, "percent_of_roofline"), (LINK, "percent_of_link")):
        if bound in arms and arms[bound].unsupported is None:
            facts[name] = arms[bound].ratio_to(one).median * 100
    if one is not first and first.unsupported is None:
        ratio = one.ratio_to(first)
        facts |= {"ratio": ratio.median, "ratio_low": ratio.low, "ratio_high": ratio.high}
    if groups := two_groups(one.rounds):
        facts |= {
            "low_us": groups.low * 1e6,
            "high_us": groups.high * 1e6,
            "share_low": groups.share_low,
        }
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
    # How many ranks are on each host.
    ranks_on_hosts: tuple[int, ...] = ()
    # The state of the machine: µs of an all_reduce of PROBE_BYTES on the main arm, before the first
    # size and after each.
    state_us: list[float] = field(default_factory=list)
    # Likewise how far the cores are from each other: ns that a cache line takes from that of the
    # first rank to the farthest one on its host. Empty where that is not known.
    core_to_core_ns: list[float] = field(default_factory=list)

    @property
    def spans_hosts(self) -> bool:
        return len(self.ranks_on_hosts) > 1

    @property
    def is_crowded(self) -> bool:
        """Whether ranks share CPUs, on the host where the first one is."""
        here = self.ranks_on_hosts[0] if self.spans_hosts else self.ranks
        return here > self.machine.usable_cpus

    @property
    def have_cores_moved(self) -> bool:
        """Whether cores were nearer to each other at one time than at another."""
        return are_of_two_places(self.core_to_core_ns)

    @property
    def peers(self) -> list[str]:
        """The arms that are beside the main one, but for the bounds."""
        return [arm for arm in self.arms if arm not in (self.main, *BOUNDS)]

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
        """Wrong elements of all arms but the bounds, which nobody would call a result."""
        return sum(row.wrong or 0 for row in self.rows if row.arm not in BOUNDS)

    def as_json(self) -> str:
        return json_text(
            {
                "command": self.command,
                "complete": self.is_complete,
                "machine": self.machine.to_dict(),
                "ranks": self.ranks,
                "ranks_on_hosts": list(self.ranks_on_hosts),
                "pinned": self.is_pinned,
                "arms": self.arms,
                "warnings": self.warnings,
                "state_us": self.state_us,
                "core_to_core_ns": self.core_to_core_ns,
                "rows": [asdict(row) for row in self.rows],
            }
        )

    def as_csv(self) -> str:
        text = io.StringIO()
        writer = csv.DictWriter(text, fieldnames=list(Row.__dataclass_fields__))
        writer.writeheader()
        writer.writerows(asdict(row) for row in self.rows)
        return text.getvalue()
