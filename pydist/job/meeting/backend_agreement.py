"""What the ranks of a job tell each other when they meet, and the one verdict that follows.

Note [One choice for the whole job]
`auto` must come out the same on every rank, and a rank that was told something else must not be
left waiting. So the first thing that the ranks of a job exchange, through the store and before
anything is built on it, is a hello: what each was asked for, which versions it runs, and which GPUs
it has. Rank 0 reads what all said and publishes one verdict, which all follow: the backend to try,
or the error that all raise. Where the native engine may be taken, each hello also has what the
engine's ranks tell each other first, and all hear with the verdict what rank 0 makes of that: the
engine's roster, or why there can be none. Otherwise the engine itself agrees whether it can serve
them all (`create_native` succeeds on every rank, or raises the same TransportError on every rank,
as does `create_nccl`); on TransportError `auto` takes the next one, everywhere. Groups that are
made later follow the job's choice without asking again.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from pydist.errors import (
    Aborted,
    Error,
    InvalidUsage,
    Mismatch,
    PeerLost,
    Timeout,
    TransportError,
)
from pydist.job.last_words import in_words
from pydist.job.log import logger
from pydist.job.meeting.gpu_assignment import gpus_of_ranks
from pydist.job.meeting.nccl_obstacles import why_not_nccl
from pydist.job.meeting.store_waits import values_of, wait_for_keys
from pydist.job.processes import Process
from pydist.job.rank_names import name_ranks, who_said_what

__all__ = ["Verdict", "agree", "judge", "require_alive"]

# How long after rank 0's own deadline the others wait for its verdict.
_VERDICT_GRACE_S = 5.0
# How long a wait may last before the log tells for whom it waits.
_LONG_WAIT_S = 60.0


_ERRORS: dict[str, type[Error]] = {
    kind.__name__: kind
    for kind in (Aborted, Error, InvalidUsage, Mismatch, PeerLost, Timeout, TransportError)
}


# Raises PeerLost where one of these ranks can't come any more.
HopeOf = Callable[[Sequence[int]], None]

# What all ranks need for the native engine, made of the introductions and processes of all, in rank
# order. Raises TransportError where they can't be on it, Mismatch where they are not set alike.
MakeRoster = Callable[[Sequence[str], Sequence[Process]], bytes]


class Verdict(NamedTuple):
    """What follows for all ranks."""

    # As in PYDIST_BACKEND.
    wish: str
    # An identity of each rank's host, in rank order.
    hosts: tuple[str, ...]
    # The number of the GPU that each rank takes, of those that it sees; None where it sees none.
    gpus: tuple[int | None, ...]
    # Why NCCL can't serve these ranks, for people; None if it can, or nobody asked for it.
    not_nccl: str | None
    # Whether any rank's torch is built for CUDA: otherwise nobody expects a GPU.
    for_cuda: bool
    # Whether any rank has no GPU where one was meant (`describe_gpus`).
    misses_gpu: bool
    # What each rank told of its network (`describe_network`), in rank order.
    networks: tuple[dict[str, Any], ...]
    # Each rank's process, in rank order.
    processes: tuple[Process, ...]
    # Why these ranks can't meet on the native engine, if that is known already.
    not_native: TransportError | None = None
    # What it needs, where it can and the ranks have introduced themselves.
    roster: bytes | None = None


def _blame(ranks: Sequence[int], process: Mapping[str, Any] | None, cause: str) -> dict[str, Any]:
    """Who is to blame, as errors take it; `process` is of the first of `ranks`, None if unknown."""
    host, pid = (process["host"], process["pid"]) if process else (None, None)
    return {"ranks": list(ranks), "host": host, "pid": pid, "cause": cause}


def judge(hellos: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What follows from what all ranks said: the fields of a verdict, or an error for all."""
    wrong = [(r, hello) for r, hello in enumerate(hellos) if "error" in hello]
    if wrong:
        hello = wrong[0][1]
        return {
            "error": hello.get("kind", "InvalidUsage"),
            "message": " ".join(f"rank {r}: {each['error']}" for r, each in wrong),
            "blame": _blame([r for r, _ in wrong], hello.get("process"), hello["error"]),
        }
    for package in ("pydist", "torch"):
        if len({hello[package] for hello in hellos}) > 1:
            versions = who_said_what(f"{package} {hello[package]}" for hello in hellos)
            return {
                "error": "Mismatch",
                "message": f"the ranks run different versions: {versions}. Install the same "
                "everywhere.",
            }
    wish = hellos[0]["wish"]
    if len({hello["wish"] for hello in hellos}) > 1:
        wishes = who_said_what(
            f"{hello['source']}{'' if hello['source'].endswith('=') else '='}'{hello['wish']}'"
            for hello in hellos
        )
        return {
            "error": "Mismatch",
            "message": f"the ranks were asked for different backends: {wishes}. Give all of them "
            "the same.",
        }
    gpus = gpus_of_ranks(hellos)
    obstacle = why_not_nccl(hellos, gpus) if wish in ("auto", "nccl") else None
    if obstacle is not None and wish == "nccl":
        return {
            "error": obstacle.error,
            "message": f"backend 'nccl' can't serve these ranks: {obstacle.why}. "
            f"{obstacle.way_out}",
        }
    return {
        "wish": wish,
        "hosts": [hello["host"] for hello in hellos],
        "gpus": gpus,
        "not_nccl": obstacle.why if obstacle is not None else None,
        "for_cuda": any(hello["for_cuda"] for hello in hellos),
        "misses_gpu": any(hello["misses_gpu"] for hello in hellos),
        "networks": [hello["network"] for hello in hellos],
        "processes": [hello["process"] for hello in hellos],
    }


def _missing(store: dist.Store, size: int) -> list[int]:
    return [rank for rank in range(size) if not store.check([f"hello/{rank}"])]


def _warn_when_long(store: dist.Store, size: int, timeout: timedelta) -> Callable[[], None]:
    """For `look` of a wait that begins now: logs once who is missing, where the wait lasts."""
    due_s = time.monotonic() + _LONG_WAIT_S
    has_warned = timeout.total_seconds() <= _LONG_WAIT_S

    def look() -> None:
        nonlocal has_warned
        if has_warned or time.monotonic() < due_s:
            return
        has_warned = True
        missing = _missing(store, size)
        logger.warning(
            "%s within %g s; this rank waits for %g s in all.",
            f"{name_ranks(missing)} of {size} did not join"
            if missing
            else "all ranks have joined, but rank 0 did not say what follows",
            _LONG_WAIT_S,
            timeout.total_seconds(),
        )

    return look


def require_alive(expected: Sequence[Process], ranks: Sequence[int]) -> None:
    """Raises where some of the processes that a generation waits for are known to have ended.

    Args:
        expected: The process of each rank of the generation, in rank order.
        ranks: Those to look at.

    Raises:
        PeerLost: one of them has ended.
    """
    dead = [rank for rank in ranks if expected[rank].is_known_dead]
    if dead:
        who = ", ".join(f"rank {rank} ({expected[rank]})" for rank in dead)
        raise PeerLost(
            f"{who} has died and can't join again, so there won't be {len(expected)} ranks: "
            "pydist.reform() goes on with those that are left.",
            ranks=dead,
            host=expected[dead[0]].host,
            pid=expected[dead[0]].pid,
            cause="has died",
        )


def _collect(
    store: dist.Store,
    size: int,
    timeout: timedelta,
    require_hope: HopeOf | None,
    make_roster: MakeRoster | None,
) -> tuple[dict[str, Any], bytes]:
    """The verdict and the roster, which is empty where there is none."""
    keys = [f"hello/{rank}" for rank in range(size)]

    warn_when_long = _warn_when_long(store, size, timeout)

    def look() -> None:
        if require_hope is not None:
            require_hope(range(size))
        warn_when_long()

    try:
        have_come = wait_for_keys(store, keys, timeout, look)
    except PeerLost as error:
        return _error_as_json(error), b""
    # One that comes now is in time.
    if not have_come and (missing := _missing(store, size)):
        return {
            "error": "Timeout",
            "message": f"{name_ranks(missing)} of {size} did not join within "
            f"{timeout.total_seconds():g} s. Look at what they print; PYDIST_TIMEOUT or "
            "pydist.init(timeout=) gives them more time.",
            "blame": _blame(missing, None, "did not join"),
        }, b""
    hellos = [json.loads(hello) for hello in values_of(store, keys)]
    verdict = judge(hellos)
    if make_roster is None or "error" in verdict or verdict["wish"] == "gloo":
        return verdict, b""
    # A build that says none is another one.
    introductions = [hello.get("introduction", "") for hello in hellos]
    try:
        return verdict, make_roster(introductions, _processes_of(verdict))
    except TransportError as error:
        return {**verdict, "not_native": _error_as_json(error)}, b""
    except Mismatch as error:
        return _error_as_json(error), b""


def _error_as_json(error: Error) -> dict[str, Any]:
    """An error that all are to raise, or to hear of."""
    return {"error": type(error).__name__, "message": str(error), "blame": error.blame}


def _error_of_json(told: Mapping[str, Any]) -> Error:
    return _ERRORS[told["error"]](told["message"], **told.get("blame", {}))


def _processes_of(verdict: Mapping[str, Any]) -> tuple[Process, ...]:
    return tuple(Process(**each) for each in verdict["processes"])


def _hear(
    store: dist.Store, size: int, timeout: timedelta, require_hope: HopeOf | None
) -> tuple[dict[str, Any], bytes]:
    """What rank 0 tells the others, as it has it from `_collect`."""
    warn_when_long = _warn_when_long(store, size, timeout)

    def look() -> None:
        # Rank 0 looks at the others, and tells all.
        if require_hope is not None and not store.check(["verdict"]):
            require_hope([0])
        warn_when_long()

    patience = timeout + timedelta(seconds=_VERDICT_GRACE_S)
    if not wait_for_keys(store, ["hello/0"], patience, look):
        raise Timeout(
            f"rank 0 did not join within {timeout.total_seconds():g} s: look at what it prints.",
            ranks=(0,),
            cause="did not join",
        )
    # Rank 0 gives the others as much time, from when it has come.
    if not wait_for_keys(store, ["verdict"], patience, look):
        raise Timeout(
            f"rank 0 has joined, but has not told within {timeout.total_seconds():g} s who else "
            "did: it has died or hangs; look at what it prints.",
            ranks=(0,),
            cause="has not told who joined",
        )
    verdict, roster = values_of(store, ["verdict", "roster"])
    return json.loads(verdict), roster


def agree(
    store: dist.Store,
    rank: int,
    size: int,
    hello: Mapping[str, Any],
    timeout: timedelta,
    require_hope: HopeOf | None = None,
    make_roster: MakeRoster | None = None,
) -> Verdict:
    """Tells the other ranks `hello`; see Note [One choice for the whole job].

    Every rank calls it.

    Args:
        store: for this agreement alone.
        hello: `host`, `process` (its fields), `pydist`, `torch` (versions), `wish` and its
            `source`, what `describe_gpus` tells, in `network` what `describe_network` does, and its
            `introduction` to ranks of the native engine, unless the wish is gloo; or the `error`
            that all are to raise, and its `kind` unless that is InvalidUsage.
        timeout: how long to wait for the others.
        require_hope: called now and then while some ranks are waited for, to raise PeerLost where
            one of them can't come.
        make_roster: for rank 0, where ranks introduce themselves.

    Raises:
        InvalidUsage: a rank said an error, or asks for a backend that can't be.
        Mismatch: the ranks were asked for different backends, or run different versions.
        PeerLost: a rank can't come: its process has ended.
        Timeout: a rank did not come.
        TransportError: the store is gone, a rank has come to the end of something (descriptors,
            memory), or NCCL was asked for and some rank has none.
        Aborted: rank 0 was interrupted.
    """
    store.set(f"hello/{rank}", json.dumps(hello))
    if rank == 0:
        verdict: dict[str, Any] = {
            "error": "Aborted",
            "message": "rank 0 was interrupted while the ranks met.",
            "blame": _blame([0], hello.get("process"), "was interrupted"),
        }
        roster = b""
        try:
            verdict, roster = _collect(store, size, timeout, require_hope, make_roster)
        except Error as error:
            verdict = _error_as_json(error)
            raise
        except (MemoryError, OSError, LookupError, TypeError, ValueError) as error:
            # A hello that can't be read, say: the others must hear of that.
            words = in_words(error)
            blame = _blame([0], hello.get("process"), words)
            verdict = {"error": "TransportError", "message": f"rank 0: {words}", "blame": blame}
            raise
        finally:
            # Whoever finds the verdict finds the roster, too.
            store.set("roster", roster)  # type: ignore[arg-type]
            store.set("verdict", json.dumps(verdict))
    else:
        verdict, roster = _hear(store, size, timeout, require_hope)
    if "error" in verdict:
        raise _error_of_json(verdict)
    obstacle = _error_of_json(verdict["not_native"]) if "not_native" in verdict else None
    assert obstacle is None or isinstance(obstacle, TransportError)
    return Verdict(
        verdict["wish"],
        tuple(verdict["hosts"]),
        tuple(verdict["gpus"]),
        verdict["not_nccl"],
        verdict["for_cuda"],
        verdict["misses_gpu"],
        tuple(verdict["networks"]),
        _processes_of(verdict),
        obstacle,
        roster or None,
    )
