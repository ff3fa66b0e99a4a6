"""A wire between two network namespaces, whose delay and losses one can choose.

Each namespace gets a TUN interface, and this program carries packets from one to the other: each
`delay_ms` later, in the order in which they were sent, but for a share that is lost. Which ones are
lost depends on the seed and on how many packets went before them that way, not on time.

`Hosts(2, delay_ms=5, loss=0.01)` starts it as a process (wires.py), which carries on until its
standard input ends. The lines `drop` and `pass` there switch the wire off and on again.

It is fast enough for links of 1 Gbit/s: a stream of TCP in packets of 1500 bytes got 1.4 Gbit/s
without a delay and 1.0 with one of 5 ms, on two cores of a server's processor.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import fcntl
import os
import random
import select
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

# Beside others of the tests, which this program imports as a script.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))
from network_namespace import inside

# From <linux/if_tun.h>.
_TUNSETIFF = 0x400454CA
_IFF_TUN = 0x0001
_IFF_NO_PI = 0x1000

# More than any packet.
_LARGEST = 65536
# Packets that are read before those that are due are looked for again.
_BATCH = 64


def open_tun(namespace: str | Path, interface: str) -> int:
    """Makes a TUN interface; returns the descriptor that is its other end."""
    with inside(namespace):
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        request = struct.pack("16sH22x", interface.encode(), _IFF_TUN | _IFF_NO_PI)
        fcntl.ioctl(descriptor, _TUNSETIFF, request)
    return descriptor


@dataclass
class Way:
    """One direction of the wire."""

    source: int
    target: int
    delay_s: float
    loss: float
    losses: random.Random
    is_off: bool = False
    # When each is due, and itself; the oldest first.
    on_the_way: collections.deque[tuple[float, bytes]] = field(default_factory=collections.deque)

    def take(self) -> None:
        """Takes packets that were sent."""
        due = time.monotonic() + self.delay_s
        for _ in range(_BATCH):
            try:
                packet = os.read(self.source, _LARGEST)
            except OSError:
                # No more for now, or none before the interface is up.
                return
            is_lost = self.loss > 0 and self.losses.random() < self.loss
            if self.is_off or is_lost:
                continue
            if self.delay_s == 0 and not self.on_the_way:
                self._deliver(packet)
            else:
                self.on_the_way.append((due, packet))

    def deliver_due(self) -> float | None:
        """Delivers what is due; returns in how many seconds the next one is, None without any."""
        now = time.monotonic()
        while self.on_the_way:
            due, packet = self.on_the_way[0]
            if due > now:
                return due - now
            self.on_the_way.popleft()
            if not self.is_off:
                self._deliver(packet)
        return None

    def _deliver(self, packet: bytes) -> None:
        # An interface that is down takes none.
        with contextlib.suppress(OSError):
            os.write(self.target, packet)


def carry(ways: Sequence[Way], orders: int) -> None:
    """Carries packets until `orders`, a descriptor, ends."""
    by_source = {way.source: way for way in ways}
    awaited = [*by_source, orders]
    wait_s: float | None = None
    while True:
        ready, _, _ = select.select(awaited, [], [], wait_s)
        for descriptor in ready:
            if descriptor != orders:
                by_source[descriptor].take()
                continue
            said = os.read(orders, 4096)
            if not said:
                return
            for way in ways:
                way.is_off = said.split()[-1] == b"drop"
            print("done", flush=True)
        waits = [wait for way in ways if (wait := way.deliver_due()) is not None]
        wait_s = min(waits, default=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("namespaces", nargs=2, help="files that stand for them")
    parser.add_argument("--interface", default="eth0", help="its name in both")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="one way")
    parser.add_argument("--loss", type=float, default=0.0, help="the share of packets, 0 to 1")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    ends = [open_tun(namespace, args.interface) for namespace in args.namespaces]
    ways = [
        Way(
            ends[i],
            ends[1 - i],
            args.delay_ms / 1000,
            args.loss,
            random.Random(2 * args.seed + i),
        )
        for i in range(2)
    ]
    print("ready", flush=True)
    carry(ways, sys.stdin.fileno())


if __name__ == "__main__":
    main()
