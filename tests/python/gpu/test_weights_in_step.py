"""Weights that a GPU computes, where ranks come to what they launch in different orders."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import Any

import fake_cuda
import gpu_ranks
import pytest
import torch
from fake_cuda import needs_fake_cuda
from gpu_ranks import needs_gpu_ranks
from launch import run_ranks
from torch import Tensor, nn
from training import TIME_LIMIT, batch, joined

import pydist

pytestmark = [needs_gpu_ranks, TIME_LIMIT]

NCCL: dict[str, str | None] = {"PYDIST_BACKEND": "nccl", "PYDIST_TIMEOUT": "15"}


def start() -> int:
    gpu_ranks.install(delay_us=0)
    rank, _ = joined()
    torch.manual_seed(0)
    return rank


def given(kind: str, weight: float) -> float | Tensor:
    return torch.tensor(weight, device="cuda") if kind == "on the GPU" else weight


class Normalized(nn.Module):
    """Layers whose statistics are summed over the ranks between their gradients' buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(6))
        self.norms = nn.ModuleList(nn.BatchNorm1d(6) for _ in range(6))
        self.rare = nn.Linear(6, 6)

    def forward(self, x: Tensor, uses_rare: bool) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(layer(x)).tanh()
        return self.rare(x) if uses_rare else x


def beside_statistics(kind: str) -> list[Tensor]:
    rank = start()
    module = pydist.SyncBatchNorm.convert_sync_batchnorm(Normalized()).double().to("cuda")
    model = pydist.DataParallel(module, bucket_cap_mb=1e-4)
    for step in range(6):
        model.zero_grad()
        out = model(batch(rank, 3 + rank, 6, step=step).to("cuda"), rank == step % 2)
        with model.weighted(given(kind, 3.0 + rank)):
            out.square().sum().backward()
        gpu_ranks.synchronize()
    return [each.grad.cpu() for each in model.parameters() if each.grad is not None]


def test_no_rank_waits_for_what_another_has_yet_to_launch() -> None:
    """The host's weights and the GPU's leave the same."""
    found = [
        run_ranks(beside_statistics, 2, kind, env=NCCL, timeout=40)
        for kind in ("on the GPU", "on the host")
    ]
    for on_gpu, on_host in zip(*found, strict=True):
        for one, other in zip(on_gpu, on_host, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def go_backward_through_two() -> None:
    """The ranks come to two models in different orders."""
    rank = start()
    towers = [pydist.DataParallel(nn.Linear(4, 4).to("cuda"), bucket_cap_mb=1e-5) for _ in range(2)]
    weight = torch.tensor(2.0 + rank, device="cuda")
    for step in range(4):
        x = batch(rank, 5, 4, dtype=torch.float32, step=step).to("cuda")
        order = towers if rank == 0 else towers[::-1]
        outputs = [tower(x) for tower in order]
        with towers[0].weighted(weight), towers[1].weighted(weight):
            torch.stack([each.sin().mean() for each in outputs]).sum().backward()
        gpu_ranks.synchronize()
    for parameter in (*towers[0].parameters(), *towers[1].parameters()):
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()


def test_several_models_in_one_backward() -> None:
    run_ranks(go_backward_through_two, 2, env=NCCL, timeout=40)


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, __: Tensor) -> Tensor:
        raise RuntimeError("out of luck")


class Unlucky(nn.Module):
    """Two layers. Backward raises before the gradients of both, or of the first, if told so."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 3), nn.Linear(3, 2)])
        self.raises_after: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x)
            x = _Raises.apply(x) if self.raises_after == number else x.sin()
        return x


def go_wrong() -> None:
    """Each way in which a step fails, on all ranks; the next step is as ever."""
    rank = start()
    torch.manual_seed(0)
    module = Unlucky().double().to("cuda")
    model = pydist.DataParallel(module, bucket_cap_mb=1e-5)
    inputs = batch(rank, 5, 4).to("cuda")
    weight = torch.tensor((2.0, 3.0)[rank], device="cuda")

    def step() -> list[Tensor]:
        model.zero_grad()
        with model.weighted(weight):
            model(inputs).mean().backward()
        return [each.grad.clone() for each in model.parameters() if each.grad is not None]

    expected = step()
    error = RuntimeError if rank == 0 else pydist.Error
    match = "out of luck" if rank == 0 else "backward raised on rank 0"
    for place in (1, 0):
        module.raises_after = place if rank == 0 else None
        with pytest.raises(error, match=match):
            step()
        module.raises_after = None
        for one, other in zip(step(), expected, strict=True):
            assert torch.equal(one, other)
    # A weight on one rank alone.
    model.zero_grad()
    loss = model(inputs).mean()
    weighted = model.weighted(weight) if rank == 1 else contextlib.nullcontext()
    with pytest.raises(pydist.Error, match="gave this backward a weight and rank 0"), weighted:
        loss.backward()


def test_a_step_that_fails() -> None:
    run_ranks(go_wrong, 2, env=NCCL, timeout=40)


def mixed(raising: int, weighing: int, dtype: torch.dtype) -> None:
    """One rank raises, and another has given a weight; the next step is as ever."""
    rank = start()
    module = Unlucky().to("cuda", dtype)
    model = pydist.DataParallel(module)
    x = batch(rank, 5, 4).to("cuda", dtype)

    def step() -> Tensor:
        model.zero_grad()
        with model.weighted(torch.tensor(2.0 + rank, device="cuda")):
            model(x).mean().backward()
        gradient = module.layers[0].weight.grad
        assert isinstance(gradient, Tensor)
        return gradient.clone()

    expected = step()
    model.zero_grad()
    module.raises_after = 1 if rank == raising else None
    weight = torch.tensor(2.0, device="cuda")
    loss = model(x).mean()
    weighted = model.weighted(weight) if rank == weighing else contextlib.nullcontext()
    error = RuntimeError if rank == raising else pydist.Error
    with pytest.raises(error, match=r"out of luck|backward raised on rank"), weighted:
        loss.backward()
    module.raises_after = None
    assert torch.equal(step(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("raising", "weighing"), [(0, 1), (1, 1), (0, 0)])
def test_one_rank_raises(raising: int, weighing: int, dtype: torch.dtype) -> None:
    run_ranks(mixed, 2, raising, weighing, dtype, env=NCCL, timeout=40)


def fail_to_synchronize() -> None:
    """A rank without gradients cannot take part in averaging what another has accumulated."""
    rank = start()
    model = pydist.DataParallel(nn.Linear(4, 3).to("cuda", torch.bfloat16))
    x = torch.ones(2, 4, device="cuda", dtype=torch.bfloat16)
    with model.no_sync(), model.weighted(torch.tensor(2.0, device="cuda")):
        model(x).mean().backward()
    if rank == 0:
        model.module.weight.grad = torch.ones_like(model.module.weight)
    error = pydist.InvalidUsage if rank == 0 else pydist.Error
    with pytest.raises(error, match=r"replaced|backward raised on rank 0"):
        model.sync_gradients()
    model.zero_grad()
    model(x).mean().backward()


def test_sync_gradients_that_one_rank_cannot() -> None:
    run_ranks(fail_to_synchronize, 2, env=NCCL, timeout=40)


def capture_and_go_on() -> None:
    rank = start()
    model = pydist.DataParallel(nn.Linear(4, 3).double().to("cuda"))
    x = batch(rank, 5, 4).to("cuda")
    weight = torch.tensor(2.0 + rank, device="cuda")

    def step() -> None:
        with model.weighted(weight):
            model(x).mean().backward()

    for _ in range(3):
        step()
    with pytest.raises(pydist.InvalidUsage, match="gave it a weight"), gpu_ranks.Graph():
        step()
    for _ in range(3):
        model.zero_grad()
        step()
    gpu_ranks.synchronize()


def test_a_capture_is_refused_and_harms_nothing() -> None:
    run_ranks(capture_and_go_on, 2, env=NCCL, timeout=40)


def weigh_by_another_gpu() -> None:
    gpu_ranks.install(delay_us=0)
    fake_cuda.install(2)
    rank, _ = joined()
    model = pydist.DataParallel(nn.Linear(4, 3).double().to("cuda:0"))
    x = batch(rank, 5, 4).to("cuda:0")
    found = []
    for device in ("cuda:0", "cuda:1"):
        model.zero_grad()
        with model.weighted(torch.tensor(2.0 + rank, device=device if rank else "cuda:0")):
            model(x).mean().backward()
        found += [each.grad.cpu() for each in model.parameters() if each.grad is not None]
    half = len(found) // 2
    assert all(map(torch.equal, found[:half], found[half:]))


@needs_fake_cuda
def test_a_weight_on_another_gpu() -> None:
    run_ranks(weigh_by_another_gpu, 2, env=NCCL, timeout=40)


def launches_of(step: Callable[[], None]) -> int:
    nccl = ctypes.CDLL("libnccl.so.2")
    before = nccl.fake_nccl_launches()
    step()
    return int(nccl.fake_nccl_launches() - before)


def reduce_a_large_bucket() -> tuple[int, int]:
    rank = start()
    model = pydist.DataParallel(nn.Linear(3000, 3000).to("cuda"), bucket_cap_mb=100)
    x = torch.ones(1, 3000, device="cuda")
    weight = torch.tensor(2.0 + rank, device="cuda")

    def step() -> None:
        model.zero_grad()
        with model.weighted(weight):
            model(x).mean().backward()

    for _ in range(4):
        step()
    return launches_of(step), len(model.stats().buckets)


@pytest.mark.skipif(gpu_ranks.IS_REAL, reason="counted on the stand-in")
def test_a_large_bucket_is_one_launch() -> None:
    for launches, buckets in run_ranks(reduce_a_large_bucket, 2, env=NCCL, timeout=40):
        assert buckets == 1
        assert launches == buckets + 1  # and the sum of the weights
