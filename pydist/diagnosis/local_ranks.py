"""Finds the ranks of a job on this host, from outside, and reads what each is in.

Every process of a job on the native or NCCL backend shows its peers a page of shared memory, with
its last operations (`csrc/health/process_page.h`). The file of each page is open in every process
of the job on the host, so one process leads to the pages of all, also of those that are stopped or
dead.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydist import _native
from pydist.errors import Error, InvalidUsage
from pydist.job.launchers import read_placement
from pydist.job.processes import status_of

_PAGE = "/memfd:pydist:process"
_STATES = {
    "R": "running",
    "S": "waiting",
    "D": "waiting in the kernel",
    "I": "waiting",
    "T": "stopped",
    "t": "traced",
    "Z": "dead",
    "X": "dead",
}
# Of these, who does not run.
_HALTED = ("stopped", "traced", "dead")
# These count by peer, not by group.
_MESSAGES = ("send", "recv")


@dataclass(frozen=True)
class Operation:
    """An entry of a journal; times are seconds before now.

    Attributes:
        group: A digest of the group's name.
        sequence: The operation's number in its group.
        kind: Such as "all_reduce".
        state: "running", "succeeded" or "failed".
        bytes: Its size on this rank.
        label: What pydist does it for; may be empty.
        started_s: Since its beginning.
        finished_s: Since its end; None while it runs.
    """

    group: int
    sequence: int
    kind: str
    state: str
    bytes: int
    label: str
    started_s: float
    finished_s: float | None

    def describe(self) -> str:
        """The operation in words."""
        label = f" ({self.label})" if self.label else ""
        return f"{self.kind} #{self.sequence}{label} of group {self.group & 0xFFFF:04x}"


@dataclass
class LocalRank:
    """One process of the job.

    Attributes:
        pid: Its process id.
        rank: Its number in the job, if its page tells, or the environment that it began with.
        state: What the system says of the process: "running", "stopped", "dead" and the like.
        silent_s: Seconds since its last sign of life.
        has_departed: Whether it has left the job in good order.
        has_page: Whether it has a page; without one the next is empty.
        operations: Its last operations, the newest first.
    """

    pid: int
    rank: int | None
    state: str
    silent_s: float = 0.0
    has_departed: bool = False
    has_page: bool = False
    operations: list[Operation] = field(default_factory=list)

    def activity(self) -> str:
        """What it is in, or was last in, in words."""
        if self.has_departed:
            return "has left the job"
        if not self.has_page:
            return "keeps no journal (gloo, alone, or not joined)"
        for operation in self.operations:
            if operation.state == "running":
                return f"in {operation.describe()} for {operation.started_s:.1f} s"
        if not self.operations:
            return "has not entered any operation yet"
        last = self.operations[0]
        how = "" if last.state == "succeeded" else f", which {last.state}"
        return f"in none since {last.finished_s or 0.0:.1f} s; last {last.describe()}{how}"


def find(pid: int) -> list[LocalRank]:
    """The ranks of this host in the job of a process: a rank, or what has started ranks.

    Args:
        pid: The process, of the same user.

    Returns:
        The ranks, in their order.

    Raises:
        InvalidUsage: There is no such process, it is another user's, or it and its descendants are
            no ranks.
    """
    if not Path(f"/proc/{pid}").is_dir():
        raise InvalidUsage(f"there is no process {pid} on this host.")
    pages: dict[int, dict[str, Any]] = {}
    ranks: dict[int, LocalRank] = {}
    for each, above in ((pid, ()), *_descendants(pid, ())):
        for page in _pages_of(each, must=each == pid):
            # A process that has left a job and joined again has a new one; peers may hold the old.
            pages[page["pid"]] = min(page, pages.get(page["pid"], page), key=_age)
        # What a rank has forked, such as the workers of a loader, is no rank.
        if each in pages or any(parent in pages or parent in ranks for parent in above):
            continue
        if _rank_of(each) is not None and _has_loaded_pydist(each):
            ranks[each] = LocalRank(each, _rank_of(each), state_of(each))
    for owner, page in pages.items():
        ranks[owner] = LocalRank(
            owner,
            _rank_of(owner) if page["rank"] is None else page["rank"],
            state_of(owner),
            silent_s=page["silent_s"],
            has_departed=page["has_departed"],
            has_page=True,
            operations=[Operation(**entry) for entry in page["entries"]],
        )
    if not ranks:
        raise InvalidUsage(
            f"process {pid} is no rank of a pydist job, and has started none: give the process id "
            "of a rank, or of the launcher."
        )
    return sorted(ranks.values(), key=lambda each: (each.rank is None, each.rank or 0, each.pid))


def _age(page: dict[str, Any]) -> tuple[bool, float]:
    return page["has_departed"], page["silent_s"]


def _pages_of(pid: int, *, must: bool) -> Iterator[dict[str, Any]]:
    folder = Path(f"/proc/{pid}/fd")
    try:
        names = os.listdir(folder)
    except OSError as error:
        if must:
            raise InvalidUsage(
                f"process {pid} can't be looked into ({error.strerror}): it belongs to another "
                "user. Run pydist doctor as that user."
            ) from error
        return
    for name in names:
        with contextlib.suppress(OSError, Error):
            if not os.readlink(folder / name).startswith(_PAGE):
                continue
            descriptor = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC)
            try:
                yield _native.read_page(descriptor)
            finally:
                os.close(descriptor)


def _descendants(pid: int, above: tuple[int, ...]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Each with the processes above it, which come before it."""
    above = (*above, pid)
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield int(child), above
                yield from _descendants(int(child), above)


def environment_of(pid: int) -> dict[str, str]:
    """The variables that a process began with; none where they can't be read."""
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    pairs = (entry.partition("=") for entry in text.split("\0") if "=" in entry)
    return {name: value for name, _, value in pairs}


def _rank_of(pid: int) -> int | None:
    try:
        placement = read_placement(environment_of(pid))
    except InvalidUsage:
        return None
    return placement.rank if placement.rendezvous is not None else None


def _has_loaded_pydist(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return "/_native." in Path(f"/proc/{pid}/maps").read_text()
    return False


def state_of(pid: int) -> str:
    """What the system says of a process, in words."""
    try:
        letter = status_of(pid).state
    except OSError:
        return "dead"
    return _STATES.get(letter, letter)


def first_disagreement(ranks: Sequence[LocalRank]) -> tuple[str, set[int]]:
    """Who does not run, and where the ranks are not in the same operations.

    Returns:
        A sentence, and the pids that it is about; an empty one where all run and agree, as far as
        their journals go back.
    """
    told, odd = [], set()
    for rank in ranks:
        if rank.state in _HALTED and not rank.has_departed:
            told.append(f"{_name(ranks, rank.pid)} is {rank.state}")
            odd.add(rank.pid)
    sentence, also_odd = _different_operations(ranks)
    if sentence:
        told.append(sentence)
    return "; ".join(told), odd | also_odd


def _different_operations(ranks: Sequence[LocalRank]) -> tuple[str, set[int]]:
    seen: dict[tuple[int, int], dict[int, Operation]] = {}
    newest: dict[int, dict[int, int]] = {}
    for rank in ranks:
        for operation in rank.operations:
            if operation.kind in _MESSAGES:
                continue
            # The newest comes first; numbers begin anew in a group that is made anew.
            by_pid = seen.setdefault((operation.group, operation.sequence), {})
            by_pid.setdefault(rank.pid, operation)
            newest.setdefault(operation.group, {}).setdefault(rank.pid, operation.sequence)
    for (_, _), by_pid in sorted(seen.items(), key=lambda item: item[0][1]):
        kinds = {pid: each.kind for pid, each in by_pid.items()}
        if len(set(kinds.values())) > 1:
            common = max(kinds.values(), key=list(kinds.values()).count)
            odd = {pid for pid, kind in kinds.items() if kind != common}
            told = "; ".join(f"{_name(ranks, p)} is in {o.describe()}" for p, o in by_pid.items())
            return f"they called different operations: {told}", odd
    # What has failed counts until its rank goes on, with other ranks perhaps.
    last = {rank.pid: rank.operations[0] for rank in ranks if rank.operations}
    for (group, sequence), by_pid in sorted(seen.items(), key=lambda item: item[0][1]):
        waited = [each for each in by_pid.values() if each.state == "running"]
        failed = [e for pid, e in by_pid.items() if e.state == "failed" and e is last[pid]]
        if not waited and not failed:
            continue
        missing = {pid for pid, last in newest[group].items() if last < sequence}
        doubt = ""
        if not missing and waited:
            # Journals don't tell who is in a group.
            missing = {e.pid for e in ranks if e.has_page and e.pid not in newest[group]}
            doubt = ", unless it is a group without them"
        if missing:
            first = next(iter(by_pid.values()))
            names = ", ".join(_name(ranks, pid) for pid in sorted(missing))
            wait = "wait" if waited else "waited"
            return (
                f"{names} never entered {first.describe()}, which others {wait} in{doubt}",
                missing,
            )
    return "", set()


def _name(ranks: Sequence[LocalRank], pid: int) -> str:
    rank = next(each.rank for each in ranks if each.pid == pid)
    return f"pid {pid}" if rank is None else f"rank {rank}"
