"""What a launcher that spares survivors tells ranks that meet for the first time: who has ended.

Ranks that have met know each other's processes. Before that only their launcher does.
"""

import json

import torch.distributed as dist

from pydist.errors import PeerLost
from pydist.job.meeting.store_waits import root_of
from pydist.job.processes import own_process

__all__ = ["note_end", "require_none_ended"]

_KEY = "pydist ended"


def note_end(store: dist.Store, rank: int, pid: int, how: str) -> None:
    """Tells the ranks of the first one that has ended: others may have ended because of it.

    Args:
        store: The one that this process, their launcher, serves.
        rank: Which.
        pid: The number of its process.
        how: What became of it: "exited with status 3".
    """
    store.compare_set(_KEY, "", json.dumps([rank, pid, how]))


def require_none_ended(store: dist.Store) -> None:
    """Raises where a rank can't come to the first meeting of all ranks.

    Args:
        store: That of the launcher, or one with a prefix in it.

    Raises:
        PeerLost: a rank has ended.
    """
    root = root_of(store)
    if not root.check([_KEY]):
        return
    rank, pid, how = json.loads(root.get(_KEY))
    host = own_process().host  # such a launcher is for one host
    raise PeerLost(
        f"rank {rank} (pid {pid} on host {host}) {how} before all ranks had joined, so they never "
        "will: look at what it printed.",
        ranks=(rank,),
        host=host,
        pid=pid,
        cause=how,
    )
