"""What joins the hosts: a `Switch`, as fast as this machine is, or slow and lossy `Wires`."""

from __future__ import annotations

from typing import Protocol


class Fabric(Protocol):
    """Joins the interfaces of the same number of all hosts."""

    def attach(self, host: int, link: int, namespace: str, interface: str) -> None:
        """Lays a cable: from then on the host has the interface, which is still down."""

    def wait_until_attached(self, host: int, link: int) -> None:
        """Waits until packets of a host whose interface is up come through."""

    def isolate(self, host: int, link: int) -> None:
        """Packets from and to the host vanish; its interface doesn't notice."""

    def rejoin(self, host: int, link: int) -> None:
        """The end of `isolate`. Nothing where there was none."""

    def shape(self, host: int, link: int, queue: str | None) -> None:
        """Sets the queue of what goes to the host, in tc's words; None for none."""

    def close(self) -> None:
        """Ends what would outlive the namespaces."""
