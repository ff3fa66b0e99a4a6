"""GPUs where there are none: what torch would say of them, and an NCCL that would join them.

    with fake_gpus("aaaa", "bbbb") as gpus:     # their UUIDs, without "GPU-"
        pydist.init()
        assert gpus.current == 1

Nothing computes on them: tensors stay on the CPU.
"""

import contextlib
import os
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch

from pydist import _native
from pydist.gpu import visible
from pydist.gpu.nccl import NcclLibrary
from pydist.job import backend_choice
from pydist.job.meeting import gpu_assignment

NCCL = NcclLibrary(22_907, "/fake/libnccl.so.2")


@dataclass
class FakeGpus:
    """What was done with them."""

    # The current one, once CUDA has started.
    current: int | None = None
    # What CUDA is to do first when it starts.
    queued: list[Callable[[], None]] = field(default_factory=list)
    # The GPUs, and the host communicators, of the NCCL communicators made.
    joined: list[tuple[int, str]] = field(default_factory=list)
    # For more that is to end with them: a test's own monkeypatch would end later, and leave a fake.
    patch: pytest.MonkeyPatch = field(default_factory=pytest.MonkeyPatch)

    def start_cuda(self) -> None:
        if self.current is None:
            self.current = 0
            for call in self.queued:
                call()


@contextlib.contextmanager
def fake_gpus(
    *uuids: str,
    nccl: NcclLibrary = NCCL,
    create_nccl: Callable[..., Any] | None = None,
) -> Iterator[FakeGpus]:
    """CUDA with these GPUs.

    Args:
        uuids: of each GPU that the process sees; the first letter is its place on the bus.
        nccl: the NCCL that it finds.
        create_nccl: takes the place of the fake's, which returns the host communicator.
    """
    gpus = FakeGpus()

    def properties(index: int) -> types.SimpleNamespace:
        gpus.start_cuda()
        return types.SimpleNamespace(
            uuid=uuids[index],
            name="Fake",
            total_memory=2**30,
            pci_domain_id=0,
            pci_bus_id=ord(uuids[index][0]),
            pci_device_id=0,
        )

    def set_device(gpu: int) -> None:
        gpus.start_cuda()
        gpus.current = gpu

    def join(host: Any, gpu: int, library: str) -> Any:
        assert library == nccl.path
        gpus.joined.append((gpu, host.backend))
        return host

    changes: list[tuple[Any, str, Any]] = [
        (torch.backends.cuda, "is_built", lambda: True),
        (torch.cuda, "device_count", lambda: len(uuids)),
        (torch.cuda, "get_device_properties", properties),
        (torch.cuda, "set_device", set_device),
        (torch.cuda, "is_initialized", lambda: gpus.current is not None),
        (torch.cuda, "current_device", lambda: gpus.current),
        (torch.cuda, "_lazy_call", gpus.queued.append),
        (gpu_assignment, "find_nccl", lambda: nccl),
        (backend_choice, "find_nccl", lambda: nccl),
        (_native, "create_nccl", create_nccl or join),
    ]
    with mock.patch.dict("os.environ"), contextlib.ExitStack() as stack:
        stack.callback(gpus.patch.undo)
        for owner, name, value in changes:
            gpus.patch.setattr(owner, name, value)
        for name in (visible.VARIABLE, "NCCL_HOSTID", "NCCL_MULTI_RANK_GPU_ENABLE"):
            os.environ.pop(name, None)
        yield gpus
