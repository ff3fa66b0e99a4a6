"""A folder that a rank has to itself, under a path at which other ranks see another one.

As on hosts without a file system in common: they have the same path, each on a disk of its own.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_CLONE_NEWNS = 0x00020000
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18


def have_alone(path: str | Path, instead: str | Path) -> None:
    """From now on this thread, and threads that it starts, see another folder at `path`.

    Args:
        path: A folder that is there.
        instead: Which one to see; made if it is not there.

    Raises:
        OSError: This process may not mount (CAP_SYS_ADMIN).
    """
    Path(instead).mkdir(parents=True, exist_ok=True)
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.unshare(_CLONE_NEWNS), "unshare")
    # What is mounted below is to stay here.
    _check(libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None), "mount of /")
    source, target = os.fsencode(instead), os.fsencode(path)
    _check(libc.mount(source, target, None, _MS_BIND, None), f"mount of {instead}")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
