"""What `pydist run -H` starts on each host: torchrun, told what to do on standard input.

host_protocol.py says what that is. When the launcher falls silent or its connection ends, for
whatever reason, the ranks get SIGTERM, and what still runs some seconds later is killed.
"""

import argparse
import io
import os
import select
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from types import FrameType
from typing import NoReturn, TextIO

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import SignalException

from pydist import __version__
from pydist.cli.host_protocol import RANK_PREFIX, Greeting, Task
from pydist.cli.run import run_here

__all__ = ["main"]

# The launcher sends something far more often. A launcher that is stopped sends nothing.
_SILENCE_S = 30.0
# How long the ranks get to end by SIGTERM, once the launcher is lost.
_GRACE_S = 5.0
# torch puts it in front of each line of a rank's output.
_PREFIX = "[${rank}]: "


def main() -> int:
    """Runs what the launcher asks for on standard input.

    Returns:
        0 when all ranks of this host ended well, 1 when one failed, 2 for bad usage; for a signal,
        128 and its number.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, _end_early)
    words = _lines_of_launcher()
    greeting = Greeting(
        __version__,
        str(torch.__version__),
        _free_port(),
        os.environ.get("SSH_CONNECTION", ""),
    )
    print(greeting.written(), flush=True)
    line = next(words, None)
    if line is None:
        return 1
    task = Task.read(line)
    threading.Thread(target=_heed, args=(words,), name="pydist-launcher", daemon=True).start()
    os.environ.update(task.environment)
    try:
        os.chdir(task.folder)
    except OSError as error:
        print(
            f"pydist run: the folder that the job was started in is not on this host: {error}",
            file=sys.stderr,
        )
        return 2
    sys.path.insert(0, task.folder)
    return _run(argparse.Namespace(**task.options))


def _run(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="pydist-run-") as folder:
        if options.tee == options.redirects == "0":
            options.tee = "3"
            os.environ.setdefault("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", _PREFIX)
        if options.log_dir is None:
            options.log_dir = folder
        streams = _WholeLines(sys.stdout), _WholeLines(sys.stderr)
        sys.stdout, sys.stderr = streams
        try:
            return run_here(options)
        except SignalException as end:
            return 128 + int(end.sigval)
        except dist.DistError as error:
            print(
                f"pydist run: the hosts don't meet at {options.master_addr}:{options.master_port}, "
                "an address of the first host: if the others reach it by another one, name that "
                f"by --master-addr. ({str(error).splitlines()[0]})",
                file=sys.stderr,
            )
            return 1
        finally:
            for stream in streams:
                stream.finish()


class _WholeLines(io.TextIOBase):
    """A stream for torch's `tee`, which may hand it the beginning of a line and its end apart."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._begun: dict[str, str] = {}
        self._lock = threading.Lock()  # each rank's log is read by a thread of its own

    def write(self, text: str) -> int:
        prefixed = RANK_PREFIX.match(text)
        prefix = prefixed[0] if prefixed else ""
        with self._lock:
            line = self._begun.pop(prefix, "") + text[len(prefix) :]
            if not line.endswith("\n"):
                self._begun[prefix] = line
            else:
                self._stream.write(prefix + line)
                self._stream.flush()
        return len(text)

    def fileno(self) -> int:
        """The stream's, for torch's fault handler."""
        return self._stream.fileno()

    def finish(self) -> None:
        """Writes what has no end yet."""
        with self._lock:
            for prefix, line in self._begun.items():
                self._stream.write(f"{prefix}{line}\n")
            self._begun.clear()
            self._stream.flush()


def _lines_of_launcher() -> Iterator[str]:
    """Yields what the launcher says; ends when it is gone or has been silent for too long."""
    told = os.dup(0)
    # The ranks inherit a standard input that has ended.
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)

    def lines() -> Iterator[str]:
        begun = b""
        while select.select([told], [], [], _SILENCE_S)[0]:
            if not (more := os.read(told, 65536)):
                return
            *whole, begun = (begun + more).split(b"\n")
            yield from (line.decode() for line in whole if line)

    return lines()


def _heed(words: Iterator[str]) -> NoReturn:
    with suppress(OSError):
        for word in words:
            _command, _, name = word.partition(" ")
            os.kill(os.getpid(), signal.Signals[name])
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_S)
    # The kernel ends the ranks with this process (end_with_launcher.py).
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def _end_early(number: int, _frame: FrameType | None) -> NoReturn:
    """Until torchrun has handlers of its own."""
    sys.exit(128 + number)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
