"""From what users pass as `group=` to the communicator that carries it."""

import atexit
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist

from pydist import _native
from pydist.errors import InvalidUsage
from pydist.job import backends, crossed_threads

__all__ = ["Group", "communicator_of", "new_group"]

# A process group of torch.distributed (on any backend), or one of `pydist.new_group`.
Group = dist.ProcessGroup | _native.Communicator


def _not_joined_error() -> InvalidUsage:
    return InvalidUsage("this process has not joined a job yet: call pydist.init() first.")


class _NotJoined:
    """Stands where the default communicator will be."""

    def __getattr__(self, name: str) -> object:
        raise _not_joined_error()


_not_joined = _NotJoined()

# The communicator of the world. A module variable and not a function: the collectives read it on
# every call.
default: _native.Communicator = _not_joined  # type: ignore[assignment]

# Communicators that pydist made for groups of other backends, and those split from others.
_bootstrapped: "WeakKeyDictionary[dist.ProcessGroup, _native.Communicator]" = WeakKeyDictionary()
_split: "WeakSet[_native.Communicator]" = WeakSet()
# Those split for the layers of models: one for each group, whatever the number of layers.
_of_layers: "WeakKeyDictionary[Group, _native.Communicator]" = WeakKeyDictionary()
# Held while a group of another backend is met: threads that need it at the same time meet it once.
_meeting: "WeakKeyDictionary[dist.ProcessGroup, threading.Lock]" = WeakKeyDictionary()
# Guards the tables.
_lock = threading.Lock()
# Called before the communicators close: each finishes what runs in threads on them.
before_closing: list[Callable[[], None]] = []
# The process that made them: a forked child has them in memory, but they are not its to close.
_owner = os.getpid()


def set_default(communicator: _native.Communicator) -> None:
    """Makes `communicator` the one of the world."""
    global default
    default = communicator


def _own() -> None:
    global _owner
    _owner = os.getpid()
    atexit.register(close_all)


def close_all() -> None:
    """Lets go of every communicator made here; those of torch's own groups stay with torch."""
    global default
    if os.getpid() == _owner:
        for finish in list(before_closing):
            finish()
    default = _not_joined  # type: ignore[assignment]
    if os.getpid() == _owner:
        for communicator in [*_split, *_bootstrapped.values()]:
            communicator.shutdown()
    _split.clear()
    _bootstrapped.clear()
    _of_layers.clear()
    atexit.unregister(close_all)


def _backends(group: dist.ProcessGroup) -> Iterator[object]:
    for device in sorted(group._device_types, key=lambda device: device.type != "cpu"):
        backend = group._get_backend(torch.device(device))
        # TORCH_DISTRIBUTED_DEBUG=DETAIL puts a checking wrapper around every backend.
        yield getattr(backend, "wrapped_pg", backend)


def communicator_in(group: dist.ProcessGroup) -> _native.Communicator | None:
    """The communicator of a group on backend "pydist"; None for one on other backends."""
    for backend in _backends(group):
        if isinstance(backend, _native.ProcessGroup):
            return backend.communicator
    return None


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """The key-value store that the ranks of a group share.

    Raises:
        InvalidUsage: the group has none.
    """
    # torch has no public way to ask.
    _, store = dist.distributed_c10d._world.pg_map.get(group, (None, None))
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

    Every rank of the group calls it. The communicator lives until `close_all`.
    """
    with _lock:
        meeting = _meeting.setdefault(group, threading.Lock())
    with meeting:
        known = _bootstrapped.get(group)
        if known is None:
            known = _meet(group, backend, timeout, is_world)
            with _lock:
                _bootstrapped[group] = known
            _own()
    return known


def _meet(
    group: dist.ProcessGroup, backend: str | None, timeout: float | None, is_world: bool
) -> _native.Communicator:
    store = store_of(group)
    wait = backends.default_timeout()
    if timeout is not None:
        wait = timedelta(seconds=timeout)
    return backends.create_communicator(
        dist.PrefixStore("pydist", store),
        group.rank(),
        group.size(),
        name=f"group {group.group_name}",
        timeout=wait,
        members=dist.get_process_group_ranks(group),
        backend=backend,
        is_world=is_world,
    )


def communicator_of(group: Group | None = None) -> _native.Communicator:
    """The communicator that carries `group`.

    Args:
        group: a process group of torch.distributed, on any backend; one of `new_group`; or None
            for the world. For a group on another backend than "pydist" the first call meets the
            group's other ranks: all of them must call.

    Raises:
        InvalidUsage: the process has not joined a job, is no member of the group (`group` is
            `torch.distributed.GroupMember.NON_GROUP_MEMBER`), or `group` is something else.
    """
    if group is None:
        if isinstance(default, _NotJoined):
            raise _not_joined_error()
        return default
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
        f"group= is a {type(group).__name__}; it must be a process group of torch.distributed, or "
        "one of pydist.new_group."
    )


def split(parent: _native.Communicator, ranks: Sequence[int]) -> _native.Communicator:
    """A communicator of some ranks of `parent`, closed by `close_all` at the latest.

    All of these ranks call it, in the same order where they make several.

    Raises:
        Mismatch: threads that make groups at the same time have met crosswise; on all ranks.
    """
    crossed_threads.note_maker(parent)
    communicator = parent.split(list(ranks))
    with _lock:
        _split.add(communicator)
    _own()
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
    key = default if group is None else group
    # Only a group that passed the checks below is a key; other objects may not even be hashable.
    if isinstance(key, Group) and key in _of_layers:
        return _of_layers[key]
    parent = communicator_of(group)
    communicator = split(parent, range(parent.size))
    _of_layers[key] = communicator
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
