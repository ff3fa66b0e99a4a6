"""Joins the hosts as a switch does: bridges in a namespace of their own, one for each link."""

from __future__ import annotations

from interface_state import wait_until_running
from iproute import ip, tc


class Switch:
    """A bridge for each link, and a port of it for each host.

    Packets go from host to host within the kernel, as fast as one core can.
    """

    def __init__(self, namespace: str, links: int, mtu: int) -> None:
        self._namespace = namespace
        self._mtu = mtu
        ip(
            "link set lo up",
            *(
                line
                for link in range(links)
                for line in (
                    # Without what a real switch waits for: loops, and listeners to multicasts.
                    f"link add name link{link} type bridge stp_state 0 mcast_snooping 0",
                    f"link set link{link} up",
                )
            ),
            namespace=namespace,
        )

    def attach(self, host: int, link: int, namespace: str, interface: str) -> None:
        """Lays a cable: makes the host's interface, which is still down."""
        port = _port(host, link)
        ip(
            f"link add name {port} mtu {self._mtu} type veth "
            f"peer name {interface} mtu {self._mtu} netns {namespace}",
            f"link set {port} master link{link} up",
            namespace=self._namespace,
        )

    def wait_until_attached(self, host: int, link: int) -> None:
        """Waits until packets of a host whose interface is up come through."""
        wait_until_running(self._namespace, _port(host, link))

    def isolate(self, host: int, link: int) -> None:
        """Packets from and to the host vanish; its interface doesn't notice."""
        ip(f"link set {_port(host, link)} nomaster", namespace=self._namespace)

    def rejoin(self, host: int, link: int) -> None:
        """The end of `isolate`. Nothing where there was none."""
        ip(f"link set {_port(host, link)} master link{link}", namespace=self._namespace)

    def shape(self, host: int, link: int, queue: str | None) -> None:
        """Sets the queue of what goes to the host; None for none."""
        set_queue(self._namespace, _port(host, link), queue)

    def close(self) -> None:
        """Nothing to end: the bridges go with their namespace."""


def set_queue(namespace: str, interface: str, queue: str | None) -> None:
    """Sets the queue of what leaves by an interface, in tc's words; None for none."""
    if queue is not None:
        tc(f"qdisc replace dev {interface} root {queue}", namespace=namespace)
        return
    # To delete what isn't there would be an error.
    tc(
        f"qdisc replace dev {interface} root pfifo",
        f"qdisc delete dev {interface} root",
        namespace=namespace,
    )


def _port(host: int, link: int) -> str:
    return f"host{host}link{link}"
