"""Leaves a process no descriptors, threads or memory, without taking any from other processes."""

import contextlib
import ctypes
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydist.errors import InvalidUsage

Resource = Literal["descriptors", "threads", "memory"]

# No address space has room for a stack of this many bytes.
_ENDLESS_STACK = 1 << 60
# More than the pthread_attr_t of any system.
_ATTRIBUTES_BYTES = 256


@contextlib.contextmanager
def exhausted(what: Resource, *, spare: int = 0) -> Iterator[None]:
    """Within the block, this process can have no more of something.

    Descriptors and memory are limited by the process's own limits (RLIMIT_NOFILE, RLIMIT_AS), and
    threads by a default size of stacks for which no process has room. Nothing is taken from other
    processes, and all is as before at the end.

    Args:
        what: "descriptors", "threads" or "memory".
        spare: How many descriptors, or bytes of address space, are left.

    Raises:
        InvalidUsage: `what` is not known, or has no spare.

    Example:
        >>> with exhausted("descriptors"):
        ...     open("/dev/null")
        Traceback (most recent call last):
        ...
        OSError: [Errno 24] Too many open files: '/dev/null'
    """
    if what == "threads":
        if spare:
            raise InvalidUsage("exhausted('threads') has no spare: no thread can start.")
        with _no_threads():
            yield
        return
    if what == "descriptors":
        kind, limit = resource.RLIMIT_NOFILE, _first_beyond(spare)
    elif what == "memory":
        kind, limit = resource.RLIMIT_AS, _address_space() + spare
    else:
        raise InvalidUsage(f"{what!r} is not known; use one of: descriptors, threads, memory.")
    before = resource.getrlimit(kind)
    hard = before[1]
    resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


def _first_beyond(spare: int) -> int:
    """The least descriptor below which only so many are free: the limit is one of numbers."""
    number = 0
    while True:
        if not _is_open(number):
            if spare == 0:
                return number
            spare -= 1
        number += 1


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


@contextlib.contextmanager
def _no_threads() -> Iterator[None]:
    c = ctypes.CDLL(None, use_errno=True)
    before = ctypes.create_string_buffer(_ATTRIBUTES_BYTES)
    endless = ctypes.create_string_buffer(_ATTRIBUTES_BYTES)
    for attributes in (before, endless):
        _require_done(c.pthread_getattr_default_np(attributes))
    _require_done(c.pthread_attr_setstacksize(endless, ctypes.c_size_t(_ENDLESS_STACK)))
    _require_done(c.pthread_setattr_default_np(endless))
    try:
        yield
    finally:
        _require_done(c.pthread_setattr_default_np(before))
        for attributes in (before, endless):
            c.pthread_attr_destroy(attributes)


def _require_done(code: int) -> None:
    if code:
        raise OSError(code, os.strerror(code))
