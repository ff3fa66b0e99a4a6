"""How often the host waits for the GPU in a training step, as the stand-in counts it.

A wait is what stops the thread that trains until the GPU has come so far: a number that is read, a
copy from or to ordinary memory, an event or a stream that is waited for.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

import fake_cuda
import gpu_ranks
import pytest
import staged_gpu
import torch
from fake_cuda import needs_fake_cuda
from gpu_ranks import needs_gpu_ranks
from launch import run_ranks
from torch import Tensor, nn
from training import TIME_LIMIT, joined

import pydist

pytestmark = [needs_gpu_ranks, needs_fake_cuda, TIME_LIMIT]

# After so many steps the plan of the buckets is settled, and buffers are known.
_STEPS_BEFORE = 6


class Attention(nn.Module):
    """A layer of a transformer, with rotary positions: a buffer that no BatchNorm has."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.queries, self.values, self.out = (nn.Linear(8, size) for size in (8, 8, 11))
        self.register_buffer("angles", torch.arange(8.0) / 7)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.tokens(tokens))
        queries = self.queries(x) * torch.as_tensor(self.angles).cos()
        y: Tensor = self.out((queries @ x.transpose(1, 2)).softmax(-1) @ self.values(x))
        return y


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.Tanh(), nn.Conv2d(3, 3, 2), nn.BatchNorm2d(3)
    )


def waits_of(step: Callable[[], None]) -> list[str]:
    """What the host waits for in a step, once everything is settled."""
    for _ in range(_STEPS_BEFORE):
        step()
    fake_cuda.synchronize()
    fake_cuda.take_host_waits()
    step()
    waits: list[str] = fake_cuda.take_host_waits()
    return waits


def train(kind: str) -> list[str]:
    install = gpu_ranks.install if os.environ["PYDIST_BACKEND"] == "nccl" else staged_gpu.install
    install(delay_us=0)
    joined()
    torch.manual_seed(0)
    inputs = torch.randint(11, (4, 5)).to("cuda")
    module = Attention()
    if kind.startswith("batch norm"):
        inputs, module = torch.randn(4, 2, 5, 5).to("cuda"), convolutions()
    if kind == "batch norm of all ranks":
        module = pydist.SyncBatchNorm.convert_sync_batchnorm(module)
    model = pydist.DataParallel(module.to("cuda"))
    optimizer: torch.optim.Optimizer
    if kind.startswith("stage"):
        optimizer = pydist.ShardedOptimizer(model, torch.optim.AdamW, lr=0.1, stage=int(kind[6]))
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    mask = torch.ones(4, 5).to("cuda")

    def step() -> None:
        optimizer.zero_grad()
        weighted = model.weighted(mask.sum()) if kind == "weighted" else contextlib.nullcontext()
        with weighted:
            model(inputs).square().mean().backward()
        if kind.endswith("clipped"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return waits_of(step)


@pytest.mark.parametrize("backend", ["nccl", "native"])
@pytest.mark.parametrize(
    ("kind", "waits"),
    [
        ("attention", []),
        ("attention, clipped", []),
        ("stage 1, clipped", []),
        ("stage 2", []),
        ("batch norm", []),
        # The weight is a number of the host's, which tells the others.
        ("weighted", ["aten::_local_scalar_dense"]),
        # The two layers' statistics travel by the host, forward and backward.
        ("batch norm of all ranks", ["aten::copy_"] * 4),
    ],
)
def test_how_often_the_host_waits(backend: str, kind: str, waits: list[str]) -> None:
    for found in run_ranks(train, 2, kind, env={"PYDIST_BACKEND": backend}, timeout=50):
        assert found == waits
