"""Lets what a step has updated arrive before its optimizer goes, or its job ends.

The other ranks need this rank's shards to arrive there, whether it needs theirs or not. So this
rank does not go before, whoever forgets the optimizer.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Sequence

from torch.optim import Optimizer

from pydist import _native
from pydist.errors import Error
from pydist.job import current
from pydist.sharding.buckets import Bucket
from pydist.sharding.offload.offload import Offload

# For each optimizer that lives, a finalizer that lets its parameters arrive before their group
# ends.
_leaving: weakref.WeakKeyDictionary[Optimizer, weakref.finalize[..., Optimizer]] = (
    weakref.WeakKeyDictionary()
)


def arrive_before_leaving(
    optimizer: Optimizer,
    buckets: Sequence[Bucket],
    communicator: _native.Communicator,
    offload: Offload | None,
) -> None:
    """What an optimizer has under way is over once it goes, or its job ends.

    Args:
        optimizer: The optimizer.
        buckets: Its own, as it adds to them.
        communicator: The ranks.
        offload: Its steps on the host, if it takes them there.
    """
    leaving = weakref.finalize(optimizer, _leave, buckets, communicator, os.getpid(), offload)
    leaving.atexit = False  # by then the job is over
    _leaving[optimizer] = leaving
    if _let_all_arrive not in current.before_closing:
        current.before_closing.append(_let_all_arrive)


def _let_all_arrive() -> None:
    for leave in list(_leaving.values()):
        leave()


def _leave(
    buckets: Sequence[Bucket], communicator: _native.Communicator, pid: int, offload: Offload | None
) -> None:
    if offload is not None:
        offload.leave()
    _let_arrive(buckets, communicator, pid)


def _let_arrive(buckets: Sequence[Bucket], communicator: _native.Communicator, pid: int) -> None:
    """Waits for what travels, before this rank lets go of what brings it.

    It waits no longer than an operation of the group may take. What goes wrong is for those to know
    who read the parameters.

    Args:
        buckets: Of an optimizer that is on its way out.
        communicator: The ranks.
        pid: Of the process that joined them; a forked child waits for nothing.
    """
    if os.getpid() != pid:
        return
    with contextlib.suppress(Error):
        deadline_s = time.monotonic() + communicator.timeout
        for bucket in buckets:
            if bucket.gather is not None:
                bucket.gather.wait_on_host(max(0.0, deadline_s - time.monotonic()))
