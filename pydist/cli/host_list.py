"""Which hosts `pydist run -H a:4,b:4` means, and how many processes each of them gets."""

import ipaddress
import re
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydist.errors import InvalidUsage

__all__ = ["Host", "is_this_host", "parse_hostfile", "parse_hosts", "share_out"]

# A name or an IPv4 address, or an IPv6 address in brackets; perhaps a user; perhaps slots.
_HOST = re.compile(
    r"(?P<user>[^@\s:,\[\]]+@)?"
    r"(?:\[(?P<v6>[^\[\]\s,]+)\]|(?P<name>[^@\s:,\[\]-][^@\s:,\[\]]*))"
    r"(?::(?P<slots>[^\s:,]*))?"
)
_OPTIONS_OF_MPIRUN = ("max_slots", "max-slots")  # in its hostfiles; they say nothing to us


@dataclass(frozen=True)
class Host:
    """A host by the name that ssh is given, and how many processes it may have."""

    name: str
    # None where nobody has said.
    slots: int | None

    @property
    def address(self) -> str:
        """The name without the user."""
        return self.name.rpartition("@")[2]


def parse_hosts(text: str) -> list[Host]:
    """Reads `-H`: "a:4,b:4", "user@a", "[fd00::1]:2". A host that is named again adds its slots.

    Raises:
        InvalidUsage: a part is no host.
    """
    parts = [part.strip() for part in text.split(",")]
    hosts = [_parse_host(part, f"-H {text}") for part in parts if part]
    if not hosts:
        raise InvalidUsage(f"-H '{text}' names no host; give for example -H a:4,b:4")
    return _merge(hosts)


def parse_hostfile(path: Path) -> list[Host]:
    """Reads `--hostfile`: a host a line, as "a slots=4", "a:4" or "a"; # begins a comment.

    Raises:
        InvalidUsage: the file can't be read, a line is no host, or there is none.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidUsage(f"--hostfile {path} can't be read: {error}") from error
    hosts = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if words:
            hosts.append(_parse_line(words, f"--hostfile {path}, line {number}"))
    if not hosts:
        raise InvalidUsage(f"--hostfile {path} names no host; a line is for example `a slots=4`")
    return _merge(hosts)


def _parse_line(words: list[str], where: str) -> Host:
    host = _parse_host(words[0], where)
    for word in words[1:]:
        name, _, value = word.partition("=")
        if name == "slots" and host.slots is None:
            host = Host(host.name, _parse_slots(value, where))
        elif name not in _OPTIONS_OF_MPIRUN:
            raise InvalidUsage(f"{where}: '{word}' is not understood; write `a slots=4` or `a:4`")
    return host


def _parse_host(text: str, where: str) -> Host:
    if text.count(":") > 1 and "[" not in text:
        raise InvalidUsage(
            f"{where}: '{text}' is no host: write an IPv6 address in brackets, [{text}] or "
            f"[{text}]:4"
        )
    found = _HOST.fullmatch(text)
    if found is None:
        raise InvalidUsage(
            f"{where}: '{text}' is no host: write a name or an address, and after a colon how many "
            "processes it may have, such as a:4 or user@10.0.0.1:4"
        )
    if found["v6"] is not None:
        with suppress(ValueError):
            ipaddress.IPv6Address(found["v6"])
            slots = None if found["slots"] is None else _parse_slots(found["slots"], where)
            return Host((found["user"] or "") + found["v6"], slots)
        raise InvalidUsage(f"{where}: '{found['v6']}' in brackets is no IPv6 address")
    slots = None if found["slots"] is None else _parse_slots(found["slots"], where)
    return Host((found["user"] or "") + found["name"], slots)


def _parse_slots(text: str, where: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise InvalidUsage(f"{where}: '{text}' slots make no sense; give a number, 1 or more")
    return int(text)


def _merge(hosts: Iterable[Host]) -> list[Host]:
    merged: dict[str, Host] = {}
    for host in hosts:
        if (before := merged.get(host.name)) is not None:
            host = Host(host.name, (before.slots or 1) + (host.slots or 1))
        merged[host.name] = host
    return list(merged.values())


def share_out(hosts: Sequence[Host], processes: int) -> list[Host]:
    """The hosts that get processes when as many as `-np` says fill the hosts in their order.

    Args:
        hosts: a host whose slots nobody has said has one.
        processes: how many in all, 1 or more.

    Raises:
        InvalidUsage: the hosts have fewer slots.
    """
    slots = sum(host.slots or 1 for host in hosts)
    if processes > slots:
        listed = ", ".join(f"{host.name}:{host.slots or 1}" for host in hosts)
        raise InvalidUsage(
            f"-np {processes} is more than the {slots} slots of the hosts ({listed}): give the "
            "hosts more slots, as in -H a:4,b:4, or start fewer processes"
        )
    filled = []
    for host in hosts:
        take = min(processes, host.slots or 1)
        processes -= take
        if take > 0:
            filled.append(Host(host.name, take))
    return filled


def is_this_host(host: Host) -> bool:
    """Whether a name means the host that this process is on: then no ssh is needed.

    With a user it never does. A name that can't be resolved is one that only ssh knows.
    """
    if "@" in host.name:
        return False
    if host.name in ("localhost", socket.gethostname()):
        return True
    with suppress(OSError, UnicodeError):
        return any(
            _is_own_address(family, place)
            for family, *_, place in socket.getaddrinfo(host.name, 9, type=socket.SOCK_DGRAM)
        )
    return False


def _is_own_address(family: int, place: tuple[object, ...]) -> bool:
    """To itself a host speaks from the very address that it speaks to; nothing is sent here."""
    if ipaddress.ip_address(str(place[0]).partition("%")[0]).is_loopback:
        return True
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)
        return bool(probe.getsockname()[0] == place[0])
    return False
