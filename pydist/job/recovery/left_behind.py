"""What survivors tell the launcher that serves their store: whom they have left behind.

Such a process is no rank any more, whether it has died or is only frozen. Its exit status says
nothing of the job, and when all others have ended it has nothing left to do.
"""

from collections.abc import Iterable

import torch.distributed as dist

from pydist.job.meeting.store_waits import root_of
from pydist.job.processes import Process, own_process

__all__ = ["is_left_behind", "mark_left_behind"]


def _key(pid: int) -> str:
    return f"pydist left behind/{pid}"


def mark_left_behind(store: dist.Store, processes: Iterable[Process]) -> None:
    """Notes processes of this job in the store that its launcher serves.

    Args:
        store: That store, or one with a prefix in it.
        processes: Those that are no ranks any more.
    """
    root = root_of(store)
    machine = own_process().machine
    for process in processes:
        if process.machine == machine:  # the launcher's, as it serves one host
            root.set(_key(process.pid), "")


def is_left_behind(store: dist.Store, pid: int) -> bool:
    """Whether the others have gone on without a process of this host.

    Args:
        store: The one that this process serves.
        pid: The number of the process.
    """
    return bool(store.check([_key(pid)]))
