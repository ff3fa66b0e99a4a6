"""all_reduce of GPU tensors beside something else, in turns.

For gpu_latency.py, nccl_ring.py and staging.py.

Every rank has a GPU of its own. Where there is one GPU, two ranks share it (gpu_ranks.py and
staged_gpu.py in tests/python): the figures then say nothing of links between GPUs.
"""

from __future__ import annotations

import functools
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import gpu_figures
import gpu_ranks
import staged_gpu
import torch
import torch.distributed as dist
from launch import Ranks
from turns import Pair, Times, take_turns

import pydist
from pydist.benchmarks.noise import Ratio
from pydist.gpu.nccl import find_nccl
from pydist.gpu.visible import why_none

# Of one case, beside the seconds that it is given: NCCL takes some to join.
_LIMIT_S = 120.0


@dataclass(frozen=True)
class Case:
    """What is measured once, and the backend that carries it."""

    backend: str
    size_bytes: int
    dtype: str
    make_pair: Callable[[int, str], Pair]


def why_not(backend: str) -> str:
    """Why there is nothing to measure here; empty where there is."""
    if not torch.cuda.is_available():
        return why_none()
    return find_nccl().problem if backend == "nccl" else ""


def rank_count() -> int:
    return max(2, torch.cuda.device_count())


def are_sharing(ranks: int | None = None) -> bool:
    """Whether so many ranks, by default `rank_count()`, share a GPU (a fake counts as one)."""
    count = rank_count() if ranks is None else ranks
    return not torch.cuda.is_available() or torch.cuda.device_count() < count


def join(is_sharing: bool, backend: str) -> None:
    """Joins the job on a GPU of this rank's own, or on one that is shared."""
    if is_sharing and not pydist.is_initialized():
        gpu_ranks.install() if backend == "nccl" else staged_gpu.install()
    pydist.init()


def measure(cases: Sequence[Case], nprocs: int, seconds: float) -> Iterator[Times]:
    """The times of each case, as they come; all have one backend."""
    with Ranks(nprocs, {"PYDIST_BACKEND": cases[0].backend}) as ranks:
        for case in cases:
            limit_s = _LIMIT_S + seconds
            times: Times = ranks.run(take_case, case, are_sharing(), seconds, timeout=limit_s)[0]
            yield times


def take_case(case: Case, is_sharing: bool, seconds: float) -> Times:
    """On each rank."""
    join(is_sharing, case.backend)
    return take_turns(case.make_pair, (case.size_bytes, case.dtype), seconds)


def keep(kept: gpu_figures.Kept, of: str, times: Times, ratio: Ratio) -> str:
    """Keeps what was measured; returns the ratio as it is shown."""
    return kept.add(
        of,
        str(ratio),
        reference=times.reference_name,
        reference_s=statistics.median(times.reference_s),
        subject_s=statistics.median(times.subject_s),
    )


def zeros(size_bytes: int, dtype: str) -> torch.Tensor:
    """On this rank's GPU; sums of them stay what they are."""
    element: torch.dtype = getattr(torch, dtype)
    return torch.zeros(size_bytes // element.itemsize, dtype=element, device="cuda")


@functools.cache
def ring_group() -> dist.ProcessGroup:
    """All ranks; their all_reduce goes by our ring."""
    before = os.environ.get("PYDIST_ALGORITHM")
    # A group reads it when it is made.
    os.environ["PYDIST_ALGORITHM"] = "ring"
    try:
        group = dist.new_group(backend="pydist")
    finally:
        os.environ.pop("PYDIST_ALGORITHM")
        if before is not None:
            os.environ["PYDIST_ALGORITHM"] = before
    assert isinstance(group, dist.ProcessGroup)
    return group


@functools.cache
def torchs_group(backend: str = "nccl") -> dist.ProcessGroup:
    """All ranks, on torch's own backend; on fakes, which torch has none of, on pydist as well."""
    group = dist.new_group(backend=backend if gpu_ranks.IS_REAL else "pydist")
    assert isinstance(group, dist.ProcessGroup)
    return group


def beside_torchs_nccl(size_bytes: int, dtype: str) -> Pair:
    tensor, group = zeros(size_bytes, dtype), torchs_group()

    def by_pydist() -> None:
        pydist.all_reduce(tensor)
        gpu_ranks.synchronize()

    def by_torch() -> None:
        dist.all_reduce(tensor, group=group)
        gpu_ranks.synchronize()

    return Pair(by_pydist, by_torch, "torch's NCCL")


def ring_beside_nccl(size_bytes: int, dtype: str) -> Pair:
    tensor, ring = zeros(size_bytes, dtype), ring_group()

    def by_ring() -> None:
        pydist.all_reduce(tensor, group=ring)
        gpu_ranks.synchronize()

    def by_nccl() -> None:
        pydist.all_reduce(tensor)
        gpu_ranks.synchronize()

    return Pair(by_ring, by_nccl, "NCCL's own")


def staging_beside_copies(size_bytes: int, dtype: str) -> Pair:
    """The reference moves the same bytes to pinned memory and back, at a time, and adds nothing."""
    tensor = zeros(size_bytes, dtype)
    arriving = torch.zeros_like(tensor)
    down, up = (torch.zeros(tensor.shape, dtype=tensor.dtype).pin_memory() for _ in range(2))
    device = str(tensor.device)

    def copies() -> None:
        with staged_gpu.stream(device):
            down.copy_(tensor, non_blocking=True)
        with staged_gpu.stream(device):
            arriving.copy_(up, non_blocking=True)
        staged_gpu.synchronize()

    return Pair(lambda: pydist.all_reduce(tensor), copies, "plain copies")
