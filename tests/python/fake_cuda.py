"""A CUDA device for torch without CUDA; its memory lies on the host, its streams are threads.

    import fake_cuda

    fake_cuda.install()                 # in a rank, before torch does anything on "cuda"
    tensor = torch.ones(3, device="cuda")
    with fake_cuda.Stream():            # another stream than the default one
        tensor.add_(1)                  # later, on the stream's thread
    fake_cuda.set_delay_us(500)         # streams dawdle before each job: who does not wait, sees it

Tensors, autograd, modules and optimizers work; kernels are those of the CPU. Copies, and the usual
operators that write in place, run on the current stream later, as on a real device; all others run
at once, when the stream has done what it was given. Freed memory is overwritten. What there is not:
`torch.cuda` itself (`is_available()` stays False), cuDNN, Triton, and sparse tensors. The sources
are in tests/fake_cuda.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from build_folder import BUILD


def library() -> Path | None:
    """The compiled module; None where the C++ tests were not built."""
    suffix = f".cpython-{sys.version_info.major}{sys.version_info.minor}-"
    found = (BUILD / "tests" / "fake_cuda").glob("_fake_cuda*.so")
    return next((path for path in found if suffix in path.name), None)


def why_missing() -> str:
    """Why the tests do without it; empty where they have it."""
    if torch.backends.cuda.is_built():
        return "this torch has CUDA of its own, which leaves no place for the fake device"
    return "" if library() else "the fake CUDA device was not built (PYDIST_BUILD_TESTS=ON)"


needs_fake_cuda = pytest.mark.skipif(why_missing() != "", reason=why_missing())

_module: Any = None


def install(devices: int = 2) -> None:
    """Makes torch of this process see `devices` CUDA devices. Idempotent."""
    global _module
    if _module is None:
        path = library()
        assert path is not None, "configure with -DPYDIST_BUILD_TESTS=ON"
        # Its functions in C are found by name (tests/fake_cuda/fake_cuda.h).
        ctypes.CDLL(str(path), mode=os.RTLD_GLOBAL | os.RTLD_NOW)
        spec = importlib.util.spec_from_file_location("_fake_cuda", path)
        assert spec is not None
        assert spec.loader is not None
        _module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(_module)
        # Called by torch before it makes a tensor on "cuda".
        torch.cuda._lazy_init = lambda: None
        # torch.distributed asks for it before a broadcast.
        torch.cuda.get_device_capability = lambda device=None: (8, 0)
    _module.install(devices)


def __getattr__(name: str) -> Any:
    """What the compiled module has: Stream, set_delay_us, synchronize, pinned_bytes, ..."""
    if name.startswith("__"):
        raise AttributeError(name)
    assert _module is not None, "call fake_cuda.install() first"
    return getattr(_module, name)
