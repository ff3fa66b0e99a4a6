"""What a link between two hosts does: small round trips, and streams one way and both ways.

Measured by the engine's own messages (`pydist.send` and `pydist.recv`) between the leaders of the
two hosts, so over as many connections as PYDIST_SOCKETS says, with what Python and the engine cost.
A stream's time ends when the receiver's word that it has everything is back. Its size grows until
it takes long enough to tell; the median of some rounds counts.

The first rank leads: it says what comes next (Note [Orders]), and holds the clock.

Note [Orders]: an order is a message of two numbers, what to do and the bytes of each stream. Both
ranks do it; the follower then waits for the next one, and the last one is to stop.
"""

import statistics
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from pydist.collectives import recv, send

__all__ = ["Link", "measure_link"]

_LEAST_ROUNDS, _MOST_ROUNDS = 20, 1000
_ROUND_TRIPS_S = 0.1

_FIRST_BYTES, _MOST_BYTES = 64 << 10, 32 << 20
# A stream is long enough from here on, and where it takes as many round trips.
_ENOUGH_S = 0.02
_ENOUGH_TRIPS = 10
# Of a far link it is not waited for so many round trips.
_LONG_S = 0.5
_STREAMS = 5

_STOP, _TRIP, _OUT, _BACK, _BOTH = range(5)


@dataclass(frozen=True)
class Link:
    """What was measured between two hosts.

    Attributes:
        hosts: Their numbers.
        latency_s: Half a round trip of messages of 16 and 8 bytes: the median.
        out_bytes_per_s: Of a stream from the first to the second.
        back_bytes_per_s: Of a stream from the second to the first.
        both_bytes_per_s: In each direction, of two streams at the same time.
    """

    hosts: tuple[int, int]
    latency_s: float
    out_bytes_per_s: float
    back_bytes_per_s: float
    both_bytes_per_s: float


class _Talk:
    """The messages of one end."""

    def __init__(self, peer: int) -> None:
        self._peer = peer
        self._word = torch.zeros(1, dtype=torch.int64)
        self._order = torch.zeros(2, dtype=torch.int64)
        self._orders: dict[tuple[int, int], Tensor] = {}
        self._sent = self._received = torch.empty(0, dtype=torch.uint8)

    def order(self, what: int, size_bytes: int = 0) -> None:
        given = self._orders.get((what, size_bytes))
        if given is None:
            given = self._orders[what, size_bytes] = torch.tensor([what, size_bytes])
        send(given, self._peer)

    def next_order(self) -> tuple[int, int]:
        recv(self._order, self._peer)
        what, size_bytes = self._order.tolist()
        return what, size_bytes

    def tell(self) -> None:
        send(self._word, self._peer)

    def hear(self) -> None:
        recv(self._word, self._peer)

    def send_stream(self, size_bytes: int) -> None:
        send(self._outgoing(size_bytes), self._peer)

    def receive_stream(self, size_bytes: int) -> None:
        recv(self._incoming(size_bytes), self._peer)

    def exchange_streams(self, size_bytes: int) -> None:
        sending = send(self._outgoing(size_bytes), self._peer, async_op=True)
        self.receive_stream(size_bytes)
        sending.wait()

    def _outgoing(self, size_bytes: int) -> Tensor:
        if self._sent.numel() < size_bytes:
            self._sent = torch.ones(size_bytes, dtype=torch.uint8)
        return self._sent[:size_bytes]

    def _incoming(self, size_bytes: int) -> Tensor:
        # Written once, so that no stream pays for the first touch of its pages.
        if self._received.numel() < size_bytes:
            self._received = torch.ones(size_bytes, dtype=torch.uint8)
        return self._received[:size_bytes]


def measure_link(hosts: tuple[int, int], peer: int, *, leads: bool) -> Link | None:
    """Measures one link. The leaders of both hosts call it, at about the same time.

    Takes about half a second, and more on slow or far links: about a hundred round trips, and four
    times as long as 64 KiB take.

    Args:
        hosts: The numbers of the two hosts; the rank that leads is on the first.
        peer: The rank at the other end.
        leads: Whether this is the rank that leads.

    Returns:
        What the leader has measured; None on the other rank.

    Raises:
        PeerLost: The other rank has died, or can't be reached.
        Timeout: A message took longer than the time-out of `pydist.init`.
    """
    talk = _Talk(peer)
    if not leads:
        _follow(talk)
        return None
    trip_s = _round_trip(talk)
    rates = [_rate(talk, what, trip_s) for what in (_OUT, _BACK, _BOTH)]
    talk.order(_STOP)
    return Link(hosts, trip_s / 2, *rates)


def _follow(talk: _Talk) -> None:
    while True:
        what, size_bytes = talk.next_order()
        if what == _STOP:
            return
        if what == _TRIP:
            talk.tell()
        elif what == _OUT:
            talk.receive_stream(size_bytes)
            talk.tell()
        elif what == _BACK:
            talk.send_stream(size_bytes)
        else:
            talk.exchange_streams(size_bytes)
            talk.tell()


def _timed(talk: _Talk, what: int, size_bytes: int = 0) -> float:
    """Seconds from the order until all has come that it brings about."""
    began_s = time.perf_counter()
    talk.order(what, size_bytes)
    if what == _OUT:
        talk.send_stream(size_bytes)
    elif what == _BACK:
        talk.receive_stream(size_bytes)
        return time.perf_counter() - began_s
    elif what == _BOTH:
        talk.exchange_streams(size_bytes)
    talk.hear()
    return time.perf_counter() - began_s


def _round_trip(talk: _Talk) -> float:
    for _ in range(_LEAST_ROUNDS // 2):
        _timed(talk, _TRIP)
    times: list[float] = []
    end_s = time.perf_counter() + _ROUND_TRIPS_S
    while len(times) < _LEAST_ROUNDS or (len(times) < _MOST_ROUNDS and time.perf_counter() < end_s):
        times.append(_timed(talk, _TRIP))
    return statistics.median(times)


def _rate(talk: _Talk, what: int, trip_s: float) -> float:
    """Bytes per second, in each direction that the order uses."""
    enough_s = max(_ENOUGH_S, min(_LONG_S, _ENOUGH_TRIPS * trip_s))
    size_bytes = _FIRST_BYTES
    while (took_s := _timed(talk, what, size_bytes)) < enough_s and size_bytes < _MOST_BYTES:
        size_bytes *= 2
    # One that took long need not be repeated as often.
    rounds = _STREAMS if took_s < _LONG_S else 1
    return size_bytes / statistics.median(_timed(talk, what, size_bytes) for _ in range(rounds))
