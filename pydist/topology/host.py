"""What this host is, for people and programs."""

import os
import socket
from dataclasses import dataclass

from pydist import _native
from pydist.errors import Error
from pydist.gpu.inventory import installed_gpus
from pydist.topology.interfaces import Interface, list_interfaces
from pydist.topology.processors import NumaNode, numa_nodes

__all__ = ["HostFacts", "describe_host"]


@dataclass(frozen=True)
class HostFacts:
    """One host, as one of its processes sees it.

    Attributes:
        name: Of the host. Several may have the same.
        identity: By which the engine tells hosts apart: two processes with the same may share
            memory.
        nodes: Its NUMA nodes.
        gpus: Names of its GPUs, in the order of the bus; those that are installed, whether or not
            this process sees them.
        interfaces: Its interfaces, but for the loopback.
    """

    name: str
    identity: str
    nodes: tuple[NumaNode, ...]
    gpus: tuple[str, ...]
    interfaces: tuple[Interface, ...]


def describe_host() -> HostFacts:
    """This process's host, as it is now. Talks to no other process."""
    return HostFacts(
        socket.gethostname(),
        _native.host_identity(),
        tuple(numa_nodes(os.sched_getaffinity(0))),
        _gpus(),
        tuple(list_interfaces()),
    )


def _gpus() -> tuple[str, ...]:
    try:
        return tuple(gpu.name for gpu in installed_gpus())
    except Error:  # no driver that could tell
        return ()
