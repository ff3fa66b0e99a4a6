"""The network interfaces of this host, and which of them other hosts are told to connect to."""

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from pydist import _native
from pydist.errors import InvalidUsage
from pydist.job.backend_choice import Agreement
from pydist.job.meeting.gloo_network import own_addresses_towards
from pydist.job.meeting.host_address import reachable_address

__all__ = ["Interface", "Told", "interfaces_with", "list_interfaces", "told_alone", "told_in_job"]


@dataclass(frozen=True)
class Interface:
    """One that could be used: all but the loopback.

    Attributes:
        name: As PYDIST_INTERFACE takes it.
        state: "up", "no link" (it is switched on, and nothing is at the other end) or "down".
        mbit_per_s: What its driver says; None where it says nothing. Virtual ones make it up.
        mtu_bytes: Of the largest packet; None where that is unknown.
        addresses: IPv4 first, without link-local ones of IPv6.
    """

    name: str
    state: str
    mbit_per_s: int | None
    mtu_bytes: int | None
    addresses: tuple[str, ...]


@dataclass(frozen=True)
class Told:
    """The addresses that other hosts are told to connect to.

    Attributes:
        addresses: Which; none where that is not known outside of a job.
        reason: Why these, for people.
    """

    addresses: tuple[str, ...]
    reason: str


def list_interfaces() -> list[Interface]:
    """Those of this process's network namespace, in the order of the system."""
    return [
        Interface(
            each.name,
            _state(each),
            each.mbit_per_s,
            each.mtu_bytes,
            tuple(each.addresses),
        )
        for each in _native.network_interfaces()
        if not each.is_loopback
    ]


def _state(interface: _native.NetworkInterface) -> str:
    if not interface.is_up:
        return "down"
    return "up" if interface.is_running else "no link"


def interfaces_with(addresses: Iterable[str], interfaces: Iterable[Interface]) -> list[str]:
    """The names of the interfaces that have one of the addresses."""
    wanted = set(addresses)
    return [each.name for each in interfaces if wanted.intersection(each.addresses)]


def told_alone() -> Told:
    """What a process outside of any job can tell.

    Raises:
        InvalidUsage: PYDIST_INTERFACE names an interface that is not there.
    """
    if os.environ.get("PYDIST_INTERFACE"):
        return Told(tuple(_native.told_addresses(None)), "PYDIST_INTERFACE")
    place = os.environ.get("MASTER_ADDR")
    if not place:
        return Told((), "")
    with suppress(InvalidUsage):
        place = reachable_address(place)
    addresses = [each for each in own_addresses_towards(place) if each]
    if not addresses:
        return Told((), f"there is no way to MASTER_ADDR={place}")
    return Told((addresses[0],), f"the way to MASTER_ADDR={place}")


def told_in_job(agreement: Agreement) -> Told:
    """What a rank of a job tells the others, on the backend that its ranks have agreed on."""
    if len(set(agreement.hosts)) == 1:
        return Told((), "all ranks share memory")
    network = agreement.network
    if agreement.host_backend == "native":
        addresses = tuple(_native.told_addresses(network.address))
        if os.environ.get("PYDIST_INTERFACE"):
            return Told(addresses, "PYDIST_INTERFACE")
    else:
        addresses = (network.address,) if network.address else ()
        if network.interfaces:
            return Told(_addresses_of(network.interfaces), "GLOO_SOCKET_IFNAME")
    if network.address is None:
        return Told(addresses, "no way to the job's store was found")
    return Told(addresses, "the way to the job's store")


def _addresses_of(names: Iterable[str]) -> tuple[str, ...]:
    by_name = {each.name: each.addresses for each in list_interfaces()}
    return tuple(by_name[name][0] for name in names if by_name.get(name))
