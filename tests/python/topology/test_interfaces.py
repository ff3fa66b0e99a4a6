"""Interfaces of this host, as a system that is made up shows them, and which one is taken."""

from dataclasses import dataclass

import pytest

import pydist
from pydist import _native
from pydist.topology.interfaces import (
    Interface,
    Told,
    interfaces_with,
    list_interfaces,
    told_alone,
)

pytestmark = pytest.mark.timeout(20)


@dataclass
class MadeUp:
    """What the engine tells of an interface."""

    name: str
    addresses: list[str]
    is_loopback: bool = False
    is_up: bool = True
    is_running: bool = True
    mtu_bytes: int | None = 1500
    mbit_per_s: int | None = 10_000


FOUND = [
    MadeUp("lo", ["127.0.0.1", "::1"], is_loopback=True, mtu_bytes=65536, mbit_per_s=None),
    MadeUp("eth0", ["10.0.0.1", "2001:db8::1"]),
    MadeUp("eth1", [], is_running=False, mbit_per_s=None),
    MadeUp("ib0", ["10.1.0.1"], is_up=False, is_running=False, mtu_bytes=None),
]


@pytest.fixture
def interfaces(monkeypatch: pytest.MonkeyPatch) -> list[Interface]:
    monkeypatch.setattr(_native, "network_interfaces", lambda: FOUND)
    return list_interfaces()


def test_all_but_the_loopback_are_listed(interfaces: list[Interface]) -> None:
    assert interfaces == [
        Interface("eth0", "up", 10_000, 1500, ("10.0.0.1", "2001:db8::1")),
        Interface("eth1", "no link", None, 1500, ()),
        Interface("ib0", "down", 10_000, None, ("10.1.0.1",)),
    ]


def test_interfaces_are_found_by_their_addresses(interfaces: list[Interface]) -> None:
    assert interfaces_with(["2001:db8::1"], interfaces) == ["eth0"]
    assert interfaces_with(["10.1.0.1", "10.0.0.1"], interfaces) == ["eth0", "ib0"]
    assert interfaces_with(["192.0.2.1"], interfaces) == []


def test_this_host_has_a_loopback_by_the_system_itself() -> None:
    loopback = next(each for each in _native.network_interfaces() if each.is_loopback)
    assert "127.0.0.1" in loopback.addresses
    assert loopback.is_up
    assert loopback.mtu_bytes is not None
    assert loopback.mbit_per_s is None


def test_the_interface_that_is_named_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYDIST_INTERFACE", "lo")
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.7")
    assert told_alone() == Told(("127.0.0.1",), "PYDIST_INTERFACE")


def test_an_interface_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYDIST_INTERFACE", "eth77")
    with pytest.raises(pydist.InvalidUsage, match="PYDIST_INTERFACE names 'eth77'"):
        told_alone()


def test_otherwise_it_is_the_one_on_the_way_to_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYDIST_INTERFACE", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.5")
    assert told_alone() == Told(("127.0.0.1",), "the way to MASTER_ADDR=127.0.0.5")
    monkeypatch.setenv("MASTER_ADDR", "no.such.host.invalid")
    told = told_alone()
    assert told.addresses == ()
    assert "there is no way to MASTER_ADDR=no.such.host.invalid" in told.reason
    monkeypatch.delenv("MASTER_ADDR")
    assert told_alone() == Told((), "")
