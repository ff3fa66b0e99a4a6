"""The last step in a run's traces (PYDIST_TIMELINE), as a picture: a lane for each rank.

A trace may be long. Its end is enough: the last step that all ranks have written.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from pydist.errors import InvalidUsage
from pydist.monitoring.trace_mark import mark_of, trace_of_rank

# At the end of a trace, how much is read: thousands of events.
_TAIL_BYTES = 4 * 2**20
# More lanes would be thinner than their text.
_MOST_RANKS = 16

_WIDTH, _LEFT, _LANE, _BAR, _AXIS = 960, 76, 46, 16, 34
_KINDS = {"forward": "forward", "backward": "backward", "wait for averages": "wait"}


@dataclass
class Lane:
    """One rank's part of a step; times in microseconds.

    Attributes:
        rank: Its number.
        spans: Name, begin and end of what the training thread did.
        buckets: Label, begin and end of each bucket on its way, and its bytes.
    """

    rank: int
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    buckets: list[tuple[str, float, float, int]] = field(default_factory=list)

    @property
    def begin(self) -> float:
        """When the step began."""
        return min(begin for _, begin, _ in self.spans)


def find_traces(folder: Path, start: Mapping[str, Any]) -> dict[int, Path]:
    """The traces of a run by rank: those where its variable said, or those in its folder.

    Args:
        folder: Of the run.
        start: What its last start was made with.

    Raises:
        InvalidUsage: the traces where its variable said are not known to be this run's.
    """
    timeline = start.get("timeline")
    found = _traces_like(Path(timeline)) if isinstance(timeline, str) and timeline else {}
    if not found:
        return _in_folder(folder)
    first = trace_of_rank(Path(str(timeline)), 0)
    # Nobody but this run writes into its folder.
    is_own = Path(os.path.realpath(first)).is_relative_to(os.path.realpath(folder))
    if not is_own and (start.get("trace") is None or mark_of(first) != start["trace"]):
        raise InvalidUsage(
            f"the trace {first} is not drawn: it is another run's, or the run ended before it was "
            "known; give each run a PYDIST_TIMELINE of its own"
        )
    # Of an earlier job there may be more.
    size = start.get("world_size")
    return {r: path for r, path in found.items() if not isinstance(size, int) or r < size}


def _traces_like(path: Path) -> dict[int, Path]:
    """trace.json becomes trace.rank0.json, trace.rank1.json, ..."""
    name = re.compile(rf"{re.escape(path.stem)}\.rank(\d+){re.escape(path.suffix)}")
    try:
        files = sorted(path.parent.iterdir())
    except (OSError, ValueError):  # a NUL in the name
        return {}
    return {int(m[1]): file for file in files if (m := name.fullmatch(file.name))}


def _in_folder(folder: Path) -> dict[int, Path]:
    for file in sorted(folder.glob("*.rank0.json")):
        return _traces_like(folder / file.name.replace(".rank0.json", ".json"))
    return {}


def last_step(traces: dict[int, Path]) -> list[Lane]:
    """A lane for each rank, of the last step that all have written; none where there is no such."""
    ranks = sorted(traces)[:_MOST_RANKS]
    by_rank = {rank: _lanes_of(rank, traces[rank]) for rank in ranks}
    if not by_rank:
        return []
    common = set.intersection(*(set(lanes) for lanes in by_rank.values()))
    if not common:
        return []
    key = max(common)
    return [by_rank[rank][key] for rank in ranks]


def _lanes_of(rank: int, path: Path) -> dict[tuple[int, int], Lane]:
    """By round and model."""
    lanes: dict[tuple[int, int], Lane] = {}
    begun: dict[str, dict[str, Any]] = {}
    for event in _events(path):
        try:
            if event["ph"] == "X":
                key = (int(event["args"]["round"]), int(event["tid"]))
                begin = float(event["ts"])
                span = (str(event["name"]), begin, begin + float(event["dur"]))
                lanes.setdefault(key, Lane(rank)).spans.append(span)
            elif event["ph"] == "b" and event["cat"] == "on its way":
                begun[event["id"]] = event
            elif event["ph"] == "e" and event["id"] in begun:
                begin_of = begun.pop(event["id"])
                # The id is the category, the model, the round and the number of the bucket.
                model, round_number = event["id"].split()[-3:-1]
                lane = lanes.setdefault((int(round_number), int(model)), Lane(rank))
                size = int(begin_of["args"]["bytes"])
                bucket = (
                    str(begin_of["name"]),
                    float(begin_of["ts"]),
                    float(event["ts"]),
                    size,
                )
                lane.buckets.append(bucket)
        except (KeyError, TypeError, ValueError, OverflowError):
            continue
    return {key: lane for key, lane in lanes.items() if lane.spans}


def _events(path: Path) -> list[dict[str, Any]]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    events = []
    for line in text.splitlines():
        try:
            event = json.loads(line.strip().rstrip(",").removesuffix("]").removeprefix("["))
        except (ValueError, RecursionError):
            continue  # the first line, of which the begin is not read, and the brackets
        if isinstance(event, dict):
            events.append(event)
    return events


def picture(lanes: Sequence[Lane]) -> str:
    """The lanes as SVG, each from its own rank's begin: clocks of hosts need not agree."""
    longest = max(
        end - lane.begin
        for lane in lanes
        for end in [each[2] for each in lane.spans] + [each[2] for each in lane.buckets]
    )
    scale = (_WIDTH - _LEFT - 20) / max(longest, 1e-3)
    height = _AXIS + _LANE * len(lanes)
    parts = [
        f'<svg class="timeline" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="The last traced step of {len(lanes)} ranks">'
    ]
    for tick in _ticks(longest):
        x = _LEFT + tick * scale
        parts.append(
            f'<line class="grid" x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{height - _AXIS + 4}"/>'
            f'<text class="tick" x="{x:.1f}" y="{height - 12}">{tick / 1000:g} ms</text>'
        )
    for number, lane in enumerate(lanes):
        top = number * _LANE + 4
        parts.append(f'<text class="lane" x="0" y="{top + _BAR}">rank {lane.rank}</text>')
        for name, begin, end in lane.spans:
            said = f"{name}: {(end - begin) / 1000:.3g} ms"
            parts.append(_bar(_KINDS.get(name, "other"), lane, begin, end, top, scale, said))
        for label, begin, end, size in lane.buckets:
            said = f"bucket {label}, {size:,} bytes: {(end - begin) / 1000:.3g} ms on its way"
            parts.append(_bar("bucket", lane, begin, end, top + _BAR + 3, scale, said))
    return "".join([*parts, "</svg>"])


def _bar(
    kind: str, lane: Lane, begin: float, end: float, top: float, scale: float, said: str
) -> str:
    x, width = _LEFT + (begin - lane.begin) * scale, max((end - begin) * scale, 0.8)
    height = _BAR if kind != "bucket" else _BAR - 4
    return (
        f'<rect class="{kind}" x="{x:.1f}" y="{top}" width="{width:.1f}" height="{height}" rx="2">'
        f"<title>{escape(said)}</title></rect>"
    )


def _ticks(longest: float) -> list[float]:
    """Four to ten round numbers from 0 to the end, in microseconds."""
    decade = 10.0 ** math.floor(math.log10(max(longest, 1e-3) / 4))
    step = next(decade * n for n in (5, 2, 1) if decade * n * 4 <= longest or n == 1)
    return [number * step for number in range(int(longest / step) + 1)]
