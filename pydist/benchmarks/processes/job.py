"""The ranks that a benchmark of training runs on: those that a launcher started, or its own."""

import ctypes
import resource
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

import pydist
from pydist import _native
from pydist.benchmarks.machine import keep_freed_blocks, pin
from pydist.benchmarks.sizes import size_text
from pydist.errors import InvalidUsage
from pydist.job.launchers import Placement, read_placement

R = TypeVar("R")

DEFAULT_RANKS = 2

# What a process takes that has torch loaded and nothing else.
_LEAST_BYTES = 200 << 20

# Of glibc's mallopt.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


@dataclass(frozen=True)
class Job:
    """Where functions run."""

    ranks: int
    # This process's, under a launcher; None where it starts the ranks.
    rank: int | None
    pins: bool

    @property
    def is_launched(self) -> bool:
        """Whether a launcher has started the ranks."""
        return self.rank is not None

    @property
    def leads(self) -> bool:
        """Whether this process prints and writes files."""
        return self.rank in (None, 0)

    def run(self, function: Callable[..., R], *arguments: Any) -> list[R]:
        """Calls a function on every rank, each joined to the job; under a launcher all ranks do so.

        Returns:
            What it returned, in rank order.
        """
        if not self.is_launched:
            return pydist.spawn(_call, (function, arguments, self.pins, False), nprocs=self.ranks)
        results: list[R] = _call(function, arguments, self.pins, True)
        return results


def _call(
    function: Callable[..., Any], arguments: tuple[Any, ...], pins: bool, gathers: bool
) -> Any:
    pydist.init()
    try:
        if pins:
            pin(pydist.local_rank())
        result = function(*arguments)
        if not gathers:
            return result
        results = [None] * pydist.world_size()
        dist.all_gather_object(results, result)
        return results
    finally:
        pydist.shutdown()


def find_job(ranks: int | None, *, pins: bool) -> Job:
    """The launcher's job if there is one, otherwise one of ranks that are started here.

    Sees to it that the ranks keep what they free, in both cases.

    Args:
        ranks: how many are asked for; None: as many as there are, or 2.
        pins: whether each rank computes with one thread, on a core of its own.

    Raises:
        InvalidUsage: the launcher started another number of ranks, or so many can't start.
    """
    placement = launched_placement()
    count = count_ranks(ranks, placement)
    if placement is not None:
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            # Too late for the variables, which malloc reads once.
            libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
            libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
        return Job(count, placement.rank, pins)
    keep_freed_blocks()
    return Job(count, None, pins)


def launched_placement() -> Placement | None:
    """This process's place in a launcher's job; None where no launcher has started it."""
    placement = read_placement()
    return None if placement.launcher == "no launcher" else placement


def count_ranks(asked: int | None, placement: Placement | None, buffer_bytes: int = 0) -> int:
    """How many ranks there are, or will be.

    Args:
        asked: by `-p`; None: as many as a launcher has started, or 2.
        placement: the launcher's.
        buffer_bytes: what each rank will need besides itself.

    Raises:
        InvalidUsage: the launcher has started another number of ranks, or so many can't start.
    """
    if placement is not None and asked not in (None, placement.world_size):
        raise InvalidUsage(
            f"-p {asked} contradicts {placement.launcher}, which started {placement.world_size} "
            "ranks: leave -p out, or start it without a launcher."
        )
    if placement is not None:
        ranks, here = placement.world_size, placement.local_world_size or placement.world_size
    else:
        ranks = here = DEFAULT_RANKS if asked is None else asked
    require_room(here, buffer_bytes)
    return ranks


def require_room(ranks: int, buffer_bytes: int = 0) -> None:
    """Refuses a number of ranks that this machine can't start.

    Args:
        ranks: on this host.
        buffer_bytes: what each needs besides itself.

    Raises:
        InvalidUsage: it is less than 1, or they would not fit into memory.
    """
    if ranks < 1:
        raise InvalidUsage(f"-p {ranks} is not valid; use 1 rank or more.")
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if limit != resource.RLIM_INFINITY and ranks > limit:
        raise InvalidUsage(f"-p {ranks}: this user may start {limit} processes (ulimit -u).")
    needed = ranks * (_LEAST_BYTES + buffer_bytes)
    room, limited_by = _native.memory_room()
    if needed > room:
        what = f"{ranks} ranks"
        if buffer_bytes:
            what += f" with buffers of {size_text(buffer_bytes)}"
        raise InvalidUsage(
            f"-p {ranks}: {what} need {size_text(needed)} at least; {size_text(room)} are free "
            f"({limited_by})."
        )
