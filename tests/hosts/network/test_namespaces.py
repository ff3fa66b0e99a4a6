"""The hosts themselves: their networks, what can happen to a link, and that nothing is left."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import iproute
import pytest
from hosts_or_skip import hosts_or_skip
from namespace_names import FOLDER, PREFIX, is_alive, sweep
from namespaces import Host, Hosts, HostsUnavailableError
from network_namespace import inside
from talk import LIMIT_S, connection

pytestmark = pytest.mark.timeout(60)

# Makes hosts and says how they are called, then waits for its end.
OWNER = """
import subprocess, sys, threading
from namespaces import Hosts
with Hosts(2) as hosts:
    sleeper = hosts[0].popen(["sleep", "1000"])
    print(*(host.name for host in hosts), sleeper.pid, flush=True)
    threading.Event().wait(60)
"""


def echoes(client: Host, server: Host, address: str) -> bool:
    with connection(client, server, address) as (one, other):
        one.sendall(b"ping")
        return other.recv(4) == b"ping"


def own_namespaces(pid: int) -> list[str]:
    return [path.name for path in FOLDER.glob(f"{PREFIX}-{pid}-*")]


def test_hosts_reach_each_other_on_every_link_by_both_families(hosts: Hosts) -> None:
    addresses = [a for link in hosts[0].links for a in (link.address, link.address6)]
    assert len(set(addresses)) == 4
    for address in addresses:
        assert echoes(hosts[1], hosts[0], address)
    assert hosts[0].address == hosts[0].links[0].address
    assert hosts[0].interface == hosts[0].links[0].interface == "eth0"


def test_four_hosts_reach_each_other() -> None:
    with hosts_or_skip(4) as hosts:
        assert len({host.address for host in hosts}) == len(hosts) == 4
        for server in hosts:
            assert echoes(hosts[server.index - 1], server, server.address)


def test_a_host_has_a_loopback_device_and_interfaces_and_no_more(hosts: Hosts) -> None:
    with inside(hosts[0].namespace):
        assert {name for _, name in socket.if_nameindex()} == {"lo", "eth0", "eth1"}
        with socket.create_server(("127.0.0.1", 0)) as listener:
            socket.create_connection(listener.getsockname(), LIMIT_S).close()
        with pytest.raises(OSError, match="unreachable"):
            socket.create_connection(("10.1.2.3", 80), LIMIT_S)


def test_a_command_runs_on_its_host(hosts: Hosts) -> None:
    look = [sys.executable, "-c", "import os; print(os.stat('/proc/self/ns/net').st_ino)"]
    printed = [host.run(look).stdout.strip() for host in hosts]
    assert printed == [str(os.stat(host.namespace).st_ino) for host in hosts]
    assert str(os.stat("/proc/self/ns/net").st_ino) not in printed


def test_its_environment_has_what_is_given_and_no_launchers(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "7")
    with hosts[0].popen(["env"], env={"MINE": "yes"}, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        lines = process.stdout.read().decode().split("\n")
    assert "MINE=yes" in lines
    assert not any(line.startswith("RANK=") for line in lines)


@pytest.mark.parametrize("silently", [False, True])
@pytest.mark.parametrize("family", [4, 6])
def test_a_link_that_was_cut_carries_nothing_until_it_is_restored(
    hosts: Hosts, silently: bool, family: int
) -> None:
    link = hosts[0].links[0]
    address = link.address if family == 4 else link.address6
    with connection(hosts[1], hosts[0], address) as (one, other):
        hosts[0].cut(0, silently=silently)
        try:
            # The interface of the other host doesn't notice either kind.
            one.sendall(b"late")
            other.setblocking(False)
            time.sleep(0.1)
            with pytest.raises(BlockingIOError):
                other.recv(4)
            assert is_up(hosts[0], link.interface) is silently
            # The second link is as it was.
            assert echoes(hosts[1], hosts[0], hosts[0].links[1].address)
        finally:
            hosts[0].restore(0)
        assert is_up(hosts[0], link.interface)
        # TCP sends again what was lost.
        other.settimeout(LIMIT_S)
        assert other.recv(4) == b"late"
        assert echoes(hosts[1], hosts[0], address)


def is_up(host: Host, interface: str) -> bool:
    flags = host.run(["ip", "-oneline", "link", "show", interface]).stdout
    return "LOWER_UP" in flags


def seconds_of(megabits: int, hosts: Hosts) -> float:
    payload, got = bytes(megabits * 125_000), 0
    with connection(hosts[0], hosts[1], hosts[1].address) as (one, other):
        begin = time.monotonic()
        one.settimeout(0)
        sent = 0
        buffer = bytearray(1 << 20)
        while got < len(payload):
            with contextlib.suppress(BlockingIOError):
                sent += one.send(payload[sent : sent + (1 << 16)])
            with contextlib.suppress(BlockingIOError):
                got += other.recv_into(buffer, 0, socket.MSG_DONTWAIT)
            assert time.monotonic() < begin + LIMIT_S
        return time.monotonic() - begin


def test_a_shaped_link_is_as_fast_as_it_may_be(hosts: Hosts) -> None:
    unlimited = seconds_of(20, hosts)
    hosts.shape("100mbit")
    try:
        limited = seconds_of(20, hosts)
    finally:
        hosts.shape(None)
    again = seconds_of(20, hosts)
    # 20 Mbit at 100 Mbit/s, less what passes at once (128 KiB twice, at the host and the switch).
    assert limited > 0.17
    assert max(unlimited, again) < limited / 2


def test_an_exception_leaves_nothing() -> None:
    with pytest.raises(KeyError), hosts_or_skip(2) as hosts:  # noqa: PT012
        sleeper = hosts[0].popen(["sleep", "1000"])
        names = [host.name for host in hosts]
        raise KeyError
    assert sleeper.wait(LIMIT_S) == -signal.SIGKILL
    assert not set(names) & set(own_namespaces(os.getpid()))


@pytest.fixture
def owner() -> Iterator[subprocess.Popen[str]]:
    """Another process that has two hosts."""
    with hosts_or_skip(2):
        pass
    path = os.pathsep.join(filter(None, sys.path))
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        yield process
        process.kill()


def test_sigterm_leaves_nothing(owner: subprocess.Popen[str]) -> None:
    assert owner.stdout is not None
    *names, sleeper = owner.stdout.readline().split()
    assert set(names) < set(own_namespaces(owner.pid))
    owner.terminate()
    assert owner.wait(LIMIT_S) == -signal.SIGTERM
    assert own_namespaces(owner.pid) == []
    assert not is_alive(int(sleeper))


def test_what_a_killed_owner_has_left_is_swept(owner: subprocess.Popen[str]) -> None:
    assert owner.stdout is not None
    *names, sleeper = owner.stdout.readline().split()
    with hosts_or_skip(2) as hosts:
        # Those of living owners stay.
        assert set(names) < set(own_namespaces(owner.pid))
        owner.kill()
        owner.wait(LIMIT_S)
        assert set(names) < set(own_namespaces(owner.pid))
        with hosts_or_skip(2):
            pass
        assert own_namespaces(owner.pid) == []
        assert not is_alive(int(sleeper))
        assert echoes(hosts[0], hosts[1], hosts[1].address)
    assert sweep() == []


def test_without_root_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(HostsUnavailableError, match=r"belongs to user 1000\. Run it as root"):
        Hosts(2).__enter__()


@pytest.mark.skipif(os.geteuid() != 0, reason="asks for root first")
def test_without_iproute2_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(HostsUnavailableError, match="apt-get install iproute2"):
        Hosts(2).__enter__()


def test_a_command_that_fails_is_shown(hosts: Hosts) -> None:
    with pytest.raises(HostsUnavailableError, match=r'`ip link set eth9 up` failed: .*"eth9"'):
        iproute.ip("link set lo up", "link set eth9 up", namespace=hosts[0].name)
    with pytest.raises(HostsUnavailableError, match=r'`tc qdisc add dev eth9 root pfifo` .*"eth9"'):
        iproute.tc("qdisc add dev eth9 root pfifo", namespace=hosts[0].name)


def test_too_many_hosts_are_refused() -> None:
    with pytest.raises(ValueError, match="1 to 64 hosts"):
        Hosts(65)


def test_hosts_have_a_congestion_control_of_their_own() -> None:
    settings = Path("/proc/sys/net/ipv4/tcp_congestion_control")
    before = settings.read_text()
    with Hosts(1, congestion="reno") as alone:
        done = alone[0].run(["cat", str(settings)])
    assert done.stdout.strip() == "reno"
    assert settings.read_text() == before
    with pytest.raises(ValueError, match=r"congestion='none': this system has .*reno"):
        Hosts(1, congestion="none")


def test_a_thread_comes_back_from_a_namespace(hosts: Hosts, tmp_path: Path) -> None:
    own = os.stat("/proc/thread-self/ns/net").st_ino
    with inside(hosts[1].namespace):
        assert os.stat("/proc/thread-self/ns/net").st_ino == os.stat(hosts[1].namespace).st_ino
    assert os.stat("/proc/thread-self/ns/net").st_ino == own
    with pytest.raises(FileNotFoundError), inside(tmp_path / "none"):
        pass
    assert os.stat("/proc/thread-self/ns/net").st_ino == own
