"""Where the ranks of a job find each other: a key-value store that rank 0, or torchrun, serves."""

import encodings.idna  # noqa: F401  socket looks it up by its name, when there may be no memory left
import math
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch.distributed as dist

from pydist.errors import Timeout, TransportError
from pydist.job.descriptors import require_descriptors
from pydist.job.launchers import Placement, Rendezvous
from pydist.job.meeting.bounded_store_calls import STORE_PATIENCE_S, answer_within
from pydist.job.meeting.host_address import reachable_address
from pydist.job.meeting.meeting_number import next_number, require_only_process
from pydist.job.meeting.store_waits import wait_for_keys

__all__ = ["Meeting", "launcher_serves", "meet"]

# How long a rank waits for the server that it reached to prove that it is this meeting's.
_PROOF_S = 2.0
# How long a connection has to last by which it is seen that the server is not about to end: a
# process that ends closes its connections to the ranks a moment before the one it listens on.
_LASTING_S = 0.2
# How much longer than its time-out a store's client may take to say that it has passed.
_ANSWER_GRACE_S = 1.0


# Raises where rank 0, or the store, is waited for in vain; is given the store, once that answers.
CheckHost = Callable[[dist.Store | None], None]


class Meeting(NamedTuple):
    """Where the ranks of a job are, once they have found each other."""

    # What all ranks share.
    store: dist.Store
    # Whether this process serves it.
    serves: bool
    # How often the ranks have met in this store, with this time, the same on all of them; 0 for a
    # meeting that is not counted.
    generation: int
    # Where these meetings are counted.
    numbers: dist.Store


def launcher_serves() -> bool:
    """Whether the launcher serves the job's store, as torchrun's agent does, and not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def meet(
    placement: Placement,
    timeout: timedelta,
    check_host: CheckHost | None = None,
    *,
    purpose: str | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> Meeting:
    """The store that all ranks share. Every rank calls it.

    Args:
        placement: this process's, by its launcher.
        timeout: how long to wait for the server, and for rank 0.
        check_host: called now and then while rank 0, or the server, is waited for.
        purpose: for a meeting that rank 0 does not count, since it may be gone: names the part of
            the store that is for it. The meeting has no generation then.
        meanwhile: what this process has to do by itself, for the time that it takes to reach a
            server; called whenever it reaches one.

    Raises:
        InvalidUsage: nobody knows an address of rank 0's host.
        Timeout: another job's server answers, or rank 0 does not come.
        TransportError: rank 0 can't serve the store, or can't be reached.
        Error: whatever `check_host` raises.
    """
    rendezvous = placement.rendezvous
    if rendezvous is None:
        return Meeting(dist.HashStore(), False, 1, dist.HashStore())
    rendezvous = replace(rendezvous, address=reachable_address(rendezvous.address))
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    name = f"pydist {rendezvous.job} {restart}"

    agent_serves = launcher_serves()
    serves = placement.rank == 0 and not agent_serves

    def join(store: dist.Store, patience: timedelta) -> Meeting | None:
        numbers = dist.PrefixStore(name, store)
        look = None if check_host is None else partial(check_host, store)
        if purpose is not None:
            part = f"{name} {purpose}"
            if serves:
                store.set(part, "here")
            if not agent_serves and not wait_for_keys(store, [part], patience, look):
                return None
            return Meeting(dist.PrefixStore(part, store), serves, 0, numbers)
        generation = next_number(numbers, placement.rank, patience, look)
        if generation is None:
            return None
        part = f"{name} {generation}"
        return Meeting(dist.PrefixStore(part, store), serves, generation, numbers)

    # Its server may have died, which is why they meet.
    may_be_gone = purpose is not None
    if agent_serves or serves:
        store = (
            _serve(rendezvous, placement, timeout)
            if serves
            else _connect(rendezvous, placement, timeout, check_host, may_be_gone, meanwhile)
        )
        if (meeting := join(store, timeout)) is None:
            if purpose is None:
                require_only_process(dist.PrefixStore(name, store), placement.rank)
            raise Timeout(
                f"rank 0 did not join within {timeout.total_seconds():g} s: look at what it "
                "prints.",
                ranks=(0,),
                cause="did not join",
            )
        return meeting
    deadline_s = time.monotonic() + timeout.total_seconds()
    while True:
        # The server may be the one of an earlier meeting, on its way down, or somebody else's.
        left = timedelta(seconds=max(0.1, deadline_s - time.monotonic()))
        store = _connect(rendezvous, placement, left, check_host, may_be_gone, meanwhile)
        with suppress(TransportError):
            meeting = join(store, min(left, timedelta(seconds=_PROOF_S)))
            if meeting is not None:
                return meeting
        if time.monotonic() >= deadline_s:
            with suppress(TransportError):
                require_only_process(dist.PrefixStore(name, store), placement.rank)
            raise Timeout(
                f"rank {placement.rank}: what answers at {rendezvous.address}:{rendezvous.port} "
                "is not this job's rank 0 (another job may use the port): set MASTER_PORT to a "
                "free one on all ranks."
            )


def _serve(rendezvous: Rendezvous, placement: Placement, timeout: timedelta) -> dist.Store:
    try:
        return dist.TCPStore(
            rendezvous.address,
            rendezvous.port,
            world_size=placement.world_size,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as error:
        raise TransportError(
            f"rank 0 can't serve the job's store at {rendezvous.address}:{rendezvous.port}; if "
            f"another job uses the port, set MASTER_PORT to a free one on all ranks. ({error})"
        ) from error


def _await_server(
    rendezvous: Rendezvous,
    timeout: timedelta,
    check_host: CheckHost | None,
    may_be_gone: bool,
) -> None:
    """Waits until something listens there: torch's client would, too, but deaf to Ctrl-C."""
    deadline_s = time.monotonic() + timeout.total_seconds()
    place = (rendezvous.address, rendezvous.port)
    problem = ""
    pause_s = 0.001
    while (left_s := deadline_s - time.monotonic()) > 0:
        try:
            with socket.create_connection(place, min(left_s, 1.0)) as probe:
                if may_be_gone:
                    _require_lasting(probe)
        except OSError as error:
            require_descriptors(1, f"a connection to the job's store, {place[0]}:{place[1]},")
            problem = str(error)
            if check_host is not None:
                check_host(None)
            time.sleep(min(left_s, pause_s))
            pause_s = min(1.5 * pause_s, 0.05)
        else:
            return
    raise TransportError(
        f"nothing answers at the job's store, {place[0]}:{place[1]}, within "
        f"{timeout.total_seconds():g} s: is rank 0 up, and are MASTER_ADDR and MASTER_PORT those "
        f"of its host? ({problem})"
    )


def _require_lasting(probe: socket.socket) -> None:
    """Raises ConnectionError where the other end closes the connection at once."""
    probe.settimeout(_LASTING_S)
    with suppress(TimeoutError):  # a server waits to be asked
        probe.recv(1)
        raise ConnectionResetError("the server has closed the connection")


def _connect(
    rendezvous: Rendezvous,
    placement: Placement,
    timeout: timedelta,
    check_host: CheckHost | None,
    may_be_gone: bool,
    meanwhile: Callable[[], None] | None,
) -> dist.Store:
    start_s = time.monotonic()
    _await_server(rendezvous, timeout, check_host, may_be_gone)
    left = max(timeout - timedelta(seconds=time.monotonic() - start_s), timedelta(seconds=0.1))
    limit_s = min(left.total_seconds(), STORE_PATIENCE_S if may_be_gone else math.inf)
    try:
        return answer_within(
            limit_s + _ANSWER_GRACE_S,
            dist.TCPStore,
            rendezvous.address,
            rendezvous.port,
            world_size=placement.world_size,
            is_master=False,
            timeout=left,
            wait_for_workers=False,
            meanwhile=meanwhile,
        )
    except RuntimeError as error:
        raise TransportError(
            f"rank {placement.rank} can't reach the job's store at "
            f"{rendezvous.address}:{rendezvous.port} within {limit_s:g} s: is rank 0 up, and are "
            "MASTER_ADDR and MASTER_PORT those of its host? "
            f"({error})"
        ) from error
