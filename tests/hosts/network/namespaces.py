"""Plays several hosts on one machine, by network namespaces.

    from namespaces import Hosts

    with Hosts(2) as hosts:
        hosts[0].run(["python", "server.py", hosts[0].address])
        hosts.shape(rate="1gbit")          # every link from now on
        hosts[1].cut()                     # its cable is out: its interface is down
        hosts[1].restore()
        hosts[1].cut(silently=True)        # its packets vanish, its interface stays up

    with Hosts(2, delay_ms=10, loss=0.01) as hosts:    # a far and bad network
        ...

A host has a loopback device and `links` interfaces, eth0, eth1 ... All eth0 are in one network, all
eth1 in another, and so on: 10.197.LINK.0/24 and fd00:197:LINK::/64, where host i has the address
that ends in i + 1. No way leads out of these networks.

What the hosts have in common, other than real ones: processors, file system and /dev/shm, process
ids, host name and boot id, cgroups and clock. A program tells them apart by /proc/self/ns/net. And
/sys/class/net shows the interfaces of this machine, not theirs.

All that was made is removed at the end: after an exception, too, and by SIGTERM. What a killed
process has left is removed by whoever makes hosts next.

`run_ranks_on` (ranks_on.py) and `start_job` (jobs.py) start ranks over hosts.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import launch
from fabric import Fabric
from interface_state import wait_until_running
from iproute import HostsUnavailableError, ip, require_tools
from namespace_names import make_names, path_of, remove, sweep
from network_namespace import inside
from switch import Switch, set_queue
from wires import Wires

__all__ = ["Host", "Hosts", "HostsUnavailableError", "Link", "address_of"]

MOST_HOSTS = 64
# Of the namespace of whoever reads it.
_TCP = Path("/proc/sys/net/ipv4")


@dataclass(frozen=True)
class Link:
    """One interface of a host."""

    interface: str
    address: str
    address6: str


class Host:
    """One of `Hosts`. Its address and interface are those of its first link."""

    def __init__(self, index: int, name: str, links: Sequence[Link], fabric: Fabric) -> None:
        self.index = index
        self.name = name
        self.links = tuple(links)
        self._fabric = fabric
        self._started: list[subprocess.Popen[Any]] = []

    @property
    def namespace(self) -> Path:
        """The file that stands for its network namespace."""
        return path_of(self.name)

    @property
    def address(self) -> str:
        return self.links[0].address

    @property
    def address6(self) -> str:
        return self.links[0].address6

    @property
    def interface(self) -> str:
        return self.links[0].interface

    def command(self, argv: Sequence[str]) -> list[str]:
        """What runs a command on this host; it becomes the command, under the same process id."""
        # `ip netns exec` would hide /sys/fs/cgroup, where a process finds how much memory it has.
        return ["nsenter", f"--net={self.namespace}", "--", *argv]

    def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str | None] | None = None,
        timeout: float = launch.DEFAULT_TIMEOUT_S,
        cwd: str | Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command here, as `launch.run_command` does."""
        return launch.run_command(self.command(argv), timeout=timeout, env=env, cwd=cwd)

    def popen(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str | None] | None = None,
        **options: Any,
    ) -> subprocess.Popen[Any]:
        """Starts a command here, in a session of its own.

        The end of the hosts kills it, and what it has started.

        Args:
            argv: the command.
            env: set in `launch.clean_environment`; None removes a variable.
            options: those of subprocess.Popen.
        """
        options.setdefault("stdin", subprocess.DEVNULL)
        options.setdefault("start_new_session", True)
        command = self.command(argv)
        process = subprocess.Popen(command, env=launch.clean_environment(env), **options)
        self._started.append(process)
        return process

    def _end_started(self) -> None:
        # One that has just been started may not be in the namespace yet.
        for process in self._started:
            if process.poll() is None:
                process.kill()

    def free_port(self) -> int:
        """A port on which nobody listens here."""
        with inside(self.namespace):
            return launch.free_port()

    def cut(self, link: int | None = None, *, silently: bool = False) -> None:
        """Takes the host from the network.

        Args:
            link: the number of the link to cut; None for all.
            silently: False takes the interface down: what is sent here fails at once, and the other
                hosts hear nothing more. True lets packets vanish on their way, both ways, while
                each interface stays up: all hosts see silence alone.
        """
        for number in self._numbers(link):
            if silently:
                self._fabric.isolate(self.index, number)
            else:
                ip(f"link set {self.links[number].interface} down", namespace=self.name)

    def restore(self, link: int | None = None) -> None:
        """Ends either kind of `cut`, of one link or all."""
        for number in self._numbers(link):
            self._fabric.rejoin(self.index, number)
            self._bring_up(number)

    def _bring_up(self, number: int) -> None:
        link = self.links[number]
        ip(
            f"link set {link.interface} up",
            # An interface that goes down loses its addresses of IPv6.
            f"address replace {link.address}/24 dev {link.interface}",
            f"address replace {link.address6}/64 dev {link.interface} nodad",
            namespace=self.name,
        )
        wait_until_running(self.name, link.interface)
        self._fabric.wait_until_attached(self.index, number)

    def _numbers(self, link: int | None) -> list[int]:
        return list(range(len(self.links))) if link is None else [link]


class Hosts(Sequence[Host]):
    """Some hosts, until the end of a `with`; see the module's docstring.

    Args:
        count: the number of hosts, 1 to 64.
        links: the number of interfaces of each host that lead to the others.
        mtu: the bytes of the largest packet.
        delay_ms: how long each packet takes from host to host, between two hosts. More than 0, here
            or at `loss`, puts a program of Python between them (relay.py), which tops the rate at
            about 1 Gbit/s with packets of 1500 bytes.
        loss: the share of packets that are lost, 0 to 1.
        seed: which ones.
        congestion: the congestion control of the hosts' TCP; the system's where it is None.

    Raises:
        HostsUnavailableError: this machine can't; the message says what it needs.
        ValueError: too many hosts, or too few; or the system has no such congestion control.
    """

    def __init__(
        self,
        count: int,
        *,
        links: int = 1,
        mtu: int = 1500,
        delay_ms: float = 0.0,
        loss: float = 0.0,
        seed: int = 0,
        congestion: str | None = None,
    ) -> None:
        if not 1 <= count <= MOST_HOSTS or links < 1:
            raise ValueError(
                f"Hosts takes 1 to {MOST_HOSTS} hosts with 1 or more links, not {count} hosts with "
                f"{links} links"
            )
        if (delay_ms or loss) and count != 2:
            raise ValueError(f"delay_ms and loss are for 2 hosts, not {count}")
        if delay_ms < 0 or not 0 <= loss <= 1:
            raise ValueError(
                f"delay_ms={delay_ms} must not be negative, and loss={loss} is a share, 0 to 1"
            )
        known = (_TCP / "tcp_available_congestion_control").read_text().split()
        if congestion is not None and congestion not in known:
            raise ValueError(f"congestion={congestion!r}: this system has {', '.join(known)}")
        self._count, self._links, self._mtu = count, links, mtu
        self._delay_ms, self._loss, self._seed = delay_ms, loss, seed
        self._congestion = congestion
        self._names: list[str] = []
        self._hosts: list[Host] = []
        self._fabric: Fabric | None = None
        self._earlier_handler: Any = None

    def __enter__(self) -> Hosts:
        require_tools()
        sweep()
        *names, of_switch = make_names(*map(str, range(self._count)), "switch")
        self._names = [*names, of_switch]
        self._listen_to_sigterm()
        try:
            ip(*(f"netns add {name}" for name in self._names))
            self._fabric = self._make_fabric(names, of_switch)
            for index, name in enumerate(names):
                links = [_link(index, number) for number in range(self._links)]
                host = Host(index, name, links, self._fabric)
                self._hosts.append(host)
                ip("link set lo up", namespace=name)
                for number, link in enumerate(links):
                    self._fabric.attach(index, number, name, link.interface)
                    host._bring_up(number)
                if self._congestion is not None:
                    with inside(host.namespace):
                        (_TCP / "tcp_congestion_control").write_text(self._congestion)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __getitem__(self, index: Any) -> Any:
        return self._hosts[index]

    def __len__(self) -> int:
        return len(self._hosts)

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)

    def shape(self, rate: str | None, *, burst: str = "128kb", queue_ms: float = 50) -> None:
        """Limits every link, both ways, by a token bucket (tbf of tc).

        Args:
            rate: bits per second in tc's words, such as "1gbit" or "300mbit"; None for no limit.
            burst: how much may pass at once, in tc's words; too little of it limits the rate.
            queue_ms: for how long a packet may wait at most; one that would wait longer is lost.

        Raises:
            HostsUnavailableError: this kernel or this machine has no tc.
        """
        queue = None
        if rate is not None:
            queue = f"tbf rate {rate} burst {burst} latency {queue_ms:g}ms"
        for host in self._hosts:
            for number, link in enumerate(host.links):
                set_queue(host.name, link.interface, queue)
                assert self._fabric is not None
                self._fabric.shape(host.index, number, queue)

    def close(self) -> None:
        """Removes everything, and ends the processes of the hosts. Also what is half made."""
        if self._fabric is not None:
            self._fabric.close()
        for host in self._hosts:
            host._end_started()
        for name in self._names:
            remove(name)
        self._names, self._hosts, self._fabric = [], [], None
        if self._earlier_handler is not None:
            signal.signal(signal.SIGTERM, self._earlier_handler)
            self._earlier_handler = None

    def _make_fabric(self, names: Sequence[str], of_switch: str) -> Fabric:
        if not (self._delay_ms or self._loss):
            return Switch(of_switch, self._links, self._mtu)
        return Wires(
            names,
            self._links,
            self._mtu,
            delay_ms=self._delay_ms,
            loss=self._loss,
            seed=self._seed,
        )

    def _listen_to_sigterm(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._earlier_handler = signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(HostsUnavailableError, OSError):
            self.close()
        os.kill(os.getpid(), number)


def address_of(host: int, link: int) -> str:
    """The address of IPv4 that a host has on a link."""
    return f"10.197.{link}.{host + 1}"


def _link(host: int, number: int) -> Link:
    # As programs print it.
    address6 = ipaddress.ip_address(f"fd00:197:{number}::{host + 1}")
    return Link(f"eth{number}", address_of(host, number), str(address6))
