"""By what a run knows its trace again: another run with the same PYDIST_TIMELINE replaces it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

# The first step stands at the beginning; a line of it has some hundred bytes.
_HEAD_BYTES = 4096


def trace_of_rank(timeline: Path, rank: int) -> Path:
    """trace.json becomes trace.rank0.json on rank 0."""
    return timeline.with_name(f"{timeline.stem}.rank{rank}{timeline.suffix}")


def mark_of(trace: Path) -> str | None:
    """The digest of a trace's first event that has a time: no trace of another process has it.

    Monitors of one process share its trace, and so the mark. None where there is no such event yet,
    or no trace.
    """
    try:
        with trace.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except (OSError, ValueError):  # a NUL in the name
        return None
    for line in head.splitlines(keepends=True):
        text = line.strip().rstrip(b",").removesuffix(b"]")
        try:
            event = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if line.endswith(b"\n") and isinstance(event, dict) and "ts" in event:
            return hashlib.sha256(text).hexdigest()[:16]
    return None
