"""Data-parallel training for PyTorch on a C++ collective engine."""

# First of all: it loads the compiled module, or says why it can't.
from pydist._load import __version__  # isort: skip

import os as _os

from pydist import checkpoint, metrics, nn, testing
from pydist._native import Communicator, Work
from pydist.checkpoint import load, save
from pydist.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    gather,
    recv,
    reduce,
    reduce_scatter,
    scatter,
    send,
    share_allocations,
    symmetric_empty,
)
from pydist.config import in_force as _in_force
from pydist.config.config import Config
from pydist.errors import (
    Aborted,
    CheckpointError,
    Error,
    InvalidUsage,
    Mismatch,
    PeerLost,
    Timeout,
    TransportError,
)
from pydist.evaluation.evaluate import evaluate
from pydist.job import backends
from pydist.job.groups import new_group
from pydist.job.membership import (
    abort,
    backend,
    device,
    init,
    is_initialized,
    local_rank,
    local_world_size,
    rank,
    shutdown,
    world_size,
)
from pydist.job.recovery.reforming import reform
from pydist.job.spawn import spawn
from pydist.monitoring.monitor import Monitor, monitor
from pydist.parallel.bucket_planner import BucketPlan, PlannedBucket, PlannedParameter
from pydist.parallel.large_batch import effective_batch_size, scale_lr
from pydist.parallel.reducer import BucketStats, CommunicationStats
from pydist.parallel.sync_batch_norm import SyncBatchNorm
from pydist.parallel.wrapper import DataParallel
from pydist.planning.memory_estimate import plan
from pydist.planning.memory_table import MemoryPlan, RankMemory
from pydist.sampling.audit import Ledger
from pydist.sampling.batch_sampler import BatchSampler
from pydist.sampling.loader import PreparedLoader, prepare
from pydist.sampling.order import Order, Sequential, Shuffled
from pydist.sampling.sampler import DistributedSampler
from pydist.sharding.optimizer import ShardedOptimizer
from pydist.sharding.state.ranges import ParameterState, ShardedState, StateRange
from pydist.training.initialize import initialize

__all__ = [
    "Aborted",
    "BatchSampler",
    "BucketPlan",
    "BucketStats",
    "CheckpointError",
    "CommunicationStats",
    "Communicator",
    "Config",
    "DataParallel",
    "DistributedSampler",
    "Error",
    "InvalidUsage",
    "Ledger",
    "MemoryPlan",
    "Mismatch",
    "Monitor",
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
    "abort",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "backend",
    "backends",
    "barrier",
    "broadcast",
    "checkpoint",
    "device",
    "effective_batch_size",
    "evaluate",
    "gather",
    "init",
    "initialize",
    "is_initialized",
    "load",
    "local_rank",
    "local_world_size",
    "metrics",
    "monitor",
    "new_group",
    "nn",
    "plan",
    "prepare",
    "rank",
    "recv",
    "reduce",
    "reduce_scatter",
    "reform",
    "save",
    "scale_lr",
    "scatter",
    "send",
    "share_allocations",
    "shutdown",
    "spawn",
    "symmetric_empty",
    "testing",
    "world_size",
]

backends.register()

# Before what else variables say, which a file may say instead.
_in_force.use_file_at_import()

if _os.environ.get("PYDIST_FAULTS"):
    from pydist.testing.faults import arm_for_good as _arm_for_good

    _arm_for_good(_os.environ["PYDIST_FAULTS"])

if _os.environ.get("PYDIST_DUMP"):
    from pydist.diagnosis.dump import arm as _arm

    _arm(_os.environ["PYDIST_DUMP"])
