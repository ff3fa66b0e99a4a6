"""Performs a drill once, and checks what every survivor read, when, and what was left."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from launch import Outcome, Ranks
from scene import Drill, FailedDrillError, LauncherDrill, Report, Result, perform
from time_limit import PATIENCE

LIMIT_S = 60.0


def rehearse(drill: Drill, backend: str, size: int, *, slack: float = 1.0) -> Result:
    """Performs a drill on fresh ranks, who may take `slack` times as long as the drill says."""
    with tempfile.TemporaryDirectory(prefix="pydist-drill-") as name:
        folder = Path(name)
        beside = drill.beside(folder) if drill.beside is not None else contextlib.nullcontext()
        with _ranks(drill, backend, size) as ranks, beside:
            if drill.victim == "stopped":
                _end_when_others_are_done(ranks, drill.victim_among(size), folder)
            outcomes = ranks.outcomes(
                perform, drill.act, name, drill.timeout_s * PATIENCE, drill.joins, timeout=LIMIT_S
            )
        return judge(drill, outcomes, folder, drill.within_s * slack * PATIENCE)


def rehearse_launcher(drill: LauncherDrill, *, slack: float = 1.0) -> Result:
    """Performs a drill of a launcher."""
    with tempfile.TemporaryDirectory(prefix="pydist-drill-") as name:
        return drill.perform(Path(name), slack * PATIENCE)


@contextlib.contextmanager
def _ranks(drill: Drill, backend: str, size: int) -> Iterator[Ranks]:
    env = {"PYDIST_BACKEND": backend, **drill.env}
    if drill.preload is None:
        with Ranks(size, env) as ranks:
            yield ranks
        return
    with mock.patch.dict(os.environ, LD_PRELOAD=str(drill.preload())):
        ranks = Ranks(size, env, method="spawn")
    with ranks:
        yield ranks


def _end_when_others_are_done(ranks: Ranks, rank: int, folder: Path) -> None:
    """Kills the stopped rank once all others have reported: it reports to nobody."""

    def end() -> None:
        deadline = time.monotonic() + LIMIT_S * PATIENCE - 5
        while len(list(folder.glob("told-*"))) < ranks.nprocs - 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            os.kill(ranks.pids[rank], signal.SIGKILL)

    threading.Thread(target=end, daemon=True).start()


def judge(drill: Drill, outcomes: list[Outcome], folder: Path, within_s: float) -> Result:
    def fail(why: str) -> FailedDrillError:
        told = "\n".join(outcome.describe() for outcome in outcomes)
        return FailedDrillError(f"{drill.name}: {why}\n{told}")

    victim = drill.victim_among(len(outcomes))
    reports: list[Report] = []
    for outcome in outcomes:
        if drill.victim in ("killed", "stopped") and outcome.rank == victim:
            if outcome.exit_code is None:
                raise fail(f"rank {victim} has not ended")
            continue
        if not outcome.ok:
            raise fail(f"rank {outcome.rank} did not report")
        report: Report = outcome.value
        is_victim = outcome.rank == victim
        if (
            drill.raises
            and report.error not in drill.raises
            and not (is_victim and not report.error)
        ):
            raise fail(f"rank {outcome.rank} got {report.error}, not {drill.raises}")
        if not drill.raises and report.error:
            raise fail(f"rank {outcome.rank} got {report.error}")
        named = drill.names.format(victim=victim)
        if drill.raises and not is_victim and not re.search(rf"\b{named}\b", report.message):
            raise fail(f"rank {outcome.rank} reads nothing of {named!r}")
        if drill.raises and not is_victim and not _blames_rightly(drill, report.ranks, victim):
            raise fail(f"rank {outcome.rank} blames {report.ranks}; expected: {drill.blames}")
        reports.append(report)
    seconds = max(each.at for each in reports) - float((folder / "fault").read_text())
    if seconds > within_s:
        raise fail(f"the last rank knew after {seconds:.3f} s, not within {within_s:g} s")
    text = next((each.message for each in reports if each.message), "")
    return Result(text, seconds, sorted({thing for each in reports for thing in each.left}))


def _blames_rightly(drill: Drill, ranks: tuple[int, ...], victim: int) -> bool:
    return {
        "victim": ranks == (victim,),
        "victim and another": len(ranks) == 2 and victim in ranks,
        "nobody": ranks == (),
    }[drill.blames]
