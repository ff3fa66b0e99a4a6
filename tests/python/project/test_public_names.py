"""Public names stay where programs find them."""

import functools
import re
from pathlib import Path

import pytest

import pydist
import pydist.pipelining  # only programs that have pipelines import it

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "pydist"

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
    "nn",
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
    "share_allocations",
    "shutdown",
    "spawn",
    "symmetric_empty",
    "testing",
    "world_size",
)


def named_in_documents() -> set[str]:
    """Every `pydist.name`, dotted further or not, that a page or an example has."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.rst")]
    pages += (ROOT / "examples").glob("*.py")
    name = r"(?<![\w/.])pydist\.([A-Za-z_]\w*(?:\.\w+)*)"
    return {found for page in pages for found in re.findall(name, page.read_text())}


def test_documents_name_what_is_there() -> None:
    named = named_in_documents()
    assert {"metrics.mean", "backends.Options", "checkpoint.to_torch"} <= named
    for name in named:
        if name.startswith("integrations."):
            # To import one takes its framework, which is not here.
            place = PACKAGE / "integrations" / name.split(".")[1]
            assert place.with_suffix(".py").is_file() or (place / "__init__.py").is_file(), name
        elif name != "integrations":
            functools.reduce(getattr, name.split("."), pydist)


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_is_there(name: str) -> None:
    getattr(pydist, name)


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_is_exported(name: str) -> None:
    assert name in pydist.__all__
