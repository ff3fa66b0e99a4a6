"""Starts a program on ranks that live on several hosts, as a launcher on each of them would.

    from jobs import run_job, start_job

    for rank in run_job(hosts, [2, 1], [sys.executable, "train.py"]):
        assert rank.exit_code == 0, rank.describe()

    with start_job(hosts, [1, 1], argv) as job:      # while something happens to it
        hosts[1].cut()
        outcomes = job.outcomes(timeout=60)

Rank 0 serves the store: MASTER_ADDR is the first host's address, MASTER_PORT a free port there.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from launch import DEFAULT_TIMEOUT_S, ExpiredError, clean_environment, end_family
from namespaces import Hosts
from rank_places import Place, place_ranks
from rank_process import no_core_files
from time_limit import PATIENCE

Variables = Mapping[str, str | None]


@dataclass(frozen=True)
class RankOutcome:
    """How one rank's process has ended."""

    rank: int
    # The number of its host.
    host: int
    # Negative for a signal.
    exit_code: int
    # What it has printed, on standard output and error.
    output: str

    def describe(self) -> str:
        """A paragraph for people."""
        head = f"--- rank {self.rank} on host {self.host} ended with status {self.exit_code}"
        return f"{head}\n{self.output.strip()}".rstrip()


class Job:
    """A program that runs on several hosts; made by `start_job`. Its end kills what still runs."""

    def __init__(
        self, places: Sequence[Place], argv: Sequence[str], envs: Sequence[Variables]
    ) -> None:
        self._places = places
        self._folder = tempfile.TemporaryDirectory(prefix="pydist-job-")
        self.processes: list[subprocess.Popen[bytes]] = []
        """Each rank's, in rank order."""
        try:
            for place, env in zip(places, envs, strict=True):
                with self._log(place.rank).open("ab") as log:
                    self.processes.append(
                        subprocess.Popen(
                            place.host.command(argv),
                            env=clean_environment({**place.variables, **env}),
                            stdin=subprocess.DEVNULL,
                            stdout=log,
                            stderr=log,
                            start_new_session=True,
                            preexec_fn=no_core_files,
                        )
                    )
        except BaseException:
            self.close()
            raise

    def outcomes(self, timeout: float = DEFAULT_TIMEOUT_S) -> list[RankOutcome]:
        """Waits for all ranks.

        Args:
            timeout: seconds from now, times PATIENCE.

        Returns:
            How each has ended, in rank order.

        Raises:
            ExpiredError: a rank still ran then; all stacks are in the message, and all are killed.
        """
        timeout *= PATIENCE
        deadline = time.monotonic() + timeout
        late = []
        for rank, process in enumerate(self.processes):
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                late.append(rank)
        if late:
            self._end()
        found = [
            RankOutcome(place.rank, place.host.index, process.returncode, self.output(place.rank))
            for place, process in zip(self._places, self.processes, strict=True)
        ]
        if late:
            said = "\n".join(outcome.describe() for outcome in found)
            raise ExpiredError(
                f"ranks {late} of {len(found)} took more than {timeout} s, and were killed\n{said}"
            )
        return found

    def output(self, rank: int) -> str:
        """What a rank has printed until now."""
        return self._log(rank).read_text(errors="replace")

    def close(self) -> None:
        """Kills what still runs."""
        self._end()
        self._folder.cleanup()

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name) / f"rank-{rank}.log"

    def _end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                end_family(process)

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def start_job(
    hosts: Hosts,
    ranks_per_host: Sequence[int],
    argv: Sequence[str],
    env: Variables | Sequence[Variables] | None = None,
) -> Job:
    """Starts a command on all ranks.

    Args:
        hosts: where they live.
        ranks_per_host: the number of ranks on each host; rank 0 is on the first.
        argv: the command of every rank.
        env: set in every rank, or a mapping for each; None removes a variable.

    Returns:
        The job, for a `with`: its end kills what still runs.
    """
    port = str(hosts[0].free_port())
    places = place_ranks(hosts, ranks_per_host)
    if env is None or isinstance(env, Mapping):
        env = [env or {}] * len(places)
    variables = {"MASTER_PORT": port, "PYTHONFAULTHANDLER": "1"}
    return Job(places, argv, [{**variables, **each} for each in env])


def run_job(
    hosts: Hosts,
    ranks_per_host: Sequence[int],
    argv: Sequence[str],
    env: Variables | Sequence[Variables] | None = None,
    *,
    timeout: float = DEFAULT_TIMEOUT_S,
) -> list[RankOutcome]:
    """Starts a command on all ranks and waits: `start_job`, then `Job.outcomes`."""
    with start_job(hosts, ranks_per_host, argv, env) as job:
        return job.outcomes(timeout)
