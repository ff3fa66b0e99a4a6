"""Whose outputs make a whole batch: those of all ranks, of the ranks of a host, or of a group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal
from weakref import WeakKeyDictionary

from pydist import _native
from pydist.errors import InvalidUsage
from pydist.job import groups, membership
from pydist.job.groups import Group
from pydist.job.outcome import exchange

if TYPE_CHECKING:
    from pydist._native import Communicator

Scope = Group | Literal["world", "host"] | None

# For the communicator of each world, that of this rank's host.
_of_host: WeakKeyDictionary[Communicator, Communicator] = WeakKeyDictionary()


def ranks_of(group: Scope) -> Communicator:
    """The communicator of the ranks that share a batch. Joins the job by itself.

    Args:
        group: "world" or None: all ranks; "host": those of this rank's host, for which all ranks of
            the world make the first call; or a group.

    Raises:
        InvalidUsage: it is none of these, or this rank is not in it.
    """
    if group is None or isinstance(group, str):
        membership.init()
    if group is None or group == "world":
        return groups.communicator_of()
    if isinstance(group, str):
        if group != "host":
            raise InvalidUsage(
                f'group={group!r} is unknown; it is "world", "host" or a process group.'
            )
        return _ranks_of_host(groups.communicator_of())
    return groups.communicator_of(group)


def _ranks_of_host(world: Communicator) -> Communicator:
    known = _of_host.get(world)
    if known is None:
        hosts = exchange(world, _native.host_identity().encode(), 'group="host"')
        own = [rank for rank, host in enumerate(hosts) if host == hosts[world.rank]]
        known = _of_host[world] = groups.split(world, own)
    return known
