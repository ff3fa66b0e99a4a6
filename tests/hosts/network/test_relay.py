"""The relay: what it delays and loses, and hosts that are joined by it."""

import collections
import contextlib
import os
import random
import socket
import time
from collections.abc import Iterator

import pytest
from hosts_or_skip import hosts_or_skip
from namespaces import Hosts
from network_namespace import inside
from relay import Way
from talk import LIMIT_S, connection

pytestmark = pytest.mark.timeout(60)

DELAY_MS = 20.0
PACKETS = 400
LOSS = 0.2
# From <asm-generic/socket.h>: a socket has no room for so many packets otherwise.
SO_RCVBUFFORCE = 33


@pytest.fixture
def way() -> Iterator[tuple[Way, socket.socket, socket.socket]]:
    """A direction between two sockets that keep packets apart, as TUN interfaces do."""
    with contextlib.ExitStack() as stack:
        pairs = [socket.socketpair(type=socket.SOCK_DGRAM) for _ in range(2)]
        for each in (each for pair in pairs for each in pair):
            stack.enter_context(each).setblocking(False)
        (sender, source), (target, receiver) = pairs
        yield Way(source.fileno(), target.fileno(), 0.0, 0.0, random.Random(7)), sender, receiver


def all_of(receiver: socket.socket) -> list[bytes]:
    got = []
    with contextlib.suppress(BlockingIOError):
        while True:
            got.append(receiver.recv(100))
    return got


def test_packets_are_lost_by_the_seed_alone(
    way: tuple[Way, socket.socket, socket.socket],
) -> None:
    relayed, sender, receiver = way
    relayed.loss = LOSS
    got = []
    for number in range(PACKETS):
        sender.send(str(number).encode())
        relayed.take()
        got += [int(packet) for packet in all_of(receiver)]
    chances = random.Random(7)
    expected = [number for number in range(PACKETS) if chances.random() >= LOSS]
    assert got == expected
    assert 0.6 * PACKETS < len(got) < PACKETS


def test_a_packet_waits_until_it_is_due(way: tuple[Way, socket.socket, socket.socket]) -> None:
    relayed, sender, receiver = way
    relayed.delay_s = 3600.0
    sender.send(b"late")
    relayed.take()
    wait_s = relayed.deliver_due()
    assert wait_s is not None
    assert 3500 < wait_s <= 3600
    assert all_of(receiver) == []
    # As if that hour had passed.
    relayed.on_the_way = collections.deque((0.0, packet) for _, packet in relayed.on_the_way)
    assert relayed.deliver_due() is None
    assert all_of(receiver) == [b"late"]


def test_no_packet_overtakes_one_that_is_on_the_way(
    way: tuple[Way, socket.socket, socket.socket],
) -> None:
    relayed, sender, receiver = way
    relayed.on_the_way.append((time.monotonic(), b"first"))
    sender.send(b"second")
    relayed.take()
    while relayed.deliver_due() is not None:
        pass
    assert all_of(receiver) == [b"first", b"second"]


def test_one_that_is_off_loses_everything(way: tuple[Way, socket.socket, socket.socket]) -> None:
    relayed, sender, receiver = way
    relayed.on_the_way.append((0.0, b"on the way"))
    relayed.is_off = True
    sender.send(b"sent")
    relayed.take()
    assert relayed.deliver_due() is None
    assert all_of(receiver) == []


def test_a_far_host_answers_late_and_a_silent_cut_is_one() -> None:
    with hosts_or_skip(2, delay_ms=DELAY_MS, links=2) as hosts:
        for link in hosts[0].links:
            for address in (link.address, link.address6):
                with connection(hosts[1], hosts[0], address) as (one, other):
                    begin = time.monotonic()
                    one.sendall(b"ping")
                    other.sendall(other.recv(4))
                    assert one.recv(4) == b"ping"
                    assert time.monotonic() - begin >= 2 * DELAY_MS / 1000
        with connection(hosts[1], hosts[0], hosts[0].address) as (one, other):
            hosts[0].cut(0, silently=True)
            one.sendall(b"lost")
            other.settimeout(3 * DELAY_MS / 1000)
            with pytest.raises(TimeoutError):
                other.recv(4)
            hosts[0].restore()
            other.settimeout(LIMIT_S)
            assert other.recv(4) == b"lost"


def datagrams_through(hosts: Hosts) -> list[int]:
    with contextlib.ExitStack() as stack:
        ends = []
        for host in hosts:
            with inside(host.namespace):
                ends.append(stack.enter_context(socket.socket(type=socket.SOCK_DGRAM)))
            ends[-1].bind((host.address, 0))
            ends[-1].settimeout(LIMIT_S)
        ends[1].setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 4 << 20)
        for number in range(PACKETS):
            ends[0].sendto(b"%d" % number, ends[1].getsockname())
        got: list[int] = []
        # One of the last ten arrives.
        while not got or got[-1] < PACKETS - 10:
            got.append(int(ends[1].recv(100)))
        return got


def test_a_bad_network_loses_some_packets_and_tcp_makes_up_for_it() -> None:
    with hosts_or_skip(2, loss=LOSS, seed=3) as hosts:
        got = datagrams_through(hosts)
        assert got == sorted(set(got))
        assert 0.5 * PACKETS < len(got) < 0.95 * PACKETS
        payload = os.urandom(20_000)
        with connection(hosts[0], hosts[1], hosts[1].address) as (one, other):
            one.sendall(payload)
            one.shutdown(socket.SHUT_WR)
            assert b"".join(iter(lambda: other.recv(1 << 16), b"")) == payload


def test_wrong_shares_and_numbers_of_hosts_are_refused() -> None:
    with pytest.raises(ValueError, match="for 2 hosts, not 3"):
        Hosts(3, delay_ms=1)
    with pytest.raises(ValueError, match="loss=2 is a share"):
        Hosts(2, loss=2)
