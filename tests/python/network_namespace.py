"""Moves a thread into another network namespace: the sockets that it makes from then on are there.

Threads that it starts later begin there, too; those that run already stay where they are.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_OWN = Path("/proc/thread-self/ns/net")


def enter(namespace: str | Path) -> None:
    """Moves this thread.

    Args:
        namespace: a file that stands for a namespace, such as /run/netns/NAME or /proc/PID/ns/net.

    Raises:
        OSError: there is no such file, or this process is not privileged (CAP_SYS_ADMIN).
    """
    descriptor = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _enter(descriptor, str(namespace))
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def inside(namespace: str | Path) -> Iterator[None]:
    """Moves this thread there, and back at the end. What it has opened there stays there."""
    own = os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)
    try:
        enter(namespace)
        try:
            yield
        finally:
            _enter(own, "the namespace before")
    finally:
        os.close(own)


def _enter(descriptor: int, name: str) -> None:
    # os.setns is Python 3.12's.
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}", name)
