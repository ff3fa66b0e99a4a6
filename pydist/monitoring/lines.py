"""What a line of `steps.jsonl` says: one step, over all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from pydist.monitoring.chunks import Together
from pydist.monitoring.measures import Row

_MEMORY = ("rss_bytes", "peak_rss_bytes", "gpu_bytes", "peak_gpu_bytes")


def lines_of(together: Together) -> Iterator[dict[str, Any]]:
    """A line for each step of rank 0, without its time.

    Args:
        together: The rows of each rank.
    """
    by_step = [{row.step: row for row in rows} for rows in together]
    for step in by_step[0]:
        yield line_of(step, [rows.get(step) for rows in by_step])


def line_of(step: int, rows: Sequence[Row | None]) -> dict[str, Any]:
    """The line of one step.

    Args:
        step: Its number.
        rows: Of each rank, in rank order; None for ranks that have sent nothing. Rank 0 has.
    """
    own = rows[0]
    assert own is not None
    there = [row for row in rows if row is not None]
    samples = [row.samples for row in there if row.samples is not None]
    total = sum(samples) if samples else None
    moved = [row.bytes for row in there if row.bytes is not None]
    shares = [None if row is None else _share(row) for row in rows]
    line: dict[str, Any] = {
        "step": step,
        "step_s": _rounded(own.step_s),
        "values": _means(there),
        "samples": total,
        "samples_per_s": _per_second(total, own.step_s),
        "waiting_share": _rounded(_mean(shares)),
        "bytes": sum(moved) if moved else None,
        "ranks": {
            "step_s": [None if row is None else _rounded(row.step_s) for row in rows],
            "samples_per_s": [
                None if row is None else _per_second(row.samples, row.step_s) for row in rows
            ],
            "waiting_share": [_rounded(share) for share in shares],
            "lag_s": _lags(rows),
            "bytes": [None if row is None else row.bytes for row in rows],
        },
    }
    for place, name in enumerate(_MEMORY):
        found = [row.memory[place] if row is not None and row.memory else None for row in rows]
        if any(each is not None for each in found):
            line["ranks"][name] = found
    return line


def _share(row: Row) -> float | None:
    if row.waiting_s is None or row.step_s <= 0:
        return None
    return min(1.0, row.waiting_s / row.step_s)


def _lags(rows: Sequence[Row | None]) -> list[float | None]:
    """By how much each rank's own work took longer than that of the fastest.

    Own work is the step without the waiting. It needs no clocks that agree.
    """
    work = [
        None if row is None or row.waiting_s is None else row.step_s - row.waiting_s for row in rows
    ]
    known = [each for each in work if each is not None]
    return [None if each is None else _rounded(each - min(known)) for each in work]


def _means(rows: Sequence[Row]) -> dict[str, float | None]:
    """Means over the ranks, by their samples where all of them tell these."""
    counted = all(row.samples is not None for row in rows)
    terms: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        weight = row.samples if counted else 1.0
        for name, value in row.values.items():
            known = terms.setdefault(name, [])
            if isinstance(value, float) and weight:
                known.append((value, weight))
    return {name: _weighted_mean(known) for name, known in terms.items()}


def _weighted_mean(terms: Sequence[tuple[float, float]]) -> float | None:
    if len(terms) < 2:
        return terms[0][0] if terms else None
    total = sum(weight for _, weight in terms)
    return sum(value * (weight / total) for value, weight in terms)


def _per_second(samples: float | None, seconds: float) -> float | None:
    return None if samples is None or seconds <= 0 else _rounded(samples / seconds)


def _mean(numbers: Sequence[float | None]) -> float | None:
    known = [each for each in numbers if each is not None]
    return sum(known) / len(known) if known else None


def _rounded(number: float | None) -> float | None:
    """To six digits: more would only be noise, and there is a line for every step."""
    return None if number is None or not math.isfinite(number) else float(f"{number:.6g}")
