"""Ranks with a GPU each, for NCCL: they share a real one, or fakes stand in for it.

    import gpu_ranks

    gpu_ranks.install()     # in a rank, before pydist.init(); PYDIST_BACKEND=auto then takes nccl

NCCL refuses ranks that share a GPU. It takes them for ranks of several hosts if their
NCCL_HOSTIDs differ, and then talks to them by sockets: slow, since the GPU runs their kernels in
turns, but right. With PYDIST_TEST_OWN_GPUS=1 (launch.py) each has one of its own, if there are so
many.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import fake_cuda
import fake_nccl
import pytest
import torch

IS_REAL = torch.cuda.is_available()

needs_gpu_ranks = pytest.mark.skipif(
    not IS_REAL and (fake_cuda.why_missing() != "" or fake_nccl.folder() is None),
    reason=f"no GPU, and no fakes: {fake_cuda.why_missing() or 'they were not built'}",
)


def install(delay_us: int = 20) -> None:
    """Makes this rank see a GPU that NCCL takes for its own. Fake streams dawdle."""
    if not IS_REAL:
        fake_nccl.install()
        fake_cuda.set_delay_us(delay_us)
        return
    torch.cuda.set_device(0)
    if os.environ.get("HAS_OWN_GPU"):
        return
    os.environ.update(
        NCCL_HOSTID=f"host{os.environ.get('RANK', '0')}",
        NCCL_SOCKET_IFNAME="lo",
        NCCL_NET="Socket",
        NCCL_MAX_CTAS="1",
    )


def synchronize() -> None:
    """Waits for the GPU."""
    torch.cuda.synchronize() if IS_REAL else fake_cuda.synchronize()


def scaler(**options: Any) -> torch.amp.GradScaler:
    """One whose numbers are on the GPU, the fake one too, of which torch.cuda knows nothing."""
    with mock.patch.object(
        torch.cuda.amp.common, "amp_definitely_not_available", return_value=False
    ):
        return torch.amp.GradScaler("cuda", **options)


@contextlib.contextmanager
def stream() -> Iterator[None]:
    """Another stream than the default one."""
    if IS_REAL:
        with torch.cuda.stream(torch.cuda.Stream()):
            yield
    else:
        with fake_cuda.Stream():
            yield


class Graph:
    """What torch.cuda.graph captures, on a stream of its own.

    On the fakes a graph holds what goes to NCCL, and the operators that run on the stream
    (tests/fake_cuda/kernels.cc). All others run at once, and no replay repeats them.
    """

    def __enter__(self) -> Graph:
        if IS_REAL:
            self._graph = torch.cuda.CUDAGraph()
            self._capture = torch.cuda.graph(self._graph)
            self._capture.__enter__()
            return self
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._driver.fake_driver_end_capture.restype = ctypes.c_void_p
        self._stream = fake_cuda.Stream()
        self._stream.__enter__()
        self._driver.fake_driver_begin_capture(ctypes.c_void_p(self._stream.handle))
        return self

    def __exit__(self, *error: object) -> None:
        if IS_REAL:
            self._capture.__exit__(*error)
            return
        self._jobs = self._driver.fake_driver_end_capture(ctypes.c_void_p(self._stream.handle))
        self._stream.__exit__(*error)
        is_whole = self._jobs is not None or error[0] is not None
        assert is_whole, "a call that is not permitted has broken the capture, or it is not joined"

    def __del__(self) -> None:
        # NCCL ends no communicator before the graphs that hold its operations are gone.
        if jobs := getattr(self, "_jobs", None):
            synchronize()
            self._driver.fake_driver_destroy_graph(ctypes.c_void_p(jobs))

    def replay(self) -> None:
        if IS_REAL:
            self._graph.replay()
        else:
            self._driver.fake_driver_replay(ctypes.c_void_p(self._jobs), None)
