"""A rank's side of launch.py: a process that calls what it is told to, and says how that ended."""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from network_namespace import enter


@dataclass
class Outcome:
    """How one call ended on one rank."""

    rank: int
    value: Any = None
    error: str | None = None
    message: str = ""
    traceback: str = ""
    # Of a process that is gone: its exit status, negative for a signal. None while it lives.
    exit_code: int | None = None
    # What the rank printed on standard output and error during the call.
    output: str = ""
    # Whether the rank is left with a default process group of torch.distributed.
    has_group: bool = False

    @property
    def ok(self) -> bool:
        return self.error is None and self.exit_code is None

    def describe(self) -> str:
        """A paragraph for people."""
        if self.exit_code is not None:
            head = f"--- rank {self.rank}: process ended with status {self.exit_code}"
        elif self.error is not None:
            head = f"--- rank {self.rank}: {self.traceback.strip()}"
        else:
            head = f"--- rank {self.rank}: returned {self.value!r:.200}"
        return f"{head}\n{self.output.strip()}".rstrip()


def no_core_files() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


@dataclass
class _Stacks:
    """Where a rank's stacks go: its own log, by a file object that stays open."""

    file: Any = field(default=None)


_stacks = _Stacks()


def serve(
    rank: int,
    connection: Connection,
    env: dict[str, str],
    log: Path,
    path: list[str],
    namespace: Path | None,
) -> None:
    """The life of a rank: calls what it is told to until the pipe closes."""
    no_core_files()
    if namespace is not None:
        enter(namespace)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:] = path
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    # A process of its own group: Ctrl-C reaches the test alone, which then ends its ranks.
    os.setpgid(0, 0)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    _stacks.file = os.fdopen(descriptor, "w")
    faulthandler.enable(_stacks.file, all_threads=True)
    faulthandler.register(signal.SIGUSR1, _stacks.file, all_threads=True)
    # multiprocessing hands down how this process was started, and workers of a loader would each
    # load torch anew.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    connection.send("ready")
    while True:
        try:
            port, limit_s, request = connection.recv()
        except (EOFError, OSError):
            return
        faulthandler.dump_traceback_later(limit_s, exit=True, file=_stacks.file)
        if "MASTER_ADDR" in env:
            os.environ["MASTER_PORT"] = str(port)
        outcome = _call(rank, request)
        outcome.has_group = torch.distributed.is_initialized()
        sys.stdout.flush()
        sys.stderr.flush()
        faulthandler.cancel_dump_traceback_later()
        try:
            connection.send_bytes(pickle.dumps(outcome))
        except BrokenPipeError:
            return


def _call(rank: int, request: bytes) -> Outcome:
    try:
        module_name, qualname, args = pickle.loads(request)
        function: Any = importlib.import_module(module_name)
        for name in qualname.split("."):
            function = getattr(function, name)
        value = function(*args)
        pickle.dumps(value)
    except BaseException as error:
        return Outcome(
            rank,
            error=type(error).__name__,
            message=str(error),
            traceback=traceback.format_exc(),
        )
    return Outcome(rank, value=value)
