"""Data-parallel training for PyTorch on a C++ collective engine."""

# First of all: it loads the compiled module, or says why it can't.
from pydist._load import __version__  # isort: skip

from pydist import checkpoint, metrics
from pydist._native import Communicator, Work
from pydist.backends import register as _register
from pydist.batch_sampler import BatchSampler
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
    symmetric_empty,
)
from pydist.data_loading import PreparedLoader, prepare
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
    CheckpointError,
    Error,
    InvalidUsage,
    Mismatch,
    PeerLost,
    Timeout,
    TransportError,
)
from pydist.evaluation import evaluate
from pydist.groups import new_group
from pydist.large_batch import effective_batch_size, scale_lr
from pydist.ledger import Ledger
from pydist.memory_plan import MemoryPlan, RankMemory, plan
from pydist.orders import Order, Sequential, Shuffled
from pydist.process import (
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
from pydist.sampler import DistributedSampler
from pydist.sharded_optimizer import (
    ParameterState,
    ShardedOptimizer,
    ShardedState,
    StateRange,
)
from pydist.spawn import spawn
from pydist.sync_batch_norm import SyncBatchNorm

__all__ = [
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
]

_register()
