"""Going on with the survivors of a job that has lost ranks."""

import logging
import os
import time
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from pydist import _native
from pydist.config.variables import parse_timeout
from pydist.errors import Aborted, Error, InvalidUsage, PeerLost, Timeout, TransportError
from pydist.job import current, membership
from pydist.job import past as history
from pydist.job.launchers import Placement
from pydist.job.log import logger
from pydist.job.meeting.backend_agreement import require_alive
from pydist.job.meeting.bounded_store_calls import STORE_PATIENCE_S, answer_within
from pydist.job.meeting.meeting_number import go_on_from
from pydist.job.meeting.rendezvous import launcher_serves, meet
from pydist.job.past import Past
from pydist.job.processes import own_process
from pydist.job.recovery.left_behind import mark_left_behind
from pydist.job.recovery.survivors import Patience, Survivor, Verdict, agree_on_survivors

__all__ = ["reform"]

# Joining takes a second or so, and longer on a busy machine.
_LEAST_JOINING_S = 10.0
# After how long a store is gone at which nothing answers. Rank 0 serves it again a moment after it
# has left the job; a host that is cut off is lost to the engine in as long.
_STORE_AWAY_S = 10.0

# What this process, as rank 0, serves since the first time: the others may come to the next one
# before it does, and what they have agreed on is in there.
_served: dist.Store | None = None


def reform(
    min_ranks: int = 1,
    *,
    settle: float = 30.0,
    timeout: float | timedelta | None = None,
) -> None:
    """Leaves a job that has failed, and forms one of the ranks that are left. All of them call it.

    Ranks get new numbers, without gaps, in the order of the old ones; RANK, WORLD_SIZE, LOCAL_RANK
    and LOCAL_WORLD_SIZE in the environment follow. torch.distributed's default group is a new one.
    A rank keeps its GPU. Groups, wrappers and sharded optimizers of the old job are of no use any
    more: clear the gradients of the module that they held (`model.module`), wrap it anew, and load
    the last checkpoint on all ranks, which may have been one step apart (`docs/failure.md` has an
    example).

    A rank that has died is not waited for, where this process can see that it has: on the same
    host. Any other that does not call is waited for until `settle` has passed, and gets `Aborted`
    if it calls later. A rank that dies while the job is formed is left out likewise.

    It needs a launcher that ends no survivors, and that serves the job's store (or a rank 0 that is
    among the survivors, if that serves it): `pydist run --on-failure=continue`,
    `pydist.spawn(on_failure="continue")`. Under torchrun all ranks are started again instead.

    Args:
        min_ranks: with how many ranks to go on at least; the largest that a rank asks for counts.
        settle: seconds that a rank is waited for that is not known to have died, half of `timeout`
            at most; also, if it is more than 10, that joining may take before it is tried without
            those that don't come.
        timeout: seconds (or a timedelta) that all of it may take; by default as long as operations
            may, which keep the time-out that they had.

    Raises:
        InvalidUsage: this process was in no job; or the script has made torch.distributed's default
            group, and has not destroyed it.
        PeerLost: fewer than `min_ranks` are left; on all that are, with who is missing.
        Aborted: the others have gone on without this rank.
        Timeout: the time is up.
        TransportError: the store of the job is gone: the process that served it has died, or
            nothing has answered at its address for 10 seconds, as where its host is lost.
        Error: as of `init`. Whatever is raised, this process is in no job then.

    Example:
        >>> import pydist
        >>> pydist.init()
        >>> pydist.reform()
        >>> pydist.world_size()
        1
    """
    if min_ranks < 1:
        raise InvalidUsage(f"min_ranks={min_ranks} is not valid; it must be 1 or more.")
    if not 0 <= settle < 3.2e8:
        raise InvalidUsage(f"settle={settle} is not valid; it must be a number of seconds.")
    with membership.lock:
        past, placement = _past_of_this_process()
        wait = past.timeout if timeout is None else parse_timeout(timeout)
        wait_s = wait.total_seconds()
        patience = Patience(min(settle, wait_s / 2), time.monotonic() + wait_s)
        membership.shutdown()
        for give_up in current.before_going_on:
            give_up()
        with membership.entering():
            _form(past, placement, min_ranks, patience)


def _past_of_this_process() -> tuple[Past, Placement]:
    past = history.last()
    if past is None:
        raise InvalidUsage(
            "this process has been in no job, so there is none to reform: call pydist.init()."
        )
    joined = current.job.membership
    if dist.is_initialized() and (joined is None or not joined.owns_group):
        raise InvalidUsage(
            "torch.distributed's default group was made by the script, and pydist can't replace "
            "it: call torch.distributed.destroy_process_group(), and then pydist.reform(), which "
            "makes a new one."
        )
    if past.placement is None:
        raise InvalidUsage(
            "the script has made torch.distributed's default group with ranks that no launcher "
            "has set in the environment, so pydist does not know where those that are left could "
            "meet: form a new group in the script."
        )
    return past, past.placement


def _form(past: Past, placement: Placement, min_ranks: int, patience: Patience) -> None:
    """Agrees with the other survivors, and joins them, until that succeeds or the time is up."""
    global _served
    host = past.processes[0]
    away_since_s: float | None = None

    def check_host(store: dist.Store | None) -> None:
        nonlocal away_since_s
        if not launcher_serves() and host.is_known_dead:
            raise TransportError(
                f"rank 0 ({host}) served the store of the job and has died, so those that are left "
                "can't find each other. `pydist run --on-failure=continue` serves it itself."
            )
        now_s = time.monotonic()
        if store is not None or away_since_s is None:
            away_since_s = None if store is not None else now_s
        elif now_s - away_since_s >= _STORE_AWAY_S and placement.rendezvous is not None:
            server = "the launcher" if launcher_serves() else f"rank 0 ({host})"
            raise TransportError(
                "nothing has answered at the job's store, "
                f"{placement.rendezvous.address}:{placement.rendezvous.port}, for "
                f"{_STORE_AWAY_S:g} s, so those that are left can't find each other: {server}, "
                "which serves it, has died, or its host is lost or can't be reached from this one. "
                "Start the job again."
            )

    store, serves, _, numbers = meet(placement, _left(patience), check_host, purpose="reform")
    if serves:
        _served = store
    while True:
        own = Survivor(
            own_process(),
            f"{_native.host_identity()} {os.environ.get('GROUP_RANK', '')}",
            history.generations(),
            min_ranks,
        )
        verdict = agree_on_survivors(store, own, past.processes, past.turn, patience)
        processes = tuple(each.process for each in verdict.survivors)
        if placement.rendezvous is not None:
            gone = [process for process in past.processes if process not in processes]
            with suppress(RuntimeError):  # a store that is gone is told of when joining
                answer_within(STORE_PATIENCE_S, mark_left_behind, store, gone)
        placement = _place(placement, verdict, own)
        past = replace(
            past,
            rank=placement.rank,
            processes=processes,
            placement=placement,
            turn=verdict.turn,
        )
        history.succeed(past, verdict.generation)
        with suppress(RuntimeError):  # a store that is gone is told of when joining
            generation = verdict.generation
            answer_within(STORE_PATIENCE_S, go_on_from, numbers, placement.rank, generation)
        _set_environment(placement)
        # All were there a moment ago: whoever does not come now has died, or is frozen.
        limit = min(_left(patience), timedelta(seconds=max(patience.settle_s, _LEAST_JOINING_S)))
        hope = partial(require_alive, processes)
        current.replace(verdict.generation, hope, past.gpu, limit)
        try:
            membership.become(
                membership.enter(
                    placement,
                    dist.PrefixStore(f"generation {verdict.generation}", store),
                    serves,
                    past.backend,
                    past.timeout,
                )
            )
        except Error as error:
            # Those that have joined already learn of it at their next operation, and come then.
            is_missing = isinstance(error, (Aborted, PeerLost, Timeout)) or any(
                process.is_known_dead for process in processes
            )
            if not is_missing or time.monotonic() >= patience.deadline_s:
                raise
            logger.warning("%s The survivors begin again.", error)
            continue
        if placement.rank == 0:
            logger.log(
                logging.WARNING if verdict.lost else logging.INFO,
                "generation %d of the job goes on with %d rank%s%s",
                verdict.generation,
                len(processes),
                "" if len(processes) == 1 else "s",
                f": {verdict.lost}" if verdict.lost else "",
            )
        return


def _left(patience: Patience) -> timedelta:
    return timedelta(seconds=max(0.1, patience.deadline_s - time.monotonic()))


def _place(placement: Placement, verdict: Verdict, own: Survivor) -> Placement:
    ranks = list(verdict.survivors)
    rank = [each.process for each in ranks].index(own.process)
    same_host = [each.process for each in ranks if each.host == own.host]
    return replace(
        placement,
        rank=rank,
        world_size=len(ranks),
        local_rank=same_host.index(own.process),
        local_world_size=len(same_host),
    )


def _set_environment(placement: Placement) -> None:
    """For `init`, and for libraries that read there which rank this is."""
    os.environ.update(
        RANK=str(placement.rank),
        WORLD_SIZE=str(placement.world_size),
        LOCAL_RANK=str(placement.local_rank),
        LOCAL_WORLD_SIZE=str(placement.local_world_size),
    )
    if "ROLE_RANK" in os.environ:
        os.environ.update(ROLE_RANK=str(placement.rank), ROLE_WORLD_SIZE=os.environ["WORLD_SIZE"])
    if placement.rendezvous is not None:
        os.environ["MASTER_ADDR"] = placement.rendezvous.address
        os.environ["MASTER_PORT"] = str(placement.rendezvous.port)
