"""Jobs that train and take turns: of several, one runs for some steps while the others wait.

Two process groups for all ranks don't fit into one process, so each arm has processes of its own,
which live throughout. Whoever waits, waits in a read of its pipe and takes no processor time.
"""

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

# A turn that takes longer has ended badly on some rank, or hangs.
_LIMIT_S = 120.0


class Turns:
    """On a rank: what the training calls after each step."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._left = 0
        self._start_s = 0.0

    def begin(self) -> bool:
        """Waits for the first turn."""
        self._left = self._pipe.recv()
        self._start_s = time.perf_counter()
        return self._left > 0

    def after_step(self) -> bool:
        """Waits for the next turn where this one is over.

        Returns:
            Whether to go on.
        """
        self._left -= 1
        if self._left > 0:
            return True
        self._pipe.send(time.perf_counter() - self._start_s)
        return self.begin()


def _run_rank(
    pipe: Connection, environment: dict[str, str], train: Callable[..., None], arguments: Any
) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    train(Turns(pipe), *arguments)


class Job:
    """The ranks of one arm.

    Args:
        ranks: How many.
        train: Called on each with its `Turns` and `arguments`; at the top level of a module.
        arguments: For it.
    """

    def __init__(self, ranks: int, train: Callable[..., None], *arguments: Any) -> None:
        self._ranks = ranks
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        self._processes = []
        self._pipes: list[Connection] = []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "GROUP_RANK": "0",
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._store.port),
                # The store is this process's: ranks only connect, as under torchrun.
                "TORCHELASTIC_RUN_ID": "bench",
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }
            process = context.Process(
                target=_run_rank, args=(theirs, environment, train, arguments), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def turn(self, steps: int) -> float:
        """Lets all ranks make some steps.

        Returns:
            Seconds a step, on the slowest rank.

        Raises:
            RuntimeError: A rank has ended, or takes too long.
        """
        for rank in range(self._ranks):
            self._ask(rank, steps)
        return max(self._answer(rank) for rank in range(self._ranks)) / steps

    def _ask(self, rank: int, steps: int) -> None:
        try:
            self._pipes[rank].send(steps)
        except ConnectionError:
            raise RuntimeError(f"rank {rank} has ended before its turn; see above why.") from None

    def _answer(self, rank: int) -> float:
        pipe = self._pipes[rank]
        try:
            if pipe.poll(_LIMIT_S):
                return float(pipe.recv())
        except (EOFError, ConnectionError):
            raise RuntimeError(f"rank {rank} has ended within a turn; see above why.") from None
        raise RuntimeError(f"rank {rank} has not ended its turn within {_LIMIT_S:g} s.")

    def close(self) -> None:
        """Ends the ranks, in good order where they still listen."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(0)
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


@contextlib.contextmanager
def jobs_of(ranks: int, train: Callable[..., None], arms: list[Any]) -> Iterator[list[Job]]:
    """A job for each arm, whose arguments it is; all end together."""
    jobs: list[Job] = []
    try:
        for arm in arms:
            jobs.append(Job(ranks, train, *arm))
        yield jobs
    finally:
        for job in jobs:
            job.close()
