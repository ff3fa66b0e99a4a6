"""Lets torch's own gloo connect the ranks of several hosts.

Left to itself it listens on the address that the host's own name resolves to, which often is that
of the loopback (see `pydist.job.meeting.gloo_network`). It reads GLOO_SOCKET_IFNAME whenever it
makes a group.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from pydist.errors import TransportError
from pydist.job import current
from pydist.topology.interfaces import interfaces_with, list_interfaces

__all__ = ["torchs_gloo_connecting"]

_VARIABLE = "GLOO_SOCKET_IFNAME"


@contextmanager
def torchs_gloo_connecting() -> Iterator[None]:
    """Groups that torch makes on gloo within listen where the job's ranks reach each other.

    Unless GLOO_SOCKET_IFNAME says where. Every rank of a job that has been joined enters it.

    Raises:
        TransportError: torch's gloo can't connect the ranks.
    """
    name = _interface()
    if name is not None:
        os.environ[_VARIABLE] = name
    try:
        yield
    except RuntimeError as error:  # torch's, from gloo
        raise TransportError(
            f"torch's gloo, by which the benchmark talks with its ranks, can't connect: {error}"
        ) from error
    finally:
        if name is not None:
            del os.environ[_VARIABLE]


def _interface() -> str | None:
    """The name to set; None where gloo is to choose by itself."""
    agreement = current.job.agreement
    if agreement is None or len(set(agreement.hosts)) == 1 or os.environ.get(_VARIABLE):
        return None
    address = agreement.network.address
    names = interfaces_with([address] if address else [], list_interfaces())
    return names[0] if names else None
