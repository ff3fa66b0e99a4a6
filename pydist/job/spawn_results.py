"""What spawned ranks leave behind, and what their end tells the caller of `pydist.spawn`."""

import contextlib
import pickle
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydist.errors import Error, PeerLost


@dataclass(frozen=True)
class Failure:
    """What a rank leaves behind when its function raises."""

    rank: int
    pid: int
    time_s: float
    traceback: str
    # None if it can't be pickled.
    error: bytes | None
    # Whether it only tells of another rank's failure.
    is_consequence: bool


@dataclass(frozen=True)
class Course:
    """How the ranks ended. Times are those of the monotonic clock, which all processes share."""

    exit_codes: list[int | None]
    pids: list[int]
    # When ranks were seen to have ended by themselves, by rank.
    ended_s: dict[int, float]
    # When this process began to end the others.
    stopped_s: float
    # Why it has ended those that did not end by themselves; empty: they were told to, or none was.
    why_ended: str = ""


class _RemoteTraceback(Exception):  # noqa: N818
    """Carries the traceback of another process, as the cause of what it raised."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"


def raise_first(folder: Path, course: Course) -> None:
    """Raises what the rank that failed first raised.

    Ranks that raised PeerLost or Aborted of another one only saw that fail. What became of a rank
    once this process had begun to end it tells nothing.
    """
    failures: list[Failure] = []
    died: list[tuple[float, int]] = []
    for rank in range(len(course.pids)):
        file = failure_file(folder, rank)
        if file.exists():
            failure: Failure = pickle.loads(file.read_bytes())
            if failure.time_s < course.stopped_s:
                failures.append(failure)
        elif rank in course.ended_s and not has_returned(folder, rank, course):
            died.append((course.ended_s[rank], rank))
    first = min(failures, key=lambda each: (each.is_consequence, each.time_s), default=None)
    if died and (first is None or first.is_consequence or min(died)[0] < first.time_s):
        _, rank = min(died)
        code, pid = course.exit_codes[rank], course.pids[rank]
        raise PeerLost(
            f"rank {rank} of {len(course.pids)} (pid {pid}) {how_it_ended(code)} without "
            f"{'a result' if code == 0 else 'an exception'}; what it printed may say why. The "
            "other ranks have been ended.",
            ranks=(rank,),
            host=socket.gethostname(),
            pid=pid,
            cause=how_it_ended(code),
        )
    if first is None:
        raise Error(f"the ranks ended with exit codes {course.exit_codes} and left no reason.")
    cause = _RemoteTraceback(
        f"rank {first.rank} of {len(course.pids)} (pid {first.pid}) raised:\n{first.traceback}"
    )
    raise _error_of(first) from cause


def _error_of(failure: Failure) -> Exception:
    if failure.error is not None:
        error: Exception = pickle.loads(failure.error)
        return error
    return Error(f"rank {failure.rank} failed: {failure.traceback.strip().splitlines()[-1]}")


def has_returned(folder: Path, rank: int, course: Course) -> bool:
    """Whether a rank's function has returned, and its process has ended well."""
    return course.exit_codes[rank] == 0 and result_file(folder, rank).exists()


def result_or_error(folder: Path, rank: int, course: Course) -> Any:
    """What a rank returned, raised, or died of."""
    code, pid = course.exit_codes[rank], course.pids[rank]
    if has_returned(folder, rank, course):
        return pickle.loads(result_file(folder, rank).read_bytes())
    file = failure_file(folder, rank)
    if not file.exists():
        how = how_it_ended(code) + (" without a result" if code == 0 else "")
        said = f"{how}, and others went on"
        if course.why_ended and rank not in course.ended_s:
            said = how = f"was ended by pydist.spawn: {course.why_ended}, and no other ran any more"
        return PeerLost(
            f"rank {rank} (pid {pid}) {said}.",
            ranks=(rank,),
            host=socket.gethostname(),
            pid=pid,
            cause=how,
        )
    failure: Failure = pickle.loads(file.read_bytes())
    error = _error_of(failure)
    error.__cause__ = _RemoteTraceback(f"rank {rank} (pid {pid}) raised:\n{failure.traceback}")
    return error


def how_it_ended(code: int | None) -> str:
    """What an exit code says of a process, negative ones for signals; for people."""
    if code is not None and code < 0:
        name = ""
        with contextlib.suppress(ValueError):  # most real-time signals have none
            name = f" ({signal.Signals(-code).name})"
        return f"was killed by signal {-code}{name}"
    return f"exited with status {code}"


def result_file(folder: Path, rank: int) -> Path:
    return folder / f"result-{rank}"


def failure_file(folder: Path, rank: int) -> Path:
    return folder / f"failure-{rank}"


def stacks_file(folder: Path, rank: int) -> Path:
    return folder / f"stacks-{rank}"


def print_stacks(folder: Path, rank: int, pid: int) -> None:
    """What a rank has written at the deadline, in one piece."""
    try:
        stacks = stacks_file(folder, rank).read_text(errors="replace")
    except FileNotFoundError:
        stacks = "It has not begun: Python may be importing torch yet.\n"
    print(f"rank {rank} (pid {pid}) still runs.\n{stacks}", file=sys.stderr, flush=True)
