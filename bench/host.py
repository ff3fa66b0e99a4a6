"""How the benchmarks use the machine, and what they say of it."""

import os
import platform

import torch

import pydist


def describe() -> str:
    """What figures depend on."""
    return (
        f"{platform.processor() or platform.machine()}, {len(os.sched_getaffinity(0))} cores, "
        f"torch {torch.__version__}, pydist {pydist.__version__}"
    )


def pin(rank: int) -> None:
    """One compute thread a rank, on a core of its own if there are enough."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)


def keep_freed_blocks() -> None:
    """For processes that start later: glibc keeps what they free, as most allocators do.

    It would give large blocks back at every free, and every step would pay for page faults.
    """
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(1 << 30))
    os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(1 << 34))
