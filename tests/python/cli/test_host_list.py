"""Which hosts -H and --hostfile mean, and how many processes each gets."""

import contextlib
import ipaddress
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pydist.cli.host_list import Host, is_this_host, parse_hostfile, parse_hosts, share_out
from pydist.errors import InvalidUsage

NAMES = st.one_of(
    st.from_regex(r"\A[a-z0-9_][a-z0-9_.-]{0,20}\Z"),
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(str),
)
USERS = st.one_of(st.just(""), st.from_regex(r"\A[a-z_][a-z0-9_.-]{0,8}@\Z"))
HOSTS = st.lists(
    st.builds(
        Host,
        st.builds(lambda user, name: user + name, USERS, NAMES),
        st.one_of(st.none(), st.integers(1, 9999)),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda host: host.name,
)


def written(host: Host) -> str:
    user, at, name = host.name.rpartition("@")
    name = f"[{name}]" if ":" in name else name
    return user + at + name + ("" if host.slots is None else f":{host.slots}")


@given(HOSTS)
def test_what_is_written_is_read(hosts: list[Host]) -> None:
    assert parse_hosts(",".join(map(written, hosts))) == hosts


@given(HOSTS, st.integers(1, 60_000))
def test_processes_fill_the_hosts_in_their_order(hosts: list[Host], processes: int) -> None:
    slots = [host.slots or 1 for host in hosts]
    if processes > sum(slots):
        with pytest.raises(InvalidUsage, match=f"-np {processes} is more than the {sum(slots)} "):
            share_out(hosts, processes)
        return
    filled = share_out(hosts, processes)
    assert [host.name for host in filled] == [host.name for host in hosts][: len(filled)]
    counts = [host.slots or 0 for host in filled]
    assert sum(counts) == processes
    assert counts[:-1] == slots[: len(filled) - 1]
    assert 0 < counts[-1] <= slots[len(filled) - 1]


@given(st.text(max_size=12))
def test_anything_else_is_one_error(text: str) -> None:
    with contextlib.suppress(InvalidUsage):
        for host in parse_hosts(text):
            assert host.slots is None or host.slots > 0
            # ssh takes what begins with a dash for a flag.
            assert not host.address.startswith("-")
            assert ":" not in host.address or ipaddress.IPv6Address(host.address)


def test_a_host_that_is_named_again_adds_its_slots() -> None:
    assert parse_hosts("a:2,b,a:3,b") == [Host("a", 5), Host("b", 2)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "names no host"),
        (" , ", "names no host"),
        ("a:", "'' slots make no sense"),
        ("a:0", "'0' slots make no sense"),
        ("a:four", "'four' slots make no sense"),
        ("-oProxyCommand=x", "'-oProxyCommand=x' is no host"),
        ("me@-x", "'me@-x' is no host"),
        ("a b", "'a b' is no host"),
        ("fd00::1:4", r"in brackets, \[fd00::1:4\] or"),
        ("[a]:4", "'a' in brackets is no IPv6 address"),
        ("[fd00::1]4", "is no host"),
    ],
)
def test_what_is_no_host_is_said(text: str, said: str) -> None:
    with pytest.raises(InvalidUsage, match=said):
        parse_hosts(text)


def test_a_hostfile(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(
        "# two racks\n\na slots=4  # the first\nb:2\n  c\n[fd00::1] slots=1 max_slots=8\n"
        "me@d slots=3\na slots=1\n"
    )
    assert parse_hostfile(path) == [
        *(Host("a", 5), Host("b", 2), Host("c", None), Host("fd00::1", 1), Host("me@d", 3)),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a\nb slots=x\n", "line 2: 'x' slots make no sense"),
        ("a slots 4\n", "line 1: '' slots make no sense"),
        ("a:4 slots=4\n", "line 1: 'slots=4' is not understood"),
        ("a,b\n", "line 1: 'a,b' is no host"),
        ("# nobody\n", "names no host"),
    ],
)
def test_a_line_that_is_no_host_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(InvalidUsage, match=said):
        parse_hostfile(path)


def test_a_hostfile_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidUsage, match=r"can't be read: .*No such file"):
        parse_hostfile(tmp_path / "none")


@pytest.mark.parametrize(
    "name", ["localhost", "127.0.0.1", "127.0.1.1", "::1", socket.gethostname()]
)
def test_this_host_is_known_by_its_names(name: str) -> None:
    assert is_this_host(Host(name, 1))


def test_this_host_is_known_by_its_address() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this host has no way to others, and so no address")
        assert is_this_host(Host(probe.getsockname()[0], 1))


# 192.0.2.0/24 is for examples: nobody has it.
@pytest.mark.parametrize("name", ["me@localhost", "192.0.2.1", "no-such-host.invalid"])
def test_others_are_reached_by_ssh(name: str) -> None:
    assert not is_this_host(Host(name, 1))
