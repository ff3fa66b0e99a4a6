"""Performs a drill once, and checks what every survivor read, when, and what was left."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

from launch import Outcome, Ranks
from scene import Drill, Report, perform
from time_limit import PATIENCE

LIMIT_S = 60.0
# On gloo the ranks on which a collective failed wait a second for each other's names.
GLOO_LIST_S = 1.5


@dataclass
class Result:
    """Of one performance."""

    # What a survivor read, without what differs from one to the next; empty where all went well.
    text: str
    # From the fault until the last survivor knew.
    seconds: float
    left: list[str]


class FailedDrillError(AssertionError):
    """Something other came of a drill than has to."""


def rehearse(drill: Drill, backend: str, size: int, *, slack: float = 1.0) -> Result:
    """Performs a drill on fresh ranks, who may take `slack` times as long as the drill says."""
    with tempfile.TemporaryDirectory(prefix="pydist-drill-") as folder:
        with Ranks(size, {"PYDIST_BACKEND": backend, **drill.env}) as ranks:
            if drill.victim == "stopped":
                _end_when_others_are_done(ranks, size - 1, Path(folder), drill.timeout_s)
            outcomes = ranks.outcomes(
                perform, drill.act, folder, drill.timeout_s * PATIENCE, drill.joins, timeout=LIMIT_S
            )
        within_s = drill.within_s + (GLOO_LIST_S if backend == "gloo" else 0)
        return _judge(drill, outcomes, Path(folder), within_s * slack * PATIENCE)


def _end_when_others_are_done(ranks: Ranks, rank: int, folder: Path, timeout_s: float) -> None:
    """Kills the stopped rank well after the others' deadline: it reports to nobody."""

    def end() -> None:
        os.kill(ranks.pids[rank], signal.SIGKILL)

    timer = threading.Timer(timeout_s * PATIENCE + 3, end)
    timer.daemon = True
    timer.start()


def _judge(drill: Drill, outcomes: list[Outcome], folder: Path, within_s: float) -> Result:
    def fail(why: str) -> FailedDrillError:
        told = "\n".join(outcome.describe() for outcome in outcomes)
        return FailedDrillError(f"{drill.name}: {why}\n{told}")

    victim = 0 if drill.names == "rank 0" else len(outcomes) - 1
    reports: list[Report] = []
    for outcome in outcomes:
        if drill.victim in ("killed", "stopped") and outcome.rank == victim:
            if outcome.exit_code is None:
                raise fail(f"rank {victim} has not ended")
            continue
        if not outcome.ok:
            raise fail(f"rank {outcome.rank} did not report")
        report: Report = outcome.value
        is_last = outcome.rank == victim
        if drill.raises and report.error not in drill.raises and not (is_last and not report.error):
            raise fail(f"rank {outcome.rank} got {report.error}, not {drill.raises}")
        if not drill.raises and report.error:
            raise fail(f"rank {outcome.rank} got {report.error}")
        named = drill.names.format(victim=victim)
        if drill.raises and not is_last and not re.search(rf"\b{named}\b", report.message):
            raise fail(f"rank {outcome.rank} reads nothing of {named!r}")
        reports.append(report)
    seconds = max(each.at for each in reports) - float((folder / "fault").read_text())
    if seconds > within_s:
        raise fail(f"the last rank knew after {seconds:.3f} s, not within {within_s:g} s")
    text = next((each.message for each in reports if each.message), "")
    return Result(text, seconds, sorted({thing for each in reports for thing in each.left}))
