"""Data-parallel training for PyTorch on a C++ collective engine."""

# First of all: it loads the compiled module, or says why it can't.
from pydist._load import __version__  # isort: skip

from pydist._native import Communicator, Work
from pydist.backends import register as _register
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
    symmetric_empty,
)
from pydist.data_parallel import (
    BucketPlan,
    BucketStats,
    CommunicationStats,
    DataParallel,
    PlannedBucket,
    PlannedParameter,
)
from pydist.errors import (
    Aborted,
    Error,
    InvalidUsage,
    Mismatch,
    PeerLost,
    Timeout,
    TransportError,
)
from pydist.groups import new_group
from pydist.large_batch import effective_batch_size, scale_lr
from pydist.memory_plan import MemoryPlan, RankMemory, plan
from pydist.process import (
    backend,
    init,
    is_initialized,
    local_rank,
    local_world_size,
    rank,
    shutdown,
    world_size,
)
from pydist.spawn import spawn
from pydist.sync_batch_norm import SyncBatchNorm

__all__ = [
    "Aborted",
    "BucketPlan",
    "BucketStats",
    "CommunicationStats",
    "Communicator",
    "DataParallel",
    "Error",
    "InvalidUsage",
    "MemoryPlan",
    "Mismatch",
    "PeerLost",
    "PlannedBucket",
    "PlannedParameter",
    "RankMemory",
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
    "effective_batch_size",
    "gather",
    "init",
    "is_initialized",
    "local_rank",
    "local_world_size",
    "new_group",
    "plan",
    "rank",
    "recv",
    "reduce",
    "reduce_scatter",
    "scale_lr",
    "scatter",
    "send",
    "shutdown",
    "spawn",
    "symmetric_empty",
    "world_size",
]

_register()
