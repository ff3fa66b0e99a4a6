"""Public names stay where programs find them."""

import functools

import pytest

import pydist

NAMES = (
    "Aborted",
    "BatchSampler",
    "BucketPlan",
    "BucketStats",
    "CheckpointError",
    "CommunicationStats",
    "Communicator",
    "DataParallel",
    "DistributedSampler",
    "Error",
    "InvalidUsage",
    "Ledger",
    "MemoryPlan",
    "Mismatch",
    "Order",
    "ParameterState",
    "PeerLost",
    "PlannedBucket",
    "PlannedParameter",
    "PreparedLoader",
    "RankMemory",
    "Sequential",
    "ShardedOptimizer",
    "ShardedState",
    "Shuffled",
    "StateRange",
    "SyncBatchNorm",
    "Timeout",
    "TransportError",
    "Work",
    "__version__",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "backend",
    "barrier",
    "broadcast",
    "checkpoint",
    "device",
    "effective_batch_size",
    "evaluate",
    "gather",
    "init",
    "is_initialized",
    "load",
    "local_rank",
    "local_world_size",
    "metrics",
    "new_group",
    "plan",
    "prepare",
    "rank",
    "recv",
    "reduce",
    "reduce_scatter",
    "save",
    "scale_lr",
    "scatter",
    "send",
    "shutdown",
    "spawn",
    "symmetric_empty",
    "world_size",
)
# What the documents name below that.
PATHS = (
    "backends.Options",
    "checkpoint.Loaded",
    "checkpoint.from_torch",
    "checkpoint.latest",
    "checkpoint.step_of",
    "checkpoint.to_torch",
    "metrics.mean",
)


@pytest.mark.parametrize("name", [*NAMES, *PATHS])
def test_a_public_name_is_there(name: str) -> None:
    functools.reduce(getattr, name.split("."), pydist)


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_is_exported(name: str) -> None:
    assert name in pydist.__all__
