"""Which process a rank is, so that others can tell whether it still runs."""

import os
import socket
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["Process", "own_process"]


@dataclass(frozen=True)
class Process:
    """A process, told apart from all others of all hosts, also from later ones with its number.

    Attributes:
        machine: The boot of a kernel and a namespace of process numbers; empty where /proc does not
            tell.
        host: The name of its host, for people.
        pid: Its number.
        started: When it started, in ticks of its machine's clock.
    """

    machine: str
    host: str
    pid: int
    started: int

    @property
    def key(self) -> str:
        """The same text for the same process, wherever it is asked for."""
        return f"{self.machine or self.host} {self.pid} {self.started}"

    @property
    def is_known_dead(self) -> bool:
        """Whether it has ended, as far as this process can see: it sees those of its machine."""
        if not self.machine or self.machine != _machine():
            return False
        try:
            state, started = _state_and_start(self.pid)
        except OSError:  # no descriptor is left, say: that tells nothing of the other process
            return False
        return state in "ZX" or started != self.started

    def __str__(self) -> str:
        return f"pid {self.pid} on host {self.host}"


@cache
def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _state_and_start(pid: int) -> tuple[str, int]:
    """A process's state, by the letter of /proc, and its start; X and 0 where there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return "X", 0
    # The name stands in parentheses and may hold any character, ")" too.
    fields = stat.rpartition(")")[2].split()
    return fields[0], int(fields[19])


def own_process() -> Process:
    """This one: the same as long as it runs, whatever it can't open any more."""
    return _own(os.getpid())


@cache
def _own(pid: int) -> Process:
    try:
        return Process(_machine(), socket.gethostname(), pid, _state_and_start(pid)[1])
    except OSError:
        return Process("", socket.gethostname(), pid, 0)
