"""Brings the other ranks' shards of the parameters, after a step."""

from torch import nn

from pydist import _native
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
