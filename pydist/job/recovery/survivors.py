"""Who goes on: the processes that are left of a job agree on it, in the job's store.

Note [One chain of verdicts]
Two sets of ranks must never both take themselves for the job. So the survivors don't vote: each
tells the store that it is here, and whoever first finds that nobody else is to be waited for
publishes the list by `compare_set`, of which the store lets one succeed. A process is waited for
until it is here, is known to have ended, or has let `settle` seconds pass: all of them, so that
nobody is left out because the time of another one is up, which raises instead and publishes
nothing. All read the one list; who is not in it has come too late, and raises.

Then all on the list confirm that they have read it, and one more `compare_set` says whether the
list stands: it does if all have confirmed, and not if one of them died or froze meanwhile. In that
case, and after a verdict that is an error for all, the next turn begins. Turns are numbered from 1
for the whole life of the job, and a process that takes part in one has read all before it. So each
list that stands is part of the one before, and two that have nothing in common can't both stand.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch.distributed as dist

from pydist.errors import Aborted, Error, PeerLost, Timeout, TransportError
from pydist.job.log import logger
from pydist.job.meeting.bounded_store_calls import STORE_PATIENCE_S, answer_within
from pydist.job.processes import Process

__all__ = ["Patience", "Survivor", "Verdict", "agree_on_survivors"]


_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.02


@dataclass(frozen=True)
class Survivor:
    """What a process tells of itself.

    Attributes:
        process: Which one it is.
        host: An identity of its host, as its launcher sees it: those that share it have local
            ranks.
        generations: The number of the last generation of which it knows.
        min_ranks: With how many ranks it would go on.
    """

    process: Process
    host: str
    generations: int
    min_ranks: int


@dataclass(frozen=True)
class Patience:
    """How long the agreement may take.

    Attributes:
        settle_s: How long a process is waited for that does not come and is not known to have
            ended.
        deadline_s: When to give up, on the monotonic clock.
    """

    settle_s: float
    deadline_s: float


@dataclass(frozen=True)
class Verdict:
    """The list that stands.

    Attributes:
        turn: Its number in the chain.
        generation: The number of the generation that the survivors form.
        survivors: They, in the order of their new ranks, which is that of the old ones.
        lost: The old ranks that are not among them, with the reason; for people.
    """

    turn: int
    generation: int
    survivors: tuple[Survivor, ...]
    lost: str


def agree_on_survivors(
    store: dist.Store,
    own: Survivor,
    roster: Sequence[Process],
    turn: int,
    patience: Patience,
) -> Verdict:
    """Agrees on the processes that go on; see Note [One chain of verdicts].

    Every process that wants to go on calls it.

    Args:
        store: The same for all, and for nothing else.
        own: This process.
        roster: The processes of the generation that is over, in rank order.
        turn: The last turn of which this process knows; 0 at first.
        patience: How long to wait for others.

    Raises:
        PeerLost: Fewer came than one of them demands; on all that came.
        Aborted: The others went on without this process, which came too late.
        Timeout: The time is up.
        TransportError: The store is gone.
    """
    old = {process.key: f"rank {rank} ({process})" for rank, process in enumerate(roster)}
    while True:
        turn += 1
        board = _Board(store, turn, patience)
        is_past = board.has("verdict")
        verdict = _decide(board, own, roster, old, patience)
        if "error" in verdict:
            if is_past:
                continue  # all that were there have raised, and may have come again
            raise PeerLost(verdict["error"], **verdict["blame"])
        survivors = tuple(
            Survivor(**{**each, "process": Process(**each["process"])})
            for each in verdict["survivors"]
        )
        going_on = [each.process for each in survivors]
        if own.process not in going_on:
            raise Aborted(
                f"{old[own.process.key]} came too late: {len(going_on)} other ranks went on "
                f"without it, as generation {verdict['generation']} of the job. End this process."
            )
        obstacle = _confirm(board, own.process, going_on, old, patience)
        if not obstacle:
            return Verdict(turn, verdict["generation"], survivors, verdict["lost"])
        logger.warning("%s while the survivors formed a job; they begin again.", obstacle)
        roster, own = going_on, replace(own, generations=verdict["generation"])
        if time.monotonic() >= patience.deadline_s:
            raise Timeout(f"pydist.reform timed out: {obstacle}.")


class _Board:
    """What the processes tell each other in one turn."""

    def __init__(self, store: dist.Store, turn: int, patience: Patience) -> None:
        self._store = dist.PrefixStore(f"turn {turn}", store)
        self._patience = patience

    def _ask(self, name: str, *args: Any) -> Any:
        # The store gets a second to answer even where the time is over.
        left_s = max(1.0, self._patience.deadline_s - time.monotonic())
        limit_s = min(STORE_PATIENCE_S, left_s)
        try:
            return answer_within(limit_s, getattr(self._store, name), *args)
        except Error:
            raise
        except RuntimeError as error:
            raise TransportError(
                "the store of the job is gone, so those that are left can't agree on who goes on; "
                f"is the process that hosts it (the launcher or rank 0) still alive? ({error})"
            ) from error

    def has(self, key: str) -> bool:
        return bool(self._ask("check", [key]))

    def put(self, key: str, value: Any) -> None:
        self._ask("set", key, json.dumps(value))

    def get(self, key: str) -> Any:
        return json.loads(self._ask("get", key))

    def settle(self, key: str, value: Any) -> Any:
        """Sets what one process alone may set, and returns what the first has set."""
        return json.loads(self._ask("compare_set", key, "", json.dumps(value)))


class _Pause:
    """Sleeps a little longer each time."""

    def __init__(self) -> None:
        self._length_s = _FIRST_PAUSE_S

    def sleep(self) -> None:
        time.sleep(self._length_s)
        self._length_s = min(2 * self._length_s, _LONGEST_PAUSE_S)


def _decide(
    board: _Board,
    own: Survivor,
    roster: Sequence[Process],
    old: dict[str, str],
    patience: Patience,
) -> dict[str, Any]:
    """The verdict of a turn, which this process may be the one to give.

    Raises:
        Timeout: The time is up, and those who are missing may still come.
    """
    board.put(f"here/{own.process.key}", asdict(own))
    late_s = time.monotonic() + patience.settle_s
    pause = _Pause()
    missing = [process for process in roster if process != own.process]
    while not board.has("verdict"):
        missing = [process for process in missing if not board.has(f"here/{process.key}")]
        awaited = [process for process in missing if not process.is_known_dead]
        now_s = time.monotonic()
        if not awaited or now_s >= late_s:
            board.settle("verdict", _propose(board, roster, missing, old, patience))
            break
        if now_s >= patience.deadline_s:
            raise Timeout(
                f"pydist.reform timed out: {old[awaited[0].key]} has not called it, and may yet."
            )
        pause.sleep()
    verdict = board.get("verdict")
    assert isinstance(verdict, dict)
    return verdict


def _propose(
    board: _Board,
    roster: Sequence[Process],
    missing: Sequence[Process],
    old: dict[str, str],
    patience: Patience,
) -> dict[str, Any]:
    here, lost, why = [], [], []
    for process in roster:
        if process.is_known_dead:
            lost.append(process)
            why.append("has died")
        elif process in missing:
            lost.append(process)
            why.append(f"did not call pydist.reform within {patience.settle_s:g} s")
        else:
            here.append(board.get(f"here/{process.key}"))
    told = "; ".join(f"{old[one.key]} {fate}" for one, fate in zip(lost, why, strict=True))
    least = max(each["min_ranks"] for each in here)
    if len(here) < least:
        return {
            "error": f"{len(here)} of {len(roster)} ranks are left, and min_ranks={least} are "
            f"needed to go on: {told}.",
            "blame": {
                "ranks": [list(old).index(process.key) for process in lost],
                "host": lost[0].host,
                "pid": lost[0].pid,
                "cause": why[0],
            }
            if lost
            else {},
        }
    generation = 1 + max(each["generations"] for each in here)
    return {"survivors": here, "generation": generation, "lost": told}


def _confirm(
    board: _Board,
    own: Process,
    going_on: Sequence[Process],
    old: dict[str, str],
    patience: Patience,
) -> str:
    """Whether all have read the list: why it does not stand, or nothing if it does."""
    board.put(f"confirmed/{own.key}", True)
    until_s = min(time.monotonic() + patience.settle_s, patience.deadline_s)
    pause = _Pause()
    missing = [process for process in going_on if process != own]
    while not board.has("obstacle"):
        missing = [process for process in missing if not board.has(f"confirmed/{process.key}")]
        dead = [process for process in going_on if process.is_known_dead]
        obstacle = None
        if dead:
            obstacle = f"{old[dead[0].key]} died"
        elif not missing:
            obstacle = ""
        elif time.monotonic() >= until_s:
            obstacle = f"{old[missing[0].key]} stopped"
        if obstacle is not None:
            return str(board.settle("obstacle", obstacle))
        pause.sleep()
    return str(board.get("obstacle"))
