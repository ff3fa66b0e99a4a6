"""The number of a meeting, which keeps it apart from others of the same ranks in the same store.

If every rank counted by itself, one that fails alone and tries again would count on, and wait under
a name that nobody else uses. So rank 0 counts, in the store. The others take the number that was
opened last, unless they have been to that meeting: then rank 0 has not begun the next one yet.
"""

import time
from datetime import timedelta

import torch.distributed as dist

from pydist.errors import TransportError

__all__ = ["next_number"]

_LONGEST_PAUSE_S = 0.01


def next_number(store: dist.Store, rank: int, timeout: timedelta) -> int | None:
    """The number of the next meeting; None where rank 0 has not opened one in time.

    Every rank calls it.

    Args:
        store: for these meetings alone.
        rank: this process's.
        timeout: how long to wait for rank 0.

    Raises:
        TransportError: the store is gone.
    """
    deadline_s = time.monotonic() + timeout.total_seconds()
    pause_s = 0.0002
    try:
        if rank == 0:
            return int(store.add("opened", 1))
        been = int(store.add(f"been/{rank}", 0))
        while (opened := int(store.add("opened", 0))) <= been:
            if time.monotonic() > deadline_s:
                return None
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        store.add(f"been/{rank}", opened - been)
    except RuntimeError as error:
        raise TransportError(
            f"the store of the job is gone; is the rank that hosts it still alive? ({error})"
        ) from error
    return opened
