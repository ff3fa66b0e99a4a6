"""What a training step costs the host and the GPU, as the stand-in counts it.

How often the host waits, a GPU counts too: both agree.

A host wait is what stops the thread that trains until the GPU has come so far: a number that is
read, a copy from or to ordinary memory, an event or a stream that is waited for. An event wait
holds the stream up on which the model computes. A launch is a kernel of NCCL's.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import fake_cuda
import gpu_ranks
import pytest
import staged_gpu
import torch
from fake_cuda import needs_fake_cuda
from gpu_ranks import needs_gpu_ranks
from host_waits import host_waits_of
from launch import run_ranks
from torch import Tensor, nn
from training import TIME_LIMIT, joined

import pydist

pytestmark = [needs_gpu_ranks, TIME_LIMIT]

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


class Residual(nn.Module):
    """A block as ResNet has them, behind a first layer: three batch normalisations."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 3, 1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(3) for _ in range(3))
        self.convolutions = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(2))

    def forward(self, images: Tensor) -> Tensor:
        x = self.norms[0](self.first(images)).relu()
        y = self.norms[1](self.convolutions[0](x)).relu()
        return torch.relu(x + self.norms[2](self.convolutions[1](y)))


@dataclass
class Counts:
    """Of one step, but for the last two: of the whole process."""

    host_waits: list[str]
    launches: int
    event_waits: int
    buckets: int
    communicators: tuple[int, int]  # made, and how many of these were split off others
    contexts: int


def counts_of(step: Callable[[], None], model: pydist.DataParallel) -> Counts:
    """What a step costs, once everything is settled."""
    for _ in range(_STEPS_BEFORE):
        step()
    is_faked = not gpu_ranks.IS_REAL
    gpu_ranks.synchronize()
    if is_faked:
        fake_cuda.take_event_waits()
    has_nccl = is_faked and os.environ["PYDIST_BACKEND"] == "nccl"
    nccl = ctypes.CDLL("libnccl.so.2") if has_nccl else None
    before = nccl.fake_nccl_launches() if nccl else 0
    host_waits = host_waits_of(step)
    return Counts(
        host_waits=host_waits,
        launches=nccl.fake_nccl_launches() - before if nccl else 0,
        event_waits=fake_cuda.take_event_waits() if is_faked else 0,
        buckets=len(model.stats().buckets),
        communicators=(
            (nccl.fake_nccl_communicators_made(), nccl.fake_nccl_communicators_split())
            if nccl
            else (0, 0)
        ),
        contexts=ctypes.CDLL("libcuda.so.1").fake_driver_contexts() if nccl else 0,
    )


def train(kind: str) -> Counts:
    install = gpu_ranks.install if os.environ["PYDIST_BACKEND"] == "nccl" else staged_gpu.install
    install(delay_us=0)
    joined()
    torch.manual_seed(0)
    inputs = torch.randint(11, (4, 5)).to("cuda")
    module = Attention()
    if kind.startswith("batch norm"):
        inputs, module = torch.randn(4, 2, 5, 5).to("cuda"), convolutions()
    if kind == "batch norm of all ranks":
        module = pydist.SyncBatchNorm.convert_sync_batchnorm(Residual())
    # Some buckets, and not one.
    model = pydist.DataParallel(
        module.to("cuda"), bucket_cap_mb=0.0003, check_finite=kind.endswith("checked")
    )
    optimizer: torch.optim.Optimizer
    if kind.startswith("stage"):
        optimizer = pydist.ShardedOptimizer(
            model, torch.optim.AdamW, lr=0.1, stage=int(kind[6]), fused=kind.endswith("scaled")
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    mask = torch.ones(4, 5).to("cuda")
    scaler = gpu_ranks.scaler() if kind.endswith("scaled") else None

    def step() -> None:
        optimizer.zero_grad()
        weighted = model.weighted(mask.sum()) if kind == "weighted" else contextlib.nullcontext()
        with weighted:
            loss = model(inputs).square().mean()
            (loss if scaler is None else scaler.scale(loss)).backward()
        if kind.endswith("clipped"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()

    return counts_of(step, model)


def saved(folder: str) -> tuple[int, int]:
    gpu_ranks.install(delay_us=0)
    joined()
    nccl = ctypes.CDLL("libnccl.so.2")
    model = pydist.DataParallel(Attention().to("cuda"))
    before = nccl.fake_nccl_communicators_made()
    pydist.checkpoint.save(folder, model=model, step=1)
    pydist.checkpoint.load(folder, model=model)
    return before, nccl.fake_nccl_communicators_made()


@needs_fake_cuda
def test_checkpoints_take_nothing_of_the_gpu(tmp_path: Path) -> None:
    """Their ranks talk by the host."""
    env = {"PYDIST_BACKEND": "nccl"}
    for before, after in run_ranks(saved, 2, str(tmp_path), env=env, timeout=50):
        assert before == after == 2


@pytest.mark.parametrize("backend", ["nccl", "native"])
@pytest.mark.parametrize(
    ("kind", "waits"),
    [
        ("attention", []),
        ("attention, clipped", []),
        ("attention, checked", []),
        ("stage 1, clipped", []),
        ("stage 2", []),
        ("batch norm", []),
        # Without NCCL the weight is a number of the host's, which tells the others.
        ("weighted", ["aten::_local_scalar_dense"]),
        # The three layers' statistics travel by the host, forward and backward, but on NCCL.
        ("batch norm of all ranks", ["aten::copy_"] * 6),
    ],
)
def test_how_often_the_host_waits(backend: str, kind: str, waits: list[str]) -> None:
    if backend == "nccl":
        waits = []
    elif gpu_ranks.IS_REAL:
        pytest.skip("what is staged is waited for on threads of its own, which count on a GPU, too")
    for found in run_ranks(train, 2, kind, env={"PYDIST_BACKEND": backend}, timeout=50):
        if gpu_ranks.IS_REAL:  # where calls have other names
            assert len(found.host_waits) == len(waits), found
        else:
            assert found.host_waits == waits


@pytest.mark.parametrize("stage", [1, 2])
def test_a_scaler_waits_for_nothing(stage: int) -> None:
    """The GPU itself leaves out the steps that it must."""
    env = {"PYDIST_BACKEND": "nccl"}
    for found in run_ranks(train, 2, f"stage {stage}, scaled", env=env, timeout=50):
        assert found.host_waits == []


@needs_fake_cuda
@pytest.mark.parametrize(
    ("kind", "directions", "beside", "communicators"),
    [
        ("attention", 1, 0, 2),  # the world's, and the wrapper's
        ("weighted", 1, 1, 2),  # the sum of the weights
        # Each layer's statistics, forward and backward, on a communicator of the layers'; and the
        # buffers that they have changed.
        ("batch norm of all ranks", 1, 7, 3),
        # Gradients are reduced and scattered, parameters gathered.
        ("stage 1", 2, 0, 3),
        ("stage 2", 2, 0, 3),
    ],
)
def test_what_a_step_costs_on_nccl(
    kind: str, directions: int, beside: int, communicators: int
) -> None:
    for found in run_ranks(train, 2, kind, env={"PYDIST_BACKEND": "nccl"}, timeout=50):
        assert found.host_waits == []
        assert found.buckets > 1
        assert found.launches == directions * found.buckets + beside, found
        assert found.event_waits <= directions * found.buckets + beside, found
        assert found.communicators == (communicators, communicators - 1)
        assert found.contexts == 1
