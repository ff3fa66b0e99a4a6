"""Which process a rank is, so that others can tell whether it still runs, and what it ends with."""

import ctypes
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

_PR_SET_PDEATHSIG = 1  # of prctl(2): for the thread that calls it

# Where the program was when it imported pydist: as a rule, where it was started.
_folder_at_import: str | None = None
with suppress(OSError):  # the folder is gone
    _folder_at_import = os.getcwd()


def folder_at_import() -> str | None:
    """Where the program was when it imported pydist; None if the folder was gone."""
    return _folder_at_import


# How often a process is looked at that can't be watched.
_LOOK_S = 1.0


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
            status = status_of(self.pid)
        except OSError:  # no descriptor is left, say: that tells nothing of the other process
            return False
        return status.state in "ZX" or status.started != self.started

    def __str__(self) -> str:
        return f"pid {self.pid} on host {self.host}"


@cache
def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


class Status(NamedTuple):
    """What /proc says of a process of this machine.

    Attributes:
        name: Of its program, cut to 15 bytes.
        state: By the letter of /proc.
        parent: The number of its parent.
        started: When it started, in ticks of the machine's clock.
    """

    name: str
    state: str
    parent: int
    started: int


def status_of(pid: int) -> Status:
    """The status of a process: X, for dead, where there is none.

    Raises:
        OSError: nobody can tell: no descriptor is left, say.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return Status("", "X", 0, 0)
    # The name stands in parentheses and may hold any character, ")" too.
    name, _, rest = stat.partition("(")[2].rpartition(")")
    fields = rest.split()
    return Status(name, fields[0], int(fields[1]), int(fields[19]))


def own_process() -> Process:
    """This one: the same as long as it runs, whatever it can't open any more."""
    return _own(os.getpid())


@cache
def _own(pid: int) -> Process:
    return _process(pid)


def _process(pid: int) -> Process:
    try:
        return Process(_machine(), socket.gethostname(), pid, status_of(pid).started)
    except OSError:
        return Process("", socket.gethostname(), pid, 0)


def end_with(parent: int, grace_s: float = 0.0, before: Callable[[], None] = lambda: None) -> None:
    """Has this process end, by SIGKILL, some time after another one. A thread waits for that.

    Args:
        parent: The number of a process of this machine that is known to live.
        grace_s: How much later.
        before: What is to be done at that time, at the latest.
    """
    process = _process(parent)
    is_ready = threading.Event()

    def wait() -> None:
        # Should this process be stopped by then, the kernel lets it go on, where the other one is
        # its parent: when the thread that has started it ends, which may be earlier.
        try:
            with suppress(OSError, AttributeError):
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
        finally:
            is_ready.set()
        _wait_for_end(process)
        time.sleep(grace_s)
        before()
        os.kill(os.getpid(), signal.SIGKILL)

    with suppress(RuntimeError):  # no thread is to be had
        threading.Thread(target=wait, name="pydist-parent", daemon=True).start()
        is_ready.wait()


def _wait_for_end(process: Process) -> None:
    with suppress(OSError):  # it has ended, or the system gives no descriptor
        descriptor = os.pidfd_open(process.pid)
        try:
            # By now the number may be that of a later process.
            if not process.is_known_dead:
                end = select.poll()
                end.register(descriptor, select.POLLIN)
                end.poll()
                return
        finally:
            os.close(descriptor)
    while not process.is_known_dead:
        time.sleep(_LOOK_S)


@cache
def _is_tied(_pid: int) -> bool:
    agent = _torchruns_agent()
    if agent is not None:
        end_with(agent)
    return agent is not None


def end_with_torchrun() -> None:
    """Has a process that torchrun has started end with it. Idempotent.

    torchrun ends its processes by itself, unless it is killed. One that no torchrun has started
    goes on, whatever happens to its shell.
    """
    _is_tied(os.getpid())


def _torchruns_agent() -> int | None:
    """The number of the process that runs torchrun's agent; None where none has started this one.

    Each process that the agent starts begins a session, so the agent is the parent of the session's
    first process. That is another rank where a rank has started a program in a session of its own:
    a rank, unlike the agent, was born with the variable that tells the number of the run.
    """
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    if run is None:
        return None
    told = f"TORCHELASTIC_RUN_ID={run}".encode()
    try:
        first = os.getsid(0)
        # Processes that run a function (`elastic_launch`, `--run-path`) stay in the session of the
        # agent's shell, whose parent is a terminal. torch itself has the kernel end those.
        if first != os.getpid() and told not in _born_with(first):
            return None
        agent = status_of(first).parent
        is_rank = told in _born_with(agent)
    except OSError:
        return None
    return None if agent <= 1 or is_rank else agent


def _born_with(pid: int) -> list[bytes]:
    """The environment that a process was started with."""
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
