"""Names of network namespaces that tell who made them, and the end of those nobody owns any more.

A name holds the process id of its owner and the moment at which that process started. So what a
killed test has left behind is known, even where another process has got its number since.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]
from iproute import HostsUnavailableError, ip

PREFIX = "pydist-hosts"
FOLDER = Path("/run/netns")
# Below it, what `ip netns exec NAME` shows in the place of files of /etc.
OWN_FILES = Path("/etc/netns")
# How long killed processes may take to be gone.
_END_S = 5.0


def make_names(*parts: str) -> list[str]:
    """A name for each part, none of which has been used before."""
    word = secrets.token_hex(3)
    return [f"{PREFIX}-{os.getpid()}-{_started(os.getpid())}-{word}-{part}" for part in parts]


def path_of(name: str) -> Path:
    """The file that stands for a namespace."""
    return FOLDER / name


def remove(name: str) -> None:
    """Ends the processes that live in a namespace, and the namespace. Nothing where it is gone."""
    shutil.rmtree(OWN_FILES / name, ignore_errors=True)
    if not path_of(name).exists():
        return
    deadline = time.monotonic() + _END_S
    while (pids := _inhabitants(name)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # One that is no child of ours can't be waited for otherwise.
        time.sleep(0.005)
    # Another process may sweep it at the same moment.
    with contextlib.suppress(HostsUnavailableError):
        ip(f"netns delete {name}")


def sweep() -> list[str]:
    """Removes the namespaces whose owner is gone; returns their names."""
    left = [path.name for path in FOLDER.glob(f"{PREFIX}-*-*-*-*") if not _has_owner(path.name)]
    for name in left:
        remove(name)
    return left


def _has_owner(name: str) -> bool:
    pid, started = name.removeprefix(f"{PREFIX}-").split("-")[:2]
    return _started(int(pid)) == started


def _started(pid: int) -> str:
    """When a process started, in clock ticks after the system did; empty where there is none."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if words[0] == "Z" else words[19]


def _inhabitants(name: str) -> list[int]:
    found = subprocess.run(
        ["ip", "netns", "pids", name], capture_output=True, text=True, check=False, timeout=20
    )
    own = os.getpid()
    return [int(pid) for pid in found.stdout.split() if int(pid) != own and is_alive(int(pid))]


def is_alive(pid: int) -> bool:
    """Whether a process runs still: one that nobody has waited for yet does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
