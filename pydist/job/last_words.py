"""What a rank that ends with an exception tells the others, and the launcher.

An exception that leaves the program on one rank ends the job: the other ranks learn of it at once,
with its text, rather than when the process is gone. They fail in turn, and those failures are
*echoes*: errors of which another rank is the culprit. A launcher that reports the failure that it
sees first may see an echo first, and end the rank that was the cause before it has said anything.
So the cause writes its error down before it tells anybody, and an echo lets the cause go first.

Torch's launcher reads what a rank has written down from TORCHELASTIC_ERROR_FILE, and reports the
failure with the earliest time, in whole seconds.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from pydist import _native
from pydist.errors import Aborted, Error, InvalidUsage, Mismatch, PeerLost, Timeout
from pydist.job import current
from pydist.job.processes import status_of

# How long an echo waits for its cause to be gone.
_PATIENCE_S = 2.0
# By how much the time of an echo is later than any of its cause.
_ECHO_DELAY_S = 2

_Hook = Callable[[type[BaseException], BaseException, "TracebackType | None"], Any]
# What stood in sys.excepthook before `_hook` did; None while `_hook` is nowhere.
_usual_hook: _Hook | None = None
_listens = False


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _echoed(error: BaseException) -> Error | None:
    """The error in the chain that only tells of another rank's failure."""
    for each in _chain(error):
        # No other rank can explain these any better, so they are never echoes.
        if not isinstance(each, Error) or isinstance(each, (InvalidUsage, Mismatch, Timeout)):
            continue
        if isinstance(each, (PeerLost, Aborted)) or each.ranks:
            return None if _is_own(each) or _is_past(each) else each
    return None


def _is_past(error: Error) -> bool:
    """Whether it blames a process of an earlier job, from which this one's ranks have gone on."""
    known = current.job.agreement
    return error.generation < current.job.generation or (
        error.pid is not None
        and known is not None
        and all((each.pid, each.host) != (error.pid, error.host) for each in known.processes)
    )


def _is_own(error: Error) -> bool:
    """Whether this process is to blame.

    Its numbers do not tell: they are of the group whose operation failed, in which this process may
    have another one than in the job. Who blames itself says which process it is.
    """
    return error.pid == os.getpid() and error.host == socket.gethostname()


def is_echo(error: BaseException) -> bool:
    """Whether an exception only tells of another rank's failure."""
    return _echoed(error) is not None


def describe() -> str:
    """This rank, for people on other ranks: `rank 3 (pid 71 on host b)`."""
    member = current.job.membership
    place = f"pid {os.getpid()} on host {socket.gethostname()}"
    if member is None and not dist.is_initialized():
        return f"a process ({place})"
    return f"rank {dist.get_rank() if member is None else member.rank} ({place})"


def in_words(error: BaseException) -> str:
    """Of which class an exception is, and what it says, where it can say it; and its first cause.

    Of one that was raised from another one, such as torch's "failed to run forward" of a stage,
    those who did not see the traceback need both.
    """
    first, seen = error, {id(error)}
    while first.__cause__ is not None and id(first.__cause__) not in seen:
        first = first.__cause__
        seen.add(id(first))
    try:
        words, cause = (f"{type(each).__name__}: {str(each).strip()}" for each in (error, first))
    except Exception as failure:
        return f"{type(error).__name__}, whose text can't be had ({type(failure).__name__})"
    return words if str(first).strip() in words else f"{words} (because of {cause})"


def tell(error: BaseException) -> None:
    """Tells the launcher and the other ranks of an exception that ends this one.

    A forked child that has not joined by itself has nothing to tell: the job is its parent's.
    """
    if current.job.pid != os.getpid():
        return
    echoed = _echoed(error)
    _write_down(error, is_echo=echoed is not None)
    if echoed is not None:
        _let_first(echoed)
    elif current.job.membership is not None:
        what = in_words(error)
        abort_all(f"{describe()} has ended with {what}", what)


def abort_all(message: str, cause: str) -> None:
    """Fails all groups of this process, on all ranks, with texts that may hold any character."""
    message, cause = (
        text.replace("\0", "\\0").encode("utf-8", "backslashreplace").decode()
        for text in (message, cause)
    )
    _native.abort_all(message, cause)


def _write_down(error: BaseException, *, is_echo: bool) -> None:
    name = os.environ.get("TORCHELASTIC_ERROR_FILE")
    # A script that records its errors itself has done so by now, with this time.
    if not name or (Path(name).exists() and not is_echo):
        return
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    told = {
        "message": {
            "message": in_words(error),
            "extraInfo": {
                "py_callstack": text,
                "timestamp": str(int(time.time()) + (_ECHO_DELAY_S if is_echo else 0)),
            },
        }
    }
    try:
        Path(name).write_text(json.dumps(told), encoding="utf-8")
    except OSError as failure:
        print(f"pydist: can't write {name}: {failure}", file=sys.stderr)


def _let_first(culprit: Error) -> None:
    if culprit.pid is None or culprit.host != socket.gethostname():
        return
    deadline_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline_s:
        try:
            state = status_of(culprit.pid).state
        except OSError:
            return
        # One that is stopped may stay so.
        if state in "ZXTt":
            return
        time.sleep(0.02)


def _hook(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
    usual = _usual_hook or sys.__excepthook__
    try:
        usual(kind, error, where)
    finally:
        # At a prompt an exception ends nothing.
        if _listens and isinstance(error, Exception) and not hasattr(sys, "ps1"):
            # Whatever goes wrong here must not hide what it is about.
            with suppress(Exception):
                tell(error)


def listen() -> None:
    """From now on exceptions that leave the program are told."""
    global _usual_hook, _listens
    _listens = True
    # One that stands below somebody else's hook is still called by that.
    if _usual_hook is None:
        _usual_hook = sys.excepthook
        sys.excepthook = _hook


def forget() -> None:
    """Takes `listen` back."""
    global _usual_hook, _listens
    _listens = False
    if sys.excepthook is _hook:
        sys.excepthook = _usual_hook or sys.__excepthook__
        _usual_hook = None
