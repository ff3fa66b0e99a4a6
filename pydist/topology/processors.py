"""The NUMA nodes of this host, with the processors that this process may use.

Read from /sys, where the kernel describes the machine. What it does not tell (as in sandboxes that
show no /sys) is None, or left out.
"""

import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["NumaNode", "cpu_list", "numa_nodes", "parse_cpu_list"]

_SYS = Path("/sys")


@dataclass(frozen=True)
class NumaNode:
    """Processors, and the memory that is nearest to them.

    Attributes:
        number: Of the node, as the kernel counts.
        sockets: The numbers of the sockets that its processors are in; none where that is unknown.
        cpus: The numbers of its processors; none for a node that has memory alone.
        allowed: Those of them that this process may run on.
        memory_bytes: Of its memory; None where that is unknown.
        free_bytes: Of memory that nothing uses; None where that is unknown.
    """

    number: int
    sockets: tuple[int, ...]
    cpus: tuple[int, ...]
    allowed: tuple[int, ...]
    memory_bytes: int | None
    free_bytes: int | None


def numa_nodes(allowed: Collection[int], sys: Path = _SYS) -> list[NumaNode]:
    """The nodes of this host, by number; a kernel that knows of none has one, with all processors.

    Args:
        allowed: The numbers of the processors that this process may run on.
        sys: What is at /sys.
    """
    folders = {}
    for folder in (sys / "devices/system/node").glob("node*"):
        if folder.name[4:].isdigit():
            folders[int(folder.name[4:])] = folder
    if not folders:
        cpus = parse_cpu_list(_read(sys / "devices/system/cpu/online")) or sorted(allowed)
        return [_node(0, cpus, allowed, "", sys)]
    return [
        _node(
            number,
            parse_cpu_list(_read(folder / "cpulist")),
            allowed,
            _read(folder / "meminfo"),
            sys,
        )
        for number, folder in sorted(folders.items())
    ]


def _node(
    number: int, cpus: Iterable[int], allowed: Collection[int], meminfo: str, sys: Path
) -> NumaNode:
    own = tuple(cpus)
    return NumaNode(
        number,
        _sockets(own, sys),
        own,
        tuple(cpu for cpu in own if cpu in allowed),
        _bytes_in(meminfo, "MemTotal"),
        _bytes_in(meminfo, "MemFree"),
    )


def _sockets(cpus: Iterable[int], sys: Path) -> tuple[int, ...]:
    found = set()
    for cpu in cpus:
        text = _read(sys / f"devices/system/cpu/cpu{cpu}/topology/physical_package_id")
        # Virtual machines may say -1.
        if text.isdigit():
            found.add(int(text))
    return tuple(sorted(found))


def _bytes_in(meminfo: str, name: str) -> int | None:
    """From a line such as "Node 0 MemTotal:  16384 kB"."""
    line = re.search(rf"\b{name}:\s*(\d+) kB", meminfo)
    return int(line[1]) << 10 if line else None


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text().strip()
    return ""


def parse_cpu_list(text: str) -> list[int]:
    """The numbers in the kernel's words, such as "0-3,8"; none where these are no such words."""
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        span = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if span is None:
            return []
        numbers += range(int(span[1]), int(span[2] or span[1]) + 1)
    return numbers


def cpu_list(numbers: Iterable[int]) -> str:
    """Numbers in the kernel's words: "0-3,8"; "none" without any."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    words = (str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return ",".join(words) or "none"
