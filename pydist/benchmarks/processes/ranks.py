"""Groups of processes that carry a benchmark, each process one rank: started here, or found.

The conductor asks a group to do a command, and gets the answers in rank order. A rank that dies or
does not answer ends in an exception that names it; nothing waits without limit.
"""

import os
import socket
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

import pydist
from pydist.benchmarks.processes.arms import Arm
from pydist.benchmarks.processes.gloo_interface import torchs_gloo_connecting
from pydist.benchmarks.processes.peers import Installation
from pydist.benchmarks.processes.rank_commands import Failed, Stop, obey
from pydist.benchmarks.processes.rank_process import make_arms, prepare
from pydist.errors import Error, InvalidUsage, PeerLost, Timeout
from pydist.job.meeting.local_store import serve_local_store
from pydist.job.spawn import job_variables
from pydist.topology.placement import placement_of_job

# The arms that show what memory and the link between hosts allow.
ROOFLINE = "roofline"
LINK = "link"

_RANK_PROCESS = "pydist.benchmarks.processes.rank_process"

_START_S = 120.0
# For one command: a few calls of the slowest arm on the largest buffers, and more.
_ANSWER_S = 300.0
_GRACE_S = 2.0


class Ranks(ABC):
    """The ranks that carry some arms."""

    arms: list[str]

    @abstractmethod
    def ask(self, command: Any) -> list[Any]:
        """Has every rank do the command; the answers, in rank order.

        Raises:
            PeerLost: a rank died.
            Timeout: a rank did not answer.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends the ranks, whatever they are doing."""


class StartedRanks(Ranks):
    """Processes that were started for the benchmark."""

    def __init__(
        self,
        what: str,
        arms: list[str],
        size: int,
        commands: Sequence[tuple[list[str], dict[str, str]]],
        *,
        serving: object = None,
        cpus: Iterable[int] | None = None,
    ) -> None:
        """Starts them and waits until they are ready.

        Args:
            what: a name for messages.
            arms: what they carry.
            size: how many ranks there will be.
            commands: what to start, with its environment: a process for each rank, or a launcher.
                They get the address to connect to as their last argument.
            serving: kept as long as the ranks run.
            cpus: where they may run; None for where this process may.

        Raises:
            InvalidUsage: a rank could not start; the message says why.
        """
        self.arms = arms
        self._what = what
        self._serving = serving
        self._folder = tempfile.TemporaryDirectory(prefix="pydist-bench-")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        address = str(Path(self._folder.name) / "conductor")
        own_cpus = os.sched_getaffinity(0)
        try:
            if cpus is not None:
                os.sched_setaffinity(0, cpus)  # they inherit it
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(address)
                listener.listen(size)
                for index, (command, variables) in enumerate(commands):
                    with (Path(self._folder.name) / f"stderr-{index}").open("wb") as stderr:
                        process = subprocess.Popen(
                            [*command, address],
                            env=variables,
                            stdin=subprocess.DEVNULL,
                            stdout=stderr,
                            stderr=stderr,
                            # Ctrl-C in the terminal is for the conductor alone.
                            start_new_session=True,
                        )
                    self._processes.append(process)
                self._accept(listener, size)
        except BaseException:
            self.close()
            raise
        finally:
            os.sched_setaffinity(0, own_cpus)

    def _accept(self, listener: socket.socket, size: int) -> None:
        limit_s = _START_S + size  # which share the cores
        deadline_s = time.monotonic() + limit_s
        listener.settimeout(0.1)
        arrived: dict[int, Connection] = {}
        unready: list[Connection] = []
        while len(arrived) < size:
            with suppress(TimeoutError):
                unready.append(Connection(listener.accept()[0].detach()))
            for connection in [one for one in unready if one.poll()]:
                unready.remove(connection)
                try:
                    rank, ranks, failure = connection.recv()
                except EOFError:
                    raise InvalidUsage(
                        f"{self._what}: a rank died at its start{self._said()}"
                    ) from None
                if failure is not None:
                    raise InvalidUsage(f"{self._what} could not start: {failure.message}")
                if ranks != size:
                    raise InvalidUsage(
                        f"{self._what}: a rank finds itself in a job of {ranks} instead of {size}: "
                        "the launcher and the library do not belong together."
                    )
                arrived[rank] = connection
            for process in self._processes:
                if process.poll() not in (None, 0):
                    raise InvalidUsage(
                        f"{self._what} could not start: {_how(process)}{self._said()}"
                    )
            if time.monotonic() > deadline_s:
                missing = sorted(set(range(size)) - set(arrived))
                raise InvalidUsage(
                    f"{self._what}: ranks {missing} of {size} were not ready after "
                    f"{limit_s:.0f} s{self._said()}"
                )
        self._connections = [arrived[rank] for rank in range(size)]

    def _said(self) -> str:
        """The last line that a process has left on standard error."""
        for file in sorted(Path(self._folder.name).glob("stderr-*")):
            lines = file.read_text(errors="replace").strip().splitlines()
            if lines:
                return f": {lines[-1].strip()}"
        return ""

    def ask(self, command: Any) -> list[Any]:
        for rank, connection in enumerate(self._connections):
            try:
                connection.send(command)
            except OSError:
                raise self._lost(rank) from None
        limit_s = _ANSWER_S + getattr(command, "calls", 0)  # a second each, at most
        deadline_s = time.monotonic() + limit_s
        answers: dict[int, Any] = {}
        while len(answers) < len(self._connections):
            waiting = [c for r, c in enumerate(self._connections) if r not in answers]
            ready = wait(waiting, timeout=max(0.0, deadline_s - time.monotonic()))
            if not ready:
                late = [r for r in range(len(self._connections)) if r not in answers]
                for rank, answer in answers.items():
                    if isinstance(answer, Failed):
                        raise Error(f"{self._what}: rank {rank}: {answer.message}")
                raise Timeout(
                    f"{self._what}: ranks {late} did not answer for {limit_s:.0f} s in {command}"
                )
            for rank, connection in enumerate(self._connections):
                if connection not in ready:
                    continue
                try:
                    answers[rank] = connection.recv()
                except (EOFError, OSError):
                    raise self._lost(rank) from None
                if isinstance(answers[rank], Failed):
                    # The others wait for this one, unless they have failed just as well.
                    deadline_s = min(deadline_s, time.monotonic() + _GRACE_S)
        return [answers[rank] for rank in range(len(self._connections))]

    def _lost(self, rank: int) -> PeerLost:
        time.sleep(0.2)  # until it has been reaped
        how = [_how(process) for process in self._processes if process.poll() not in (None, 0)]
        return PeerLost(
            f"{self._what}: rank {rank} died ({', '.join(how) or 'it ended'}){self._said()}"
        )

    def close(self) -> None:
        for connection in self._connections:
            with suppress(OSError):
                connection.send(Stop())
            connection.close()
        deadline_s = time.monotonic() + _GRACE_S
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, 9)
                process.wait()
        self._folder.cleanup()


def _how(process: "subprocess.Popen[bytes]") -> str:
    code = process.returncode
    return f"killed by signal {-code}" if code < 0 else f"exit status {code}"


def start_torch_ranks(
    arms: list[str], size: int, *, backend: str | None, pin: bool
) -> StartedRanks:
    """Ranks of one job of pydist on this host."""
    command = [
        sys.executable,
        "-m",
        "pydist.benchmarks.processes.rank_process",
        "--arms",
        ",".join(arms),
    ]
    if not pin:
        command.append("--no-pin")
    return start_job("the ranks of pydist", arms, size, command, backend=backend)


def start_job(
    what: str, arms: list[str], size: int, command: list[str], *, backend: str | None = None
) -> StartedRanks:
    """Ranks of one job on this host, each a process that a command starts.

    Args:
        what: a name for messages.
        arms: what they carry.
        size: how many.
        command: its last argument will be the address to connect to.
        backend: of pydist; by default what the environment says.
    """
    # Served here and on a port that the system picks: nothing to race for.
    store = serve_local_store()
    variables = {**os.environ, **job_variables(size, store.port, backend)}
    commands = [
        (command, {**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(size)
    ]
    return StartedRanks(what, arms, size, commands, serving=store)


def start_mpi_ranks(
    installation: Installation, size: int, *, pin: bool, is_launched: bool
) -> StartedRanks:
    """Ranks of an MPI on this host.

    Args:
        installation: the MPI.
        size: how many.
        pin: whether each has a core of its own.
        is_launched: whether a launcher has started this process, which may have bound it to one
            core; the ranks are not to share that.
    """
    arguments = ["-m", _RANK_PROCESS]
    arguments += ["--mpi", installation.name, str(installation.site_packages)]
    if not pin:
        arguments.append("--no-pin")
    command = [*installation.command(size), sys.executable, *arguments]
    variables = {**_outside_of_jobs(), **installation.variables, "OMP_NUM_THREADS": "1"}
    return StartedRanks(
        installation.name,
        [installation.name],
        size,
        [(command, variables)],
        cpus=range(os.cpu_count() or 1) if is_launched else None,
    )


# What launchers tell their processes, by the beginnings of names.
_OF_LAUNCHERS = ("OMPI_", "PMI_", "PMIX_", "PRTE_", "HYDRA_", "MPI_LOCAL", "SLURM_", "I_MPI_")
_OF_TORCHRUN = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def _outside_of_jobs() -> dict[str, str]:
    """This process's environment, less what would make an mpiexec join another launcher's job."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_OF_LAUNCHERS) and name not in _OF_TORCHRUN
    }


class FoundRanks(Ranks):
    """The ranks that a launcher has started: this process is one of them.

    Rank 0 asks; the others `serve`. Every rank makes one, at the same time. Where they are on
    several hosts, there is one arm more: the link between these.
    """

    def __init__(self, arms: list[str], *, backend: str | None, pin: bool) -> None:
        pydist.init(backend)
        self.placement = placement_of_job()
        self.arms = [*arms, LINK] if self.placement.hosts > 1 else arms
        self.rank, self.size = pydist.rank(), pydist.world_size()
        with torchs_gloo_connecting():
            # Blocks without using the processor, as long as it takes; answers take no day. The one
            # with the shorter limit comes first: where the ranks can't connect, that shows then.
            self._replies = dist.new_group(backend="gloo", timeout=timedelta(seconds=_ANSWER_S))
            self._control = dist.new_group(backend="gloo", timeout=timedelta(days=1))
            self._arms: dict[str, Arm] = make_arms(self.arms)
        prepare(pydist.local_rank(), pin=pin)

    def _share(self, command: Any) -> Any:
        box = [command]
        dist.broadcast_object_list(box, src=0, group=self._control)
        return box[0]

    def ask(self, command: Any) -> list[Any]:
        answers: list[Any] = [None] * self.size
        try:
            answer = obey(self._share(command), self._arms)
            dist.gather_object(answer, answers, dst=0, group=self._replies)
        except RuntimeError as error:  # torch's, from gloo
            raise PeerLost(f"a rank of the launcher's has gone: {error}") from error
        return answers

    def serve(self) -> None:
        """Does what rank 0 asks until it closes."""
        while not isinstance(command := self._share(None), Stop):
            dist.gather_object(obey(command, self._arms), None, dst=0, group=self._replies)

    def close(self) -> None:
        if self.rank == 0:
            with suppress(RuntimeError):
                self._share(Stop())
        pydist.shutdown()
