"""NCCL over the fake CUDA device: every rank has a GPU of its own, and NCCL joins them.

    import fake_nccl

    fake_nccl.install()     # in a rank, before pydist.init(); PYDIST_BACKEND=auto then takes nccl

The libraries are those of tests/fakes, found by the names of the real ones, so pydist's own
loaders run; FAKE_NCCL_FAULT in the environment makes them fail (tests/fakes/nccl.cc).
"""

from __future__ import annotations

import ctypes
import os
import types
from pathlib import Path
from typing import Any

import fake_cuda
import torch

_LIBRARIES = (
    "fake_cuda_driver/libcuda.so.1",
    "fake_nccl/libnccl.so.2",
    "fake_cuda_kernels/libpydist_cuda.so",
)


def folder() -> Path | None:
    """Of the libraries that belong to the fake device; None where the C++ tests were not built."""
    device = fake_cuda.library()
    found = device and device.parents[1] / "cpp" / "fakes"
    return found if found and all((found / name).exists() for name in _LIBRARIES) else None


_loaded: list[ctypes.CDLL] = []


def install(nccl: str = "fake_nccl") -> None:
    """Makes this rank see one GPU, another one than every other rank, and NCCL. Idempotent.

    Args:
        nccl: which of the fakes of NCCL; "fake_nccl_incomplete" lacks ncclCommAbort.
    """
    fake_cuda.install(1)
    if _loaded:
        return
    libraries = folder()
    assert libraries is not None, "configure with -DPYDIST_BUILD_TESTS=ON"
    for name in _LIBRARIES:
        path = str(libraries / name.replace("fake_nccl/", f"{nccl}/"))
        _loaded.append(ctypes.CDLL(path, mode=os.RTLD_GLOBAL | os.RTLD_NOW))
    rank = int(os.environ.get("RANK", "0"))
    identity = types.SimpleNamespace(
        name="a stand-in",
        total_memory=1 << 36,
        uuid=f"0000-{rank}",
        pci_domain_id=0,
        pci_bus_id=rank + 1,
        pci_device_id=0,
    )
    cuda: Any = torch.cuda
    torch.backends.cuda.is_built = lambda: True  # type: ignore[assignment]
    cuda.device_count = lambda: 1
    cuda.get_device_properties = lambda device: identity
    cuda.is_initialized = lambda: True
    cuda.current_device = lambda: 0
    cuda.set_device = lambda device: None
