"""From what users pass as `group=` to the communicator that carries it."""

import os
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch.distributed as dist

from pydist import _native
from pydist._torch import (
    backends_of,
    groups_of_process,
    may_be_torchs_own,
    store_of_group,
    timeout_of_group,
)
from pydist.config.variables import default_timeout
from pydist.errors import InvalidUsage
from pydist.job import crossed_threads, current
from pydist.job.arguments import a_type
from pydist.job.backend_choice import create_communicator

# A process group of torch.distributed (on any backend), or one of `pydist.new_group`.
Group = dist.ProcessGroup | _native.Communicator


def _backends(group: dist.ProcessGroup) -> Iterator[object]:
    for backend in backends_of(group):
        # TORCH_DISTRIBUTED_DEBUG=DETAIL puts a checking wrapper around every backend.
        yield getattr(backend, "wrapped_pg", backend)


def communicator_in(group: dist.ProcessGroup) -> _native.Communicator | None:
    """The communicator of a group on backend "pydist"; None for one on other backends."""
    for backend in _backends(group):
        if isinstance(backend, _native.ProcessGroup):
            return backend.communicator
    return None


def has_any() -> bool:
    """Whether this process has any communicator.

    That needs no job: the script may have made groups of torch.distributed on backend "pydist", or
    passed groups on other backends to functions of pydist.
    """
    job = current.job
    return (
        job.has_world
        or bool(job.bootstrapped or job.split)
        or any(communicator_in(group) is not None for group in groups_of_process())
    )


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """The key-value store that the ranks of a group share.

    Raises:
        InvalidUsage: the group has none.
    """
    store = store_of_group(group)
    if store is None:
        raise InvalidUsage(
            f"group {group.group_name!r} has no key-value store (it was destroyed, or its backend "
            "keeps none), so pydist can't meet its other ranks there."
        )
    return store


def bootstrap(
    group: dist.ProcessGroup,
    *,
    backend: str | None = None,
    timeout: float | None = None,
    is_world: bool = False,
) -> _native.Communicator:
    """A communicator for a group on another backend, met through that group's store.

    Every rank of the group calls it. The communicator lives as long as the job.
    """
    job = current.mine()
    with job.lock:
        meeting = job.meeting.setdefault(group, threading.Lock())
    with meeting:
        known = job.bootstrapped.get(group)
        if known is None:
            known = _meet(group, backend, timeout, is_world)
            with job.lock:
                job.bootstrapped[group] = known
    return known


def _meet(
    group: dist.ProcessGroup, backend: str | None, timeout: float | None, is_world: bool
) -> _native.Communicator:
    store = store_of(group)
    wait = timeout_of_group(group)
    if wait is None or (may_be_torchs_own(wait) and os.environ.get("PYDIST_TIMEOUT")):
        wait = default_timeout()
    if timeout is not None:
        wait = timedelta(seconds=timeout)
    return create_communicator(
        dist.PrefixStore("pydist", store),
        group.rank(),
        group.size(),
        name=f"group {group.group_name}",
        timeout=wait,
        members=dist.get_process_group_ranks(group),
        backend=backend,
        is_world=is_world,
    )


def communicator_of(group: Group | None = None, argument: str = "group") -> _native.Communicator:
    """The communicator that carries `group`.

    Args:
        group: a process group of torch.distributed, on any backend; one of `new_group`; or None
            for the world. For a group on another backend than "pydist" the first call meets the
            group's other ranks: all of them must call.
        argument: what the user's call names it, for the error.

    Raises:
        InvalidUsage: the process has not joined a job, is no member of the group (`group` is
            `torch.distributed.GroupMember.NON_GROUP_MEMBER`), or `group` is something else.
    """
    if group is None:
        if not current.job.has_world:
            raise current.not_joined_error()
        return current.job.world
    if isinstance(group, _native.Communicator):
        return group
    if isinstance(group, dist.ProcessGroup):
        return communicator_in(group) or bootstrap(group)
    if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise InvalidUsage(
            "this rank is not a member of the group that it passed: new_group gave it "
            "torch.distributed.GroupMember.NON_GROUP_MEMBER. Only members may call this: put the "
            "call under `if rank in ranks:`, with the ranks that new_group was given."
        )
    raise InvalidUsage(
        f"{argument}= is {a_type(group)}; it must be a process group of "
        "torch.distributed, or one of pydist.new_group."
    )


def split(
    parent: _native.Communicator, ranks: Sequence[int], on_host: bool = False
) -> _native.Communicator:
    """A communicator of some ranks of `parent`, closed with the job at the latest.

    All of these ranks call it, in the same order where they make several.

    Args:
        parent: what it is made from.
        ranks: of `parent`.
        on_host: it is for CPU tensors alone, and takes nothing of a GPU.

    Raises:
        Mismatch: threads that make groups at the same time have met crosswise; on all ranks.
    """
    crossed_threads.note_maker(parent)
    communicator = parent.split(list(ranks), on_host)
    job = current.mine()
    with job.lock:
        job.split.add(communicator)
    if len(ranks) > 1:
        crossed_threads.refuse_crossed(communicator, parent, ranks)
    return communicator


def layer_communicator(group: Group | None = None) -> _native.Communicator:
    """The communicator that the layers of models share, over the ranks of `group`.

    The traffic of layers must not mix with the script's. The first call for a group makes it, so
    every rank of the group must make that call; later ones talk to nobody.

    Args:
        group: as in `communicator_of`.

    Raises:
        InvalidUsage: as in `communicator_of`.
    """
    job = current.job
    key = job.world if group is None else group
    # Only a group that passed the checks below is a key; other objects may not even be hashable.
    if isinstance(key, Group) and key in job.of_layers:
        return job.of_layers[key]
    parent = communicator_of(group)
    communicator = split(parent, range(parent.size))
    job.of_layers[key] = communicator
    return communicator


def new_group(
    ranks: Sequence[int], *, group: Group | None = None, timeout: float | None = None
) -> _native.Communicator | int:
    """Makes a group of some ranks, on the backend of the group that they come from.

    Every rank in `ranks` must call it, with the same list; other ranks may. Groups made one after
    the other must be made in the same order by the ranks that they share. It ends with
    `pydist.shutdown`, or with its own `shutdown()`.

    Args:
        ranks: ranks of `group`, without repetition; their order is the order in the new group.
        group: the group they come from; by default the world.
        timeout: seconds that each operation of the new group may take; by default as in `group`.

    Returns:
        The group, for `group=` and `process_group=`; on ranks that are not in it
        `torch.distributed.GroupMember.NON_GROUP_MEMBER`, as of torch's `new_group`, with which all
        functions raise `InvalidUsage`: put calls on the group under `if rank in ranks:`.

    Raises:
        InvalidUsage: a rank is repeated or out of range, or there is none; this rank is not in
            `group`.

    Example:
        >>> import pydist, torch
        >>> pydist.init()
        >>> ranks = [0]
        >>> first = pydist.new_group(ranks)
        >>> if pydist.rank() in ranks:
        ...     print(pydist.all_reduce(torch.ones(2), group=first))
        tensor([1., 1.])
    """
    parent = communicator_of(group)
    members = [int(rank) for rank in ranks]
    outside = [rank for rank in members if not 0 <= rank < parent.size]
    if outside or len(set(members)) != len(members) or not members:
        raise InvalidUsage(
            f"ranks={members} is not valid; it must name at least one rank, each once, from 0 to "
            f"{parent.size - 1}."
        )
    if parent.rank not in members:
        # Not None, which would stand for the world.
        return dist.GroupMember.NON_GROUP_MEMBER
    communicator = split(parent, members)
    if timeout is not None:
        communicator.timeout = timeout
    return communicator
