"""Where gloo listens on each rank, so that the ranks of other hosts reach it.

Left to itself gloo listens on the address that the host's own name resolves to. On Debian and
Ubuntu that is 127.0.1.1 as installed, where no other host can connect. So:

1. GLOO_SOCKET_IFNAME names the interfaces, one or several with commas between them, as for torch.
2. Without it, ranks of one host meet on the loopback device.
3. Between hosts each rank takes its own address on the way to the job's meeting place
   (MASTER_ADDR), so the interface that the job's traffic uses already. On the host of the meeting
   place that way leads over the loopback device; its ranks take their address on the way to a rank
   of another host.
4. Where even that leads nowhere (a tunnel that ends on the loopback device) gloo chooses.

The ranks tell each other what they have found when they meet
(`pydist.job.meeting.backend_agreement`): all take addresses of one family, which gloo demands.
"""

import ipaddress
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from pydist._torch import gloo_options
from pydist.errors import Error, InvalidUsage, Mismatch
from pydist.job.rank_names import who_said_what

__all__ = ["GlooNetwork", "describe_network", "join_network", "own_addresses_towards"]

_VARIABLE = "GLOO_SOCKET_IFNAME"

# In the order in which they are preferred.
_FAMILIES = (socket.AF_INET, socket.AF_INET6)

# Any will do: nothing is sent there.
_PORT = 9


@dataclass(frozen=True)
class GlooNetwork:
    """Where gloo listens on this rank."""

    # The interfaces that the environment names; none as a rule.
    interfaces: tuple[str, ...] = ()
    # Otherwise an address of this host; None leaves the choice to gloo.
    address: str | None = None
    # Why the ranks can't connect by gloo; the same on all of them.
    problem: Error | None = None

    def require_usable(self) -> None:
        """Raises the same on all ranks where gloo can't connect them.

        Raises:
            InvalidUsage: GLOO_SOCKET_IFNAME names an interface that some rank's host does not have.
            Mismatch: GLOO_SOCKET_IFNAME names different numbers of interfaces on the ranks.
        """
        if self.problem is not None:
            raise self.problem

    def options(self, timeout: timedelta) -> Any:
        """Options for torch's gloo.

        Args:
            timeout: how long an operation may take.
        """
        # Any: torch's stubs leave out what makes its devices.
        gloo: Any = dist.ProcessGroupGloo
        if self.interfaces:
            devices = [gloo.create_device(interface=name) for name in self.interfaces]
        elif self.address is not None:
            devices = [gloo.create_device(hostname=self.address)]
        else:
            devices = [gloo.create_default_device()]
        return gloo_options(devices, timeout)


def _interfaces() -> tuple[str, ...]:
    """The interfaces that the environment names."""
    names = os.environ.get(_VARIABLE, "").split(",")
    return tuple(name.strip() for name in names if name.strip())


def _missing_interface(names: Sequence[str]) -> str:
    """A sentence about the first that this host does not have."""
    existing = [name for _, name in socket.if_nameindex()]
    for name in names:
        if name not in existing:
            return (
                f"{_VARIABLE}='{os.environ[_VARIABLE]}' names the interface '{name}', which host "
                f"{socket.gethostname()} does not have; it has {', '.join(existing)}."
            )
    return ""


def own_addresses_towards(host: str) -> list[str]:
    """This host's address from which it would speak to another, for each family.

    Empty where there is no way.
    """
    own = [""] * len(_FAMILIES)
    with suppress(OSError):
        for family, *_, place in socket.getaddrinfo(host, _PORT, type=socket.SOCK_DGRAM):
            with suppress(OSError, ValueError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                index = _FAMILIES.index(family)
                probe.connect(place)
                address = str(probe.getsockname()[0])
                # A link-local address means something only together with an interface.
                if not own[index] and not ipaddress.ip_address(address).is_link_local:
                    own[index] = address
    return own


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _meeting_place(store: dist.Store) -> str:
    """The host of the job's store, as this rank knows it; empty where no host serves it."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):
        return str(store.host)
    return os.environ.get("MASTER_ADDR", "")


def describe_network(store: dist.Store, size: int) -> dict[str, Any]:
    """What a rank tells the others of its network, as JSON takes it. Talks to no rank.

    Args:
        store: the one that the ranks meet in.
        size: the number of ranks.

    Returns:
        `interfaces`, the number of those named by GLOO_SOCKET_IFNAME; `problem`, a sentence where
        this host does not have them; `addresses`, this host's own towards the meeting place, by
        family, IPv4 first, empty where there is none.
    """
    place = _meeting_place(store) if size > 1 else ""
    names = _interfaces()
    return {
        "interfaces": len(names),
        "problem": _missing_interface(names),
        "addresses": own_addresses_towards(place) if place else [""] * len(_FAMILIES),
    }


def join_network(
    rank: int, hosts: Sequence[str], networks: Sequence[dict[str, Any]]
) -> GlooNetwork:
    """Where gloo of this rank listens, from what `describe_network` told on all ranks.

    Args:
        rank: this rank's number.
        hosts: an identity of each rank's host, in rank order.
        networks: what each rank told, in rank order.
    """
    problems = [f"rank {r}: {n['problem']}" for r, n in enumerate(networks) if n["problem"]]
    if problems:
        return GlooNetwork(problem=InvalidUsage(" ".join(problems)))
    counts = [network["interfaces"] for network in networks]
    # A rank without names has one device, too.
    if len({max(count, 1) for count in counts}) > 1:
        said = who_said_what(str(count) if count else "none" for count in counts)
        return GlooNetwork(
            problem=Mismatch(
                f"{_VARIABLE} names different numbers of interfaces: {said}. gloo needs as many "
                "on all ranks: set it alike everywhere."
            )
        )
    if counts[rank]:
        return GlooNetwork(interfaces=_interfaces())
    if len(set(hosts)) == 1:
        return GlooNetwork(address="127.0.0.1")
    for index in range(len(_FAMILIES)):
        addresses = [network["addresses"][index] for network in networks]
        if not all(addresses) or all(map(_is_loopback, addresses)):
            continue
        if not _is_loopback(addresses[rank]):
            return GlooNetwork(address=addresses[rank])
        for other, address in enumerate(addresses):
            if hosts[other] == hosts[rank] or _is_loopback(address):
                continue
            own = own_addresses_towards(address)[index]
            if own and not _is_loopback(own):
                return GlooNetwork(address=own)
        break
    return GlooNetwork()
