"""Runs a function on N processes, each a rank, with a time limit that always holds.

    from launch import Ranks, run_ranks, rank_outcomes, run_command

    def double_rank(offset):            # at the top level of the test module: sent by name
        pydist.init()
        return 2 * pydist.rank() + offset

    def test_doubling():
        assert run_ranks(double_rank, 2, 10) == [10, 12]

- `run_ranks(function, nprocs, *args, timeout=60, env=None)` returns what each rank returned, in
  rank order. Whatever goes wrong on any rank is an AssertionError with every rank's traceback and
  output.
- `rank_outcomes(...)` takes the same arguments and returns an `Outcome` for each rank, for tests
  of failures: value, error (the exception's class name), message, traceback, exit_code, output.
- `with Ranks(nprocs, env=None) as ranks:` keeps the processes for several calls of
  `ranks.run(f, *args)` and `ranks.outcomes(f, *args)`. Each call sees a fresh key-value store,
  unless the call before it left a process group behind, which then goes on. A rank that died stays
  dead: make new Ranks then. `method="spawn"` starts each rank as a fresh interpreter (about 1.5 s
  of processor time each); the default forks ranks off a server that has torch and numpy loaded.
- A call's limit counts from when all ranks are up, and is `timeout` times PATIENCE (time_limit.py).
  When it passes, every rank prints the Python stack of each of its threads (this works
  within a blocking C++ call too), all are killed, and the test fails with `ExpiredError`, which
  shows the stacks. Ranks also end by themselves when the test process dies.
- `run_command(argv, timeout=60, env=None)` does the same for a command and its descendants, and
  returns its `CompletedProcess` (text; standard output and error apart).

Ranks that took too long are replaced at the next call, so only one test fails.

Ranks see RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT (the test
process serves the store, so no port is ever guessed), OMP_NUM_THREADS=1, and no PYDIST_* variables
but those in `env`. In `env`, a value of None removes a variable.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal
from unittest import mock

import psutil  # type: ignore[import-untyped]
import torch
from rank_process import Outcome, no_core_files, serve
from time_limit import PATIENCE
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from pydist.job.meeting.local_store import serve_local_store

if TYPE_CHECKING:
    import pytest

DEFAULT_TIMEOUT_S = 60.0
# How long ranks may take until they can be called: a fresh interpreter imports torch from a disk.
_START_S = 120.0
# A rank whose parent no longer enforces the limit ends by itself this much later.
_GRACE_S = 15.0
# How long ranks get to write their stacks.
_DUMP_S = 2.0

# PYDIST_TEST_OWN_GPUS=1: a rank sees a GPU of its own alone, if there are as many as ranks.
_OWN_GPUS = os.environ.pop("PYDIST_TEST_OWN_GPUS", "0") == "1"

# What the server that ranks are forked off loads before it forks, and they find there. Every
# optimizer's first step imports torch._dynamo, and every first compilation the compilers: seconds,
# in each rank.
PRELOADED = [
    *("torch", "torch.distributed", "torch.distributed.checkpoint", "torch._dynamo"),
    *("torch._dynamo.backends.debugging", "torch._inductor.compile_fx"),
    *("numpy", "pytest", "pydist"),
]

_LAUNCHER_PREFIXES = (
    "PYDIST_",
    "OMPI_",
    "PMI_",
    "PMIX_",
    "SLURM_",
    "TORCHELASTIC_",
    "MPI_LOCAL",
    "MV2_",
    "MPIRUN_",
    "FLUX_",
    "JSM_",
    "PALS_",
    "ALPS_",
    "HOROVOD_",
    "SKYPILOT_",
    "PET_",
    "SM_HOSTS",
    "AWS_BATCH_JOB_",
    "JOB_COMPLETION_",
    "VC_TASK_",
    "LSF_PM_",
    "PADDLE_",
    "MLP_",
)
_LAUNCHER_NAMES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


# For `env`: what a process has that no launcher has started.
NO_LAUNCHER: dict[str, str | None] = dict.fromkeys(
    (
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"),
        *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"),
    )
)

# A TCPStore looks up the name of each process that connects, and answers nobody meanwhile: a lost
# request to the name server would cost 5 s, and two of them 10.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


class ExpiredError(AssertionError):
    """The time limit passed; the message holds every rank's stacks."""


def clean_environment(env: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """This process's environment without launchers' and PYDIST_* variables, then `env` on top."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in _LAUNCHER_NAMES and not name.startswith(_LAUNCHER_PREFIXES)
    }
    clean.setdefault("OMP_NUM_THREADS", "1")
    for name, value in (env or {}).items():
        if value is None:
            clean.pop(name, None)
        else:
            clean[name] = value
    return clean


def set_environment(patch: pytest.MonkeyPatch, env: Mapping[str, str]) -> None:
    """Makes this process's environment what `clean_environment(env)` gives to another one."""
    clean = clean_environment(env)
    for name in os.environ.keys() - clean.keys():
        patch.delenv(name)
    for name, value in clean.items():
        patch.setenv(name, value)


def warm_up() -> None:
    """Starts the server that ranks are forked off, and waits until it has loaded torch."""
    with _one_thread():
        process = _context("forkserver").Process(target=int)
        process.start()
        process.join()


def _one_thread() -> contextlib.AbstractContextManager[object]:
    """What starts in it computes with one thread, unless the environment has a say."""
    number = os.environ.get("OMP_NUM_THREADS", "1")
    return mock.patch.dict(os.environ, {"OMP_NUM_THREADS": number})


def _context(method: str) -> Any:
    context: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(PRELOADED)
    return context


class Ranks:
    """N rank processes that live for several calls; see the module's docstring."""

    def __init__(
        self,
        nprocs: int,
        env: Mapping[str, str | None] | None = None,
        *,
        method: Literal["forkserver", "spawn"] = "forkserver",
    ) -> None:
        self.nprocs = nprocs
        self._env = env
        self._method = method
        self._start()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pydist-ranks-")
        self._store = self._serve_store()
        self._store_is_used = False
        self._seen = [0] * self.nprocs
        self._connections: list[Connection] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []
        context = _context(self._method)
        try:
            with _one_thread():
                for rank in range(self.nprocs):
                    ours, theirs = context.Pipe()
                    process = context.Process(
                        target=serve,
                        args=(
                            rank,
                            theirs,
                            self._rank_environment(rank, self._env),
                            self._log(rank),
                            sys.path,
                            self._namespace(rank),
                        ),
                        name=f"rank {rank}",
                        daemon=True,
                    )
                    process.start()
                    theirs.close()
                    self._connections.append(ours)
                    self._processes.append(process)
            deadline = time.monotonic() + _START_S * PATIENCE
            for connection in self._connections:
                if not connection.poll(max(0.0, deadline - time.monotonic())):
                    raise ExpiredError(self._expire("starting", _START_S * PATIENCE, {}))
                # A rank that has ended already is for `outcomes` to tell.
                with contextlib.suppress(EOFError, ConnectionError):
                    connection.recv()
        except BaseException:
            self.close()
            raise

    def _rank_environment(self, rank: int, env: Mapping[str, str | None] | None) -> dict[str, str]:
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.nprocs),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(self.nprocs),
            "MASTER_ADDR": "127.0.0.1",
            # The store is served here, not by rank 0: what torchrun says of its own store.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        if _OWN_GPUS and torch.cuda.device_count() >= self.nprocs:
            listed = os.environ.get("CUDA_VISIBLE_DEVICES")
            own = listed.split(",")[rank] if listed else str(rank)
            variables.update(CUDA_VISIBLE_DEVICES=own, HAS_OWN_GPU="1")
        return clean_environment({**variables, **(env or {})})

    def _namespace(self, rank: int) -> Path | None:
        """The network namespace that a rank lives in; None for this process's own."""
        return None

    def _serve_store(self) -> TCPStore:
        store = serve_local_store()
        store.set_timeout(timedelta(seconds=DEFAULT_TIMEOUT_S * PATIENCE))
        return store

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name) / f"rank-{rank}.log"

    @property
    def pids(self) -> list[int]:
        """The process id of each rank."""
        return [process.pid or -1 for process in self._processes]

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float = DEFAULT_TIMEOUT_S
    ) -> list[Any]:
        """Calls `function(*args)` on every rank; returns the values in rank order."""
        outcomes = self.outcomes(function, *args, timeout=timeout)
        if not all(outcome.ok for outcome in outcomes):
            failed = [outcome.rank for outcome in outcomes if not outcome.ok]
            text = "\n".join(outcome.describe() for outcome in outcomes)
            raise AssertionError(
                f"{function.__name__} failed on ranks {failed} of {self.nprocs}\n{text}"
            )
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self, function: Callable[..., Any], *args: Any, timeout: float = DEFAULT_TIMEOUT_S
    ) -> list[Outcome]:
        """Calls `function(*args)` on every rank; returns how it ended on each."""
        if not self._connections:  # They were ended, since an earlier call took too long.
            self._start()
        timeout *= PATIENCE
        deadline = time.monotonic() + timeout
        if not self._store_is_used:
            self._store = self._serve_store()
        request = pickle.dumps((function.__module__, function.__qualname__, args))
        outcomes: dict[int, Outcome] = {}
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send((self._store.port, timeout + _GRACE_S, request))
        while len(outcomes) < self.nprocs:
            pending = {self._connections[r]: r for r in range(self.nprocs) if r not in outcomes}
            ready = multiprocessing.connection.wait(
                list(pending), timeout=max(0.0, deadline - time.monotonic())
            )
            if not ready:
                raise ExpiredError(self._expire(function.__name__, timeout, outcomes))
            for rank in [pending[connection] for connection in pending if connection in ready]:
                outcomes[rank] = self._receive(rank, self._connections[rank])
        self._store_is_used = any(outcome.has_group for outcome in outcomes.values())
        return [outcomes[rank] for rank in range(self.nprocs)]

    def _receive(self, rank: int, connection: Connection) -> Outcome:
        try:
            outcome = pickle.loads(connection.recv_bytes())
            assert isinstance(outcome, Outcome)
        except (EOFError, ConnectionError):
            process = self._processes[rank]
            process.join(5)
            outcome = Outcome(rank, exit_code=process.exitcode if process.exitcode else 0)
        outcome.rank = rank
        outcome.output = self._new_output(rank)
        return outcome

    def _new_output(self, rank: int) -> str:
        log = self._log(rank)
        if not log.exists():
            return ""
        with log.open("rb") as file:
            file.seek(self._seen[rank])
            text = file.read()
        self._seen[rank] += len(text)
        return text.decode(errors="replace")

    def _expire(self, what: str, timeout: float, outcomes: Mapping[int, Outcome]) -> str:
        late = [rank for rank in range(self.nprocs) if rank not in outcomes]
        for rank in late:
            self._signal(rank, signal.SIGCONT)
            self._signal(rank, signal.SIGUSR1)
        time.sleep(_DUMP_S)
        self.close(keep_logs=True)
        parts = [f"{what}: ranks {late} of {self.nprocs} took more than {timeout} s."]
        parts += [outcomes[rank].describe() for rank in sorted(outcomes)]
        parts += [f"--- rank {rank} hung here:\n{self._new_output(rank)}" for rank in late]
        self._folder.cleanup()
        self._connections, self._processes = [], []
        return "\n".join(parts)

    def _signal(self, rank: int, number: int) -> None:
        pid = self._processes[rank].pid
        if pid is not None and self._processes[rank].is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def close(self, *, keep_logs: bool = False) -> None:
        """Ends every rank: kindly at first, so that exit handlers run, then by force."""
        for connection in self._connections:
            connection.close()
        deadline = time.monotonic() + (0 if keep_logs else 5)
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join(5)
        if not keep_logs:
            self._folder.cleanup()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def run_ranks(
    function: Callable[..., Any],
    nprocs: int,
    *args: Any,
    timeout: float = DEFAULT_TIMEOUT_S,
    env: Mapping[str, str | None] | None = None,
    method: Literal["forkserver", "spawn"] = "forkserver",
) -> list[Any]:
    """Calls `function(*args)` on `nprocs` fresh ranks; returns the values in rank order."""
    with Ranks(nprocs, env, method=method) as ranks:
        return ranks.run(function, *args, timeout=timeout)


def rank_outcomes(
    function: Callable[..., Any],
    nprocs: int,
    *args: Any,
    timeout: float = DEFAULT_TIMEOUT_S,
    env: Mapping[str, str | None] | None = None,
    method: Literal["forkserver", "spawn"] = "forkserver",
) -> list[Outcome]:
    """Calls `function(*args)` on `nprocs` fresh ranks; returns how it ended on each."""
    with Ranks(nprocs, env, method=method) as ranks:
        return ranks.outcomes(function, *args, timeout=timeout)


def run_command(
    argv: Sequence[str],
    *,
    timeout: float = DEFAULT_TIMEOUT_S,
    env: Mapping[str, str | None] | None = None,
    cwd: str | Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs a command; on expiry shows its descendants' Python stacks, kills all, fails."""
    variables = {"PYTHONFAULTHANDLER": "1", **(env or {})}
    timeout *= PATIENCE
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            list(argv),
            env=clean_environment(variables),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
            preexec_fn=no_core_files,
        )
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            end_family(process)
            raise ExpiredError(
                f"{' '.join(argv)} took more than {timeout} s\n{_text(out)}\n{_text(err)}"
            ) from None
        except BaseException:
            end_family(process)
            raise
        return subprocess.CompletedProcess(argv, process.returncode, _text(out), _text(err))


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on.

    It lies below those that the system gives to outgoing connections, so none of other processes
    takes it before a test serves something there.
    """
    range_of_system = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
    end = min(int(range_of_system.split()[0]), 32768)
    while True:
        port = random.randrange(max(1024, end // 2), end)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def _text(file: Any) -> str:
    file.seek(0)
    text: bytes = file.read()
    return text.decode(errors="replace")


def end_family(process: subprocess.Popen[bytes]) -> None:
    """Ends a command and its descendants, once they have written their stacks."""
    # SIGABRT makes faulthandler print the stacks. Children first: a launcher that sees its workers
    # abort is killed before it can tidy up, which is what SIGKILL is for then.
    try:
        parent = psutil.Process(process.pid)
        family = [*parent.children(recursive=True), parent]
    except psutil.NoSuchProcess:
        return
    for number in (signal.SIGCONT, signal.SIGABRT):
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.send_signal(number)
    # psutil would take the exit status of a child away.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_DUMP_S)
    psutil.wait_procs(family[:-1], timeout=_DUMP_S)
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait(10)
