"""Brings the other ranks' shards of the parameters, after a step."""

import contextlib
import os
import time
from collections.abc import Sequence

from torch import nn

from pydist import _native
from pydist.errors import Error
from pydist.sharding.buckets import Bucket
from pydist.sharding.in_flight import Gather


def gather(bucket: Bucket, communicator: _native.Communicator) -> None:
    """Starts to bring the other ranks' shards. All ranks call it.

    Who reads a parameter waits for it, where its class allows that; otherwise this does.

    Args:
        bucket: Its own shard holds new values.
        communicator: The ranks.
    """
    if communicator.size == 1 or bucket.is_own:
        return
    label = f"parameters of {bucket.label}"
    if not all(type(p) is nn.Parameter for p in bucket.parameters):
        communicator.all_gather(bucket.shard, bucket.memory, False, label=label)
        return
    work = communicator.all_gather(bucket.shard, bucket.memory, True, label=label)
    assert work is not None
    bucket.gather = Gather(bucket.parameters, work)


def let_arrive(buckets: Sequence[Bucket], communicator: _native.Communicator, pid: int) -> None:
    """Waits for what travels, before this rank lets go of what brings it.

    The other ranks need this rank's shards to arrive there, whether it needs theirs or not. It
    waits no longer than an operation of the group may take. What goes wrong is for those to know
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
