"""The number of a meeting, which keeps it apart from others of the same ranks in the same store.

If every rank counted by itself, one that fails alone and tries again would count on, and wait under
a name that nobody else uses. So rank 0 counts, in the store. The others take the number that was
opened last, unless they have been to that meeting: then rank 0 has not begun the next one yet.
"""

from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from pydist.errors import Timeout
from pydist.job.meeting.store_waits import blaming_the_store, wait_until
from pydist.job.processes import own_process

__all__ = ["go_on_from", "next_number", "require_only_process"]


def next_number(
    store: dist.Store,
    rank: int,
    timeout: timedelta,
    check_host: Callable[[], None] | None = None,
) -> int | None:
    """The number of the next meeting; None where rank 0 has not opened one in time.

    Every rank calls it.

    Args:
        store: for these meetings alone.
        rank: this process's.
        timeout: how long to wait for rank 0.
        check_host: called now and then while rank 0 is waited for, to raise where that is in vain.

    Raises:
        TransportError: the store is gone.
        Error: whatever `check_host` raises.
    """
    with blaming_the_store():
        if rank == 0:
            return int(store.add("opened", 1))
        been = opened = int(store.add(f"been/{rank}", 0))

        def has_opened() -> bool:
            nonlocal opened
            opened = int(store.add("opened", 0))
            return opened > been

        if not wait_until(has_opened, timeout, check_host):
            return None
        store.add(f"been/{rank}", opened - been)
        _note_who_came(store, rank)
        return opened


def _note_who_came(store: dist.Store, rank: int) -> None:
    own = own_process()
    store.set(f"came/{rank}", f"{own.key}\n{own}")


def require_only_process(store: dist.Store, rank: int) -> None:
    """For one who has waited for rank 0 in vain: it may be the second process with its rank.

    Raises:
        Timeout: the rank's last meeting was another process's, so rank 0 is not to blame.
        TransportError: the store is gone.
    """
    with blaming_the_store():
        if not store.check([f"came/{rank}"]):
            return
        key, words = store.get(f"came/{rank}").decode().split("\n")
    own = own_process()
    if key != own.key:
        raise Timeout(
            f"timed out: {words} has joined as rank {rank} already, and this is {own}. If both "
            "were started together, give each process a RANK of its own; if this one was started "
            "in the other's place, start the whole job again.",
            ranks=(rank,),
            cause="another process has this rank",
        )


def go_on_from(store: dist.Store, rank: int, number: int) -> None:
    """Lets later meetings have later numbers than one of survivors, which rank 0 has not counted.

    Every survivor calls it.

    Args:
        store: as in `next_number`.
        rank: this process's among the survivors.
        number: that meeting's.
    """
    opened = int(store.add("opened", 0))
    if rank == 0:
        store.add("opened", max(0, number - opened))
    else:
        # What was opened beyond it was opened by a rank 0 that is lost: nobody comes there.
        store.add(f"been/{rank}", max(number, opened) - int(store.add(f"been/{rank}", 0)))
        _note_who_came(store, rank)
