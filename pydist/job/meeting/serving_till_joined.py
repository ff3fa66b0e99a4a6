"""The process that serves the job's store serves it until all ranks have joined.

It may leave right after: its program may be shorter than those of the others.
"""

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from pydist.errors import PeerLost, TransportError
from pydist.job.meeting.backend_agreement import require_alive
from pydist.job.meeting.store_waits import wait_for_keys
from pydist.job.processes import Process

__all__ = ["note_joined", "serve_till_joined"]


def _key(rank: int) -> str:
    return f"joined/{rank}"


def note_joined(store: dist.Store, rank: int) -> None:
    """Tells the process that serves the store that a rank needs it no more for joining."""
    with suppress(RuntimeError):
        store.set(_key(rank), "")


def serve_till_joined(store: dist.Store, processes: Sequence[Process], limit: timedelta) -> None:
    """Waits until all ranks have joined, or those that have not can't any more.

    Args:
        store: where the ranks meet.
        processes: of the ranks, in rank order.
        limit: how long to wait.
    """
    keys = [_key(rank) for rank in range(len(processes))]

    def require_joiners() -> None:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        if all(processes[rank].is_known_dead for rank in missing):
            require_alive(processes, missing)

    with suppress(PeerLost, TransportError):
        wait_for_keys(store, keys, limit, require_joiners)
