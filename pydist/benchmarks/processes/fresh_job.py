"""Starts jobs of fresh processes and says when they were where: for what starting up takes."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import IO

from pydist.benchmarks.machine import cpu_of
from pydist.benchmarks.processes import fresh_rank
from pydist.benchmarks.steps import models
from pydist.errors import Error
from pydist.job.meeting.local_store import serve_local_store

# A job that takes longer hangs.
_LIMIT_S = 300.0


@dataclass(frozen=True)
class FreshJob:
    """When each rank of a job had done what, in seconds on the clock that all processes share."""

    spawned_s: float
    ranks: list[dict[str, float]]

    @property
    def import_s(self) -> tuple[float, float]:
        """Means over the ranks: importing torch, and what the arm imports beyond it."""
        count = len(self.ranks)
        return (
            sum(rank["torch_s"] - rank["began_s"] for rank in self.ranks) / count,
            sum(rank["imported_s"] - rank["torch_s"] for rank in self.ranks) / count,
        )

    @property
    def join_s(self) -> float:
        """The slowest rank's time to join, from when all ranks had imported everything."""
        return max(rank["joined_s"] - rank["told_s"] for rank in self.ranks)

    @property
    def first_step_s(self) -> float:
        """From starting the processes to the end of the last rank's first step."""
        return max(rank["stepped_s"] for rank in self.ranks) - self.spawned_s


def join_job(arm: str, ranks: int, *, pins: bool) -> FreshJob:
    """Starts ranks that join a job: on `pydist`, or torch's `gloo`."""
    return _run(arm, ranks, pins, ["meet"])


def step_job(arm: str, ranks: int, model: str, *, pins: bool) -> FreshJob:
    """Starts ranks that join a job and make a step: pydist.DataParallel, or torch's DDP (`gloo`).

    Args:
        arm: `pydist` or `gloo`.
        ranks: how many.
        model: its name in `models.MODELS`.
        pins: whether each rank has a core of its own.
    """
    return _run(arm, ranks, pins, [str(Path(models.__file__)), model])


def _run(arm: str, ranks: int, pins: bool, what: list[str]) -> FreshJob:
    # Served here, as torchrun's agent does, on a port that the system picks.
    store = serve_local_store()
    processes: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryFile("w+") as complaints:
        spawned_s = time.monotonic()
        try:
            for rank in range(ranks):
                processes.append(_start(arm, rank, ranks, store.port, pins, what, complaints))
            watchdog = threading.Timer(_LIMIT_S, _end, (processes,))
            watchdog.start()
            try:
                if what == ["meet"]:
                    _hear(processes, complaints)
                    _tell(processes)
                stages = [json.loads(line) for line in _hear(processes, complaints)]
                _tell(processes)
                for process in processes:
                    process.wait()
            finally:
                watchdog.cancel()
        finally:
            _end(processes)
    return FreshJob(spawned_s, stages)


def _start(
    arm: str, rank: int, ranks: int, port: int, pins: bool, what: list[str], complaints: IO[str]
) -> "subprocess.Popen[str]":
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    # Not by its path: its folder would come first in sys.path.
    code = "import runpy, sys; sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"
    cpu = cpu_of(rank) if pins else -1
    script = [sys.executable, "-c", code, str(Path(fresh_rank.__file__))]
    return subprocess.Popen(
        [*script, str(os.getpid()), arm, str(cpu), *what],
        env={**os.environ, **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=complaints,
        text=True,
    )


def _hear(processes: "list[subprocess.Popen[str]]", complaints: IO[str]) -> list[str]:
    """A line of each rank; the first one that ends instead is what is reported."""
    lines = [""] * len(processes)
    outputs = {
        process.stdout.fileno(): rank
        for rank, process in enumerate(processes)
        if process.stdout is not None
    }
    while outputs:
        for output in connection.wait(list(outputs)):
            assert isinstance(output, int)
            rank = outputs.pop(output)
            lines[rank] = _line_of(processes[rank])
            if not lines[rank]:
                complaints.seek(0)
                said = complaints.read().strip().splitlines()
                reason = said[-1] if said else f"it took more than {_LIMIT_S:g} s, or was killed"
                raise Error(f"rank {rank} of {len(processes)} did not start up: {reason}")
    return lines


def _line_of(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def _tell(processes: "list[subprocess.Popen[str]]") -> None:
    for process in processes:
        assert process.stdin is not None
        # A process that is gone is noticed later: it does not say what comes next.
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write("\n")
            process.stdin.flush()


def _end(processes: "list[subprocess.Popen[str]]") -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
