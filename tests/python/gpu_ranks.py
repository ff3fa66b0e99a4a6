"""Ranks with a GPU each, for NCCL: they share a real one, or fakes stand in for it.

    import gpu_ranks

    gpu_ranks.install()     # in a rank, before pydist.init(); PYDIST_BACKEND=auto then takes nccl

NCCL refuses ranks that share a GPU. It takes them for ranks of several hosts if their
NCCL_HOSTIDs differ, and then talks to them by sockets: slow, since the GPU runs their kernels in
turns, but right.
"""

from __future__ import annotations

import os

import fake_cuda
import fake_nccl
import pytest
import torch

IS_REAL = torch.cuda.is_available()

needs_gpu_ranks = pytest.mark.skipif(
    not IS_REAL and fake_nccl.folder() is None,
    reason="no GPU, and the fakes were not built (PYDIST_BUILD_TESTS=ON)",
)


def install(delay_us: int = 20) -> None:
    """Makes this rank see a GPU that NCCL takes for its own. Fake streams dawdle."""
    if not IS_REAL:
        fake_nccl.install()
        fake_cuda.set_delay_us(delay_us)
        return
    os.environ.update(
        NCCL_HOSTID=f"host{os.environ.get('RANK', '0')}",
        NCCL_SOCKET_IFNAME="lo",
        NCCL_NET="Socket",
        NCCL_MAX_CTAS="1",
    )
    torch.cuda.set_device(0)
