"""On how many threads a rank steps on the host."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from pydist import _native
from pydist.job.outcome import exchange


def count_of_threads(communicator: _native.Communicator) -> int:
    """A rank's share of the cores that it may use, but for one. All ranks call it.

    That one is for the thread that trains, which launches kernels and waits for other ranks.
    """
    mine = [_native.host_identity(), sorted(os.sched_getaffinity(0))]
    told = exchange(communicator, json.dumps(mine).encode(), "ShardedOptimizer(offload=)")
    places = [(host, frozenset(cores)) for host, cores in map(json.loads, told)]
    return share_of(communicator.rank, places, _native.processor_quota())


def share_of(rank: int, places: Sequence[tuple[str, frozenset[int]]], quota: float | None) -> int:
    """The same of what is known of all ranks.

    Many a launcher binds each rank to cores of its own, which it then shares with nobody.

    Args:
        rank: whose.
        places: of each rank: its host, and the cores that it may use.
        quota: of the host's processors, which its ranks share; None: no limit.
    """
    own_host, own_cores = places[rank]
    here = [cores for host, cores in places if host == own_host]
    cores = len(own_cores) // sum(not own_cores.isdisjoint(each) for each in here)
    if quota is not None:
        cores = min(cores, int(quota) // len(here))
    return max(1, cores - 1)
