"""Tensors of operations that outlive their abort: nobody else gets their memory meanwhile.

On the fakes, whose kernels go on writing as long as they are told (FAKE_NCCL_FAULT=stray). Every
detail is the C++ tests' (tests/cpp/communicator/nccl/nccl_kept_buffers_test.cc).
"""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Callable
from datetime import timedelta

import fake_cuda
import gpu_ranks
import pytest
import torch
import torch.distributed as dist
from gpu_ranks import needs_gpu_ranks
from launch import rank_outcomes
from thorough import everyday
from training import LIMIT_S, TIME_LIMIT

import pydist

pytestmark = [
    needs_gpu_ranks,
    pytest.mark.skipif(gpu_ranks.IS_REAL, reason="a real NCCL does not fail as it is told"),
    TIME_LIMIT,
]

NCCL: dict[str, str | None] = {"PYDIST_BACKEND": "nccl"}
BYTES = 4000


def comes_true(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds()


def drop_what_is_written(does_end: bool) -> None:
    """Drops the tensors of three collectives whose kernels heed no abort on rank 0."""
    os.environ["FAKE_NCCL_FAULT"] = "stray:0:1,stray:0:2,stray:0:3"
    gpu_ranks.install()
    dist.init_process_group("pydist", timeout=timedelta(seconds=2))
    pydist.init()
    of_torch, of_pydist, of_nobody, blocking = (
        torch.ones(BYTES // 4, device="cuda") for _ in range(4)
    )
    places = [each.data_ptr() for each in (of_torch, of_pydist, blocking)]
    torchs = dist.all_reduce(of_torch, async_op=True)
    assert torchs is not None
    ours = pydist.all_reduce(of_pydist, async_op=True)
    dist.all_reduce(blocking)  # on the GPU's stream
    with pytest.raises(pydist.Timeout):
        ours.wait(timeout=20.0)
    with pytest.raises(pydist.Timeout):
        torchs.wait(timedelta(seconds=20))
    with pytest.raises(pydist.Timeout):
        pydist.all_reduce(of_nobody)
    del of_torch, of_pydist, of_nobody, blocking, torchs, ours
    gc.collect()
    if int(os.environ["RANK"]) == 0 and does_end:
        nccl = ctypes.CDLL("libnccl.so.2")
        device = ctypes.CDLL(str(fake_cuda.library()))

        def is_freed(place: int) -> bool:
            return bool(device.fake_cuda_is_freed(ctypes.c_void_p(place)))

        assert not any(map(is_freed, places))
        nccl.fake_nccl_end_strays()
        assert comes_true(lambda: all(map(is_freed, places)))
        assert nccl.fake_nccl_faults() == 0
    pydist.shutdown()
    dist.destroy_process_group()


@pytest.mark.parametrize("does_end", everyday(True, thorough=(False,)))
def test_memory_that_a_kernel_still_writes_is_nobody_elses(does_end: bool) -> None:
    # Where it never ends, the process does nevertheless.
    outcomes = rank_outcomes(drop_what_is_written, 2, does_end, env=NCCL, timeout=LIMIT_S)
    for outcome in outcomes:
        assert outcome.ok, outcome.describe()
    assert f"{2 * BYTES} bytes" in outcomes[0].output
    assert "is kept until the GPU is done with it" in outcomes[0].output
    assert "is kept until" not in outcomes[1].output
