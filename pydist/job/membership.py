"""Joining a job and leaving it."""

import atexit
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache, partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from pydist import _native
from pydist.config import in_force, tuning_file
from pydist.config.in_force import Configuration
from pydist.config.variables import default_timeout, parse_backend, parse_timeout, unknown_variables
from pydist.errors import InvalidUsage
from pydist.job import current, groups, last_words, log, past, phases
from pydist.job.backend_choice import Agreement
from pydist.job.backends import FirstMeeting
from pydist.job.current import Membership
from pydist.job.launchers import Placement, read_placement
from pydist.job.meeting.backend_agreement import require_alive
from pydist.job.meeting.gpu_assignment import gpu_of_local_rank
from pydist.job.meeting.launcher_news import require_none_ended
from pydist.job.meeting.rendezvous import meet
from pydist.job.meeting.serving_till_joined import note_joined, serve_till_joined
from pydist.job.processes import own_process
from pydist.job.second_call import require_same, require_timeout

if TYPE_CHECKING:
    from pydist.gpu.selection import Gpus

__all__ = [
    "abort",
    "backend",
    "device",
    "init",
    "is_initialized",
    "local_rank",
    "local_world_size",
    "rank",
    "shutdown",
    "world_size",
]

# Held by whoever joins or leaves.
lock = threading.RLock()


def init(
    backend: str | None = None,
    *,
    timeout: float | timedelta | None = None,
    config: Configuration | None = None,
    processes: int | None = None,
    gpus: "Gpus | None" = None,
) -> None:
    """Joins the job that the launcher describes in the environment. Every rank calls it.

    Without a launcher, `processes` or `gpus` have the script started again for the other ranks of
    this host, with its arguments: what stands above the call runs in each of them. This process is
    rank 0, also in a debugger. When one rank fails, all end.

    Creates torch.distributed's default process group on backend "pydist", so that
    `torch.distributed.*` works too. Where there is a default group already, on whatever backend,
    pydist uses it, and meets the other ranks through its store. Where no launcher has set anything,
    this is a world of one rank without any server. A second call may only repeat the first.

    `pydist run`, torchrun, mpirun (Open MPI, MPICH, Intel MPI, MVAPICH2), srun, flux run, jsrun,
    PALS, horovodrun and SkyPilot are understood; see `pydist.job.launchers`. RANK=0 WORLD_SIZE=1 in
    the environment says that this process trains alone.

    Args:
        backend: "auto", "native", "gloo" or "nccl", the same on every rank; by default the value
            of PYDIST_BACKEND, and "auto" without one. "auto" takes the fastest that every rank can
            use: nccl if every rank has a GPU of its own.
        timeout: seconds (or a timedelta) that joining, and later each operation, may take; by
            default the value of PYDIST_TIMEOUT, and 600 without one.
        config: a `pydist.Config`, a dict of its sections, or a file that has them: in force until
            `shutdown`. A later call may bring more of it, but not for the engine.
        processes: how many ranks, this one among them; under a launcher the number that it has
            started. By default one for each of `gpus`. Rank 0 may exit, and clean up, while others
            run: end with `pydist.barrier()` where they need what it cleans up.
        gpus: the GPUs that the ranks see, as for `pydist.spawn`; under a launcher it chooses them.

    Raises:
        InvalidUsage: an argument is of a wrong type; the backend is unknown, or another one than
            that of the running job, or of a default group on backend "pydist", or the time-out is;
            the environment describes half a job (the message names what is missing), or shows a
            launcher of several processes that is not understood; NCCL was asked for and a rank has
            no GPU, or shares one (the message names the ranks and the GPU); the process was forked
            from a rank amid its job; `processes` is not the launcher's number; or there are no such
            `gpus`, or too few, or the program is no script that can be started again.
        Mismatch: the ranks were asked for different backends, or run different versions.
        PeerLost: the process has been in a job whose ranks would meet again here, and can see that
            one of them has died: `pydist.reform` goes on with those that are left.
        Timeout: a rank did not come in time; the message names it.
        TransportError: rank 0 can't be reached, or the backend asked for can't serve these ranks.

    Example:
        >>> import pydist
        >>> pydist.init()
        >>> 0 <= pydist.rank() < pydist.world_size()
        True
    """
    wait = None if timeout is None else parse_timeout(timeout)
    configuration = in_force.configuration_of(config)
    _native.require_not_forked()
    with lock:
        if is_initialized():
            require_same(_joined(), backend, wait, processes, gpus, configuration)
            return
        chosen = None
        if processes is not None or gpus is not None:
            from pydist.job.own_ranks import start_own_ranks  # not at import: few need it

            chosen = start_own_ranks(processes, gpus, configuration)
        if current.job.membership is not None or _agreement_of_script() is None:
            shutdown()  # of what a destroyed default group has left
        with in_force.entering(configuration, backend, wait), entering():
            member = _adopt(backend, wait) if dist.is_initialized() else _join(backend, wait)
            become(member)
            current.job.gpus = chosen
        past.note(member, backend)
        if member.rank == 0:
            for name, nearest in unknown_variables():
                log.logger.warning(
                    "%s is set, but there is no such variable; did you mean %s?", name, nearest
                )


@contextmanager
def entering() -> Iterator[None]:
    """Prints the log, and leaves nothing behind of a job that can't be entered."""
    log.start()
    try:
        yield
    except BaseException:
        if _agreement_of_script() is None:
            current.replace()
        _native.release_process()
        log.stop()
        raise


def become(member: Membership) -> None:
    """Makes a membership this process's."""
    current.job.take(member)
    _native.set_rank(member.rank)
    atexit.register(_leave_at_exit)
    last_words.listen()


def _join(backend: str | None, timeout: timedelta | None) -> Membership:
    """Meets the other ranks and creates the default group."""
    placement = read_placement()
    if placement.doubt:
        log.logger.warning("%s", placement.doubt)
    wait = timeout or default_timeout()
    # A launcher that starts a process anew starts all of them, and they begin with generation 1.
    before = past.last()
    same = before is not None and (before.rank, len(before.processes)) == (
        placement.rank,
        placement.world_size,
    )

    def check_hope(store: dist.Store | None, ranks: Sequence[int]) -> None:
        if before is None and store is not None:
            require_none_ended(store)
        elif before is not None and same:
            require_alive(before.processes, ranks)

    prepare = cache(_prepare)  # once
    meeting = meet(placement, wait, lambda store: check_hope(store, [0]), meanwhile=prepare)
    prepare()
    past.begin(meeting.generation)
    current.replace(meeting.generation, partial(check_hope, meeting.store))
    phases.reach(phases.START_UP)
    return enter(placement, meeting.store, meeting.serves, backend, wait)


def _prepare() -> None:
    """What a process does for its groups before it makes them, whoever it meets."""
    tuning_file.load()
    own_process()  # which it tells the others, and knows from then on


def enter(
    placement: Placement,
    store: dist.Store,
    serves: bool,
    backend: str | None,
    wait: timedelta,
) -> Membership:
    """Creates torch's default group, on pydist's backend.

    Args:
        placement: this process's place.
        store: where the ranks meet, this once.
        serves: whether this process serves it.
        backend: as for `init`.
        wait: how long each operation may take, and joining, unless `current.job.joining` says
            less.
    """
    dist.init_process_group(
        "pydist",
        store=dist.PrefixStore("group", store),
        rank=placement.rank,
        world_size=placement.world_size,
        timeout=wait,
        pg_options=FirstMeeting(backend, wait),
    )
    if placement.rendezvous is not None:
        note_joined(store, placement.rank)
    if serves:
        assert current.job.agreement is not None
        processes = current.job.agreement.processes
        serve_till_joined(store, processes, current.job.joining or wait)
    return _describe(owns_group=True, placement=placement)


def _adopt(backend: str | None, timeout: timedelta | None) -> Membership:
    """Takes the default group that the script has made."""
    tuning_file.load()
    phases.reach(phases.START_UP)
    group = dist.group.WORLD
    assert group is not None
    communicator = groups.communicator_in(group)
    if communicator is None:
        seconds = timeout.total_seconds() if timeout is not None else None
        communicator = groups.bootstrap(group, backend=backend, timeout=seconds, is_world=True)
    else:
        if backend is not None and parse_backend(backend, "backend=") not in (
            "auto",
            communicator.backend,
        ):
            raise InvalidUsage(
                f"torch.distributed's default group runs on pydist's backend "
                f"'{communicator.backend}' already, so backend='{backend}' can't be had: set "
                f"PYDIST_BACKEND={backend} before init_process_group, or let pydist.init() create "
                "the group."
            )
        require_timeout(
            communicator,
            timeout,
            "torch.distributed's default group runs on pydist's backend",
            "give init_process_group this timeout=, or let pydist.init() create the group.",
        )
    placement = None
    with suppress(InvalidUsage):
        placement = read_placement()
    return _describe(owns_group=False, placement=placement)


def _describe(*, owns_group: bool, placement: Placement | None) -> Membership:
    group, agreement = dist.group.WORLD, current.job.agreement
    assert group is not None
    communicator = groups.communicator_in(group) or groups.bootstrap(group)
    rank, size = communicator.rank, communicator.size
    if agreement is not None:
        same_host = agreement.local_ranks(rank)
        local_rank, local_world_size = same_host.index(rank), len(same_host)
    else:
        local_rank, local_world_size = rank, size
    # A launcher that says so knows better: two of its "hosts" may be one machine.
    if placement is not None and (placement.rank, placement.world_size) == (rank, size):
        if placement.local_rank is not None:
            local_rank = placement.local_rank
        if placement.local_world_size is not None:
            local_world_size = placement.local_world_size
    return Membership(
        communicator=communicator,
        group=group,
        owns_group=owns_group,
        rank=rank,
        world_size=size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        device=_device(agreement, rank, local_rank),
        backend=communicator.backend,
    )


def _device(agreement: Agreement | None, rank: int, local_rank: int) -> torch.device:
    if agreement is not None:
        gpu = agreement.gpus[rank]
    else:
        count = torch.cuda.device_count() if torch.backends.cuda.is_built() else 0
        gpu = gpu_of_local_rank(local_rank, count)
    return torch.device("cpu") if gpu is None else torch.device("cuda", gpu)


def is_initialized() -> bool:
    """Whether this process has joined a job.

    False again after `shutdown`, after the script has destroyed the default process group that
    pydist stood on, and in a forked child.

    Example:
        >>> import pydist
        >>> pydist.init()
        >>> pydist.is_initialized()
        True
    """
    job = current.job
    return (
        job.membership is not None
        and job.pid == os.getpid()
        and dist.is_initialized()
        and dist.group.WORLD is job.membership.group
    )


def shutdown() -> None:
    """Leaves the job: no thread, socket or shared segment stays behind.

    What the program keeps of the job, a wrapped model say, keeps what it needs: memory that ranks
    share, with its descriptors, and the connection to the job's store.

    Runs at exit by itself. Destroys torch.distributed's default group if pydist made it; one that
    the script made stays. Operations under way fail with Aborted; ranks that still wait for this
    one fail with PeerLost. May be called twice, and before `init`; in a forked child it ends
    nothing. Raises InvalidUsage while a CUDA graph is captured that holds operations of pydist's.

    Example:
        >>> import pydist
        >>> pydist.init()
        >>> pydist.shutdown()
        >>> pydist.is_initialized()
        False
    """
    with lock:
        is_own, member = current.job.pid == os.getpid(), current.job.membership
        current.job.check_close()
        atexit.unregister(_leave_at_exit)
        last_words.forget()
        kept = _agreement_of_script()
        current.replace()
        current.job.agreement = kept
        if not is_own:
            return  # the parent's job is the parent's to leave
        if member is None:
            if not dist.is_initialized():
                _native.release_process()  # what groups that could not be made have left
            return
        tuning_file.save(member.local_rank)
        if member.owns_group:
            if dist.is_initialized() and dist.group.WORLD is member.group:
                dist.destroy_process_group()
            member.communicator.shutdown()
        del member
        in_force.forget()
        _native.release_process()
        _native.set_rank(-1)
        log.stop()


def _leave_at_exit() -> None:
    current.note_program_end()
    shutdown()


def _agreement_of_script() -> Agreement | None:
    """What the ranks have agreed on whose default group, on backend "pydist", the script has made.

    They did so when torch made the group, and don't again when pydist adopts it.
    """
    job = current.job
    if job.pid != os.getpid() or not dist.is_initialized():
        return None
    group, member = dist.group.WORLD, job.membership
    assert group is not None
    is_pydists = member is not None and member.owns_group and member.group is group
    return None if is_pydists or groups.communicator_in(group) is None else job.agreement


def abort(reason: str) -> None:
    """Ends the job: every rank's calls fail with Aborted, those under way included.

    For a rank that knows that the training makes no sense any more. Any thread may call it, and
    this rank alone does. It returns at once; what this process calls afterwards fails too. An
    exception that leaves the program does the same by itself, with the exception as the reason.

    All groups of this process on pydist's backends end, also those that a script has made by
    `torch.distributed` alone, on backend "pydist".

    Args:
        reason: What the others are told, in the text of their errors and as `Aborted.cause`.

    Raises:
        InvalidUsage: the process has no such group.

    Example:
        >>> import pydist
        >>> pydist.init()
        >>> pydist.abort("the loss is not finite")
        >>> try:
        ...     pydist.barrier()
        ... except pydist.Aborted as error:
        ...     print(error.ranks, error.cause)
        (0,) the loss is not finite
        >>> pydist.shutdown()
    """
    if not groups.has_any():
        raise InvalidUsage(
            "pydist.abort() has nothing to end: this process has joined no job (by pydist.init() "
            "or a pydist.DataParallel), and has no group of torch.distributed on backend 'pydist'. "
            "A group on another backend is torch's to abort."
        )
    # Whatever `reason` is: who gives up must not fail by it, and often has an exception at hand.
    last_words.abort_all(f"{last_words.describe()} has aborted the job: {reason}", str(reason))


def _joined() -> Membership:
    member = current.job.membership
    if member is None:
        raise current.not_joined_error()
    return member


def rank() -> int:
    """This process's number in the job, from 0 to `world_size() - 1`.

    Raises:
        InvalidUsage: the process has not joined a job.
    """
    return _joined().rank


def world_size() -> int:
    """The number of processes in the job.

    Raises:
        InvalidUsage: the process has not joined a job.
    """
    return _joined().world_size


def local_rank() -> int:
    """This process's number among those of its host, from 0 to `local_world_size() - 1`.

    Raises:
        InvalidUsage: the process has not joined a job.
    """
    return _joined().local_rank


def local_world_size() -> int:
    """The number of the job's processes on this host.

    Raises:
        InvalidUsage: the process has not joined a job.
    """
    return _joined().local_world_size


def device() -> torch.device:
    """The device that this rank computes on: its GPU, or the CPU if it sees no GPU.

    The i-th rank of a host takes the i-th GPU that it sees (CUDA_VISIBLE_DEVICES, `pydist run
    --gpus`), counted from the first again where ranks outnumber GPUs; a process that has called
    `torch.cuda.set_device` for another GPU than the first before it joined keeps its own. `init`
    makes that GPU the current one, so plain `"cuda"` means it, but does not start CUDA for it.

    Returns:
        `torch.device("cuda", i)` or `torch.device("cpu")`.

    Raises:
        InvalidUsage: the process has not joined a job.

    Example:
        >>> import pydist, torch
        >>> pydist.init()
        >>> model = torch.nn.Linear(3, 3).to(pydist.device())
    """
    return _joined().device


def backend() -> str:
    """The backend that carries the collectives: "native", "gloo" or "nccl".

    On "nccl" tensors on the CPU travel through native or gloo.

    Raises:
        InvalidUsage: the process has not joined a job.

    Example:
        >>> import pydist
        >>> pydist.init("gloo")
        >>> pydist.backend()
        'gloo'
        >>> pydist.shutdown()
    """
    return _joined().backend
