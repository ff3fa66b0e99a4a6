"""Dumps: a rank that is asked by a signal, or that fails, writes down what everybody is in.

PYDIST_DUMP names the folder. Each process appends to a file of its own there: the Python stacks of
its threads, and the table of the ranks of its host. On SIGUSR1 the stacks come first, from a
handler in C that needs no lock of Python's, so a process that hangs in C++ shows them too; the
table follows as soon as the main thread runs Python again, which it does many times a second where
it waits in pydist.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any

from pydist.diagnosis import local_ranks, report
from pydist.errors import Error, InvalidUsage
from pydist.job.last_words import in_words

_file: IO[str] | None = None
_pid = 0


def file_of(folder: str | os.PathLike[str], pid: int) -> Path:
    """Where a process writes its dumps."""
    return Path(folder) / f"pid-{pid}.txt"


def arm(folder: str) -> None:
    """From now on this process dumps on SIGUSR1, and when an exception ends it.

    What handles the signal or the exception now is called afterwards.

    Args:
        folder: Where to; it is made.

    Raises:
        InvalidUsage: The folder can't be made or written to.
    """
    global _file, _pid
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        _file = file_of(folder, os.getpid()).open("a")
    except OSError as error:
        raise InvalidUsage(f"PYDIST_DUMP={folder!r} can't be written to: {error}") from error
    _pid = os.getpid()
    with suppress(ValueError):  # Only the main thread may set a handler.
        _dump_on_signal()
    before = sys.excepthook

    def dump_and_go_on(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        _dump(in_words(error), with_stacks=True)
        before(kind, error, trace)

    sys.excepthook = dump_and_go_on


def _dump_on_signal() -> None:
    before = signal.getsignal(signal.SIGUSR1)

    def handle(number: int, frame: FrameType | None) -> None:
        _dump("SIGUSR1", with_stacks=False)
        if callable(before):
            before(number, frame)

    signal.signal(signal.SIGUSR1, handle)
    assert _file is not None
    # This handler runs first, and then calls the one above.
    faulthandler.register(signal.SIGUSR1, file=_file, all_threads=True, chain=True)


def _dump(why: str, *, with_stacks: bool) -> None:
    # A forked child has the parent's file.
    if _file is None or os.getpid() != _pid:
        return
    # Whatever goes wrong here must not hide what it is about.
    with suppress(Exception):
        if with_stacks:
            faulthandler.dump_traceback(_file, all_threads=True)
        _file.write(f"\n{time.strftime('%F %T')} pid {_pid}: {why}\n{_table()}\n")
        _file.flush()


def _table() -> str:
    try:
        ranks: Any = local_ranks.find(_pid)
    except Error as error:
        return str(error)
    return report.as_text(ranks)
