"""Joins two hosts by relays: wires that delay and lose packets."""

from __future__ import annotations

import selectors
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from iproute import HostsUnavailableError, ip
from namespace_names import path_of
from time_limit import PATIENCE

RELAY = Path(__file__).with_name("relay.py")

# A new Python takes 50 ms on a machine that has nothing else to do.
_ANSWER_S = 20.0
# Packets that may wait for the relay; what comes then is lost.
_QUEUE_LENGTH = 1000


class Wires:
    """A relay for each link between two hosts; see relay.py."""

    def __init__(
        self,
        namespaces: Sequence[str],
        links: int,
        mtu: int,
        *,
        delay_ms: float,
        loss: float,
        seed: int,
    ) -> None:
        self._mtu = mtu
        self._isolated: list[set[int]] = [set() for _ in range(links)]
        self._relays: list[subprocess.Popen[bytes]] = []
        files = [str(path_of(name)) for name in namespaces]
        try:
            for link in range(links):
                options = {"interface": f"eth{link}", "delay-ms": delay_ms, "loss": loss}
                argv = [f"--{name}={value}" for name, value in options.items()]
                self._relays.append(
                    subprocess.Popen(
                        [sys.executable, "-I", RELAY, *files, *argv, f"--seed={seed + link}"],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                        # Ctrl-C ends it by the end of its input, once the hosts are gone.
                        start_new_session=True,
                    )
                )
            for link in range(links):
                self._await_answer(link)
        except BaseException:
            self.close()
            raise

    def attach(self, host: int, link: int, namespace: str, interface: str) -> None:
        """Prepares the interface, which the relay has made."""
        ip(
            # Without messages of its own, which would be lost, or not, in the place of others.
            f"link set {interface} mtu {self._mtu} txqueuelen {_QUEUE_LENGTH} addrgenmode none",
            namespace=namespace,
        )

    def wait_until_attached(self, host: int, link: int) -> None:
        """The relay is there always."""

    def isolate(self, host: int, link: int) -> None:
        """Packets from and to the host vanish; its interface doesn't notice."""
        self._isolated[link].add(host)
        self._order(link)

    def rejoin(self, host: int, link: int) -> None:
        """The end of `isolate`. Nothing where there was none."""
        self._isolated[link].discard(host)
        self._order(link)

    def shape(self, host: int, link: int, queue: str | None) -> None:
        """Nothing: what goes to a host has passed the other one's queue."""

    def close(self) -> None:
        """Ends the relays."""
        for relay in self._relays:
            relay.kill()
            # Which closes its pipes.
            with relay:
                pass

    def _order(self, link: int) -> None:
        stdin = self._relays[link].stdin
        assert stdin is not None
        try:
            stdin.write(b"drop\n" if self._isolated[link] else b"pass\n")
            stdin.flush()
        except BrokenPipeError:
            pass
        self._await_answer(link)

    def _await_answer(self, link: int) -> None:
        relay = self._relays[link]
        assert relay.stdout is not None
        assert relay.stderr is not None
        with selectors.DefaultSelector() as selector:
            selector.register(relay.stdout, selectors.EVENT_READ)
            if not selector.select(_ANSWER_S * PATIENCE):
                raise HostsUnavailableError(
                    f"the relay of link {link} has not answered in {_ANSWER_S * PATIENCE:g} s"
                )
        if not relay.stdout.readline():
            said = relay.stderr.read().decode(errors="replace")
            raise HostsUnavailableError(f"the relay of link {link} has ended:\n{said.strip()}")
