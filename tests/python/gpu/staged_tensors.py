"""Tensors on a GPU, and the ranks whose backends bring them through pinned memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import staged_gpu
import torch
from launch import run_ranks
from thorough import everyday
from torch import Tensor
from training import joined

BACKENDS = pytest.mark.parametrize("backend", everyday("native", thorough=("gloo",)))

# Parts of 64 KiB: what is big here takes several rounds of the slots.
BIG = 300_000


def on_device(backend: str, function: Callable[..., object], *args: object) -> list[object]:
    env = {"PYDIST_BACKEND": backend, "PYDIST_STAGING_BYTES": "65536"}
    return run_ranks(function, 2, *args, env=env, timeout=35)


def start() -> tuple[int, int]:
    # Enough for whoever does not wait to be early.
    staged_gpu.install(delay_us=300)
    return joined()


def filled(value: float, count: int = BIG, device: str = "cuda") -> Tensor:
    """Its elements become `value` on the stream, some time after this has returned."""
    return torch.zeros(count, device=device).add_(1).mul_(value)
