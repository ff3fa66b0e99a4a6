"""What a sharded optimizer whose state is on the host takes there, and moves in a step."""

from __future__ import annotations

from dataclasses import dataclass

from pydist.sharding.offload.digest import digest_bytes

# On the GPU, digests of shards are made on two streams: one before the step, to see whether the
# program has written, and one behind the new values. Each stream keeps memory of its own for them.
_DIGESTS_AT_ONCE = 2


@dataclass(frozen=True)
class HostMemory:
    """Bytes of a rank on the host, and those that it moves in a step.

    Attributes:
        pinned: Values and gradients of the shards, which GPUs copy from and to.
        state: What the optimizer keeps, with float32 copies of 16-bit parameters.
        to_host: Gradients, from the GPU, in each step.
        stepped: That the step reads from, and writes to, the host's memory.
        to_device: Values, back to the GPU.
    """

    pinned: int
    state: int
    to_host: int
    stepped: int
    to_device: int


def host_memory(shard_bytes: int, state_bytes: int, is_delayed: bool) -> HostMemory:
    """Of a rank.

    Args:
        shard_bytes: Of its shards of the parameters; those of gradients are as large.
        state_bytes: Of the optimizer, with float32 copies.
        is_delayed: Whether the host steps beside the next backward, whose gradients have a place
            of their own then.
    """
    return HostMemory(
        pinned=shard_bytes * (3 if is_delayed else 2),
        state=state_bytes,
        to_host=shard_bytes,
        stepped=3 * shard_bytes + 2 * state_bytes,
        to_device=shard_bytes,
    )


def step_bytes(largest_shard_bytes: int) -> int:
    """What the step takes on the GPU for its duration, of the largest bucket."""
    return _DIGESTS_AT_ONCE * digest_bytes(largest_shard_bytes)
