"""NCCL on a GPU that the CUDA kernels of the build do not know."""

from __future__ import annotations

import os

import gpu_ranks
import pytest
import torch
import torch.distributed as dist
from gpu_ranks import needs_gpu_ranks
from launch import rank_outcomes, run_ranks
from torch import nn
from training import (
    TIME_LIMIT,
    assert_near,
    batch,
    joined,
)

import pydist

pytestmark = [needs_gpu_ranks, TIME_LIMIT]

NCCL: dict[str, str | None] = {"PYDIST_BACKEND": "nccl"}


def start() -> tuple[int, int]:
    gpu_ranks.install(delay_us=300)
    return joined()


def refused_without_kernels() -> str:
    # As where the GPU of one rank is of a kind that the kernels were not compiled for.
    if os.environ["RANK"] == "1":
        os.environ["FAKE_CUDA_KERNELS"] = "foreign"
    start()
    groups = [None, dist.new_group([0, 1]), dist.new_group([1, 0])]
    for group in groups:
        with pytest.raises(ValueError, match="needs pydist's CUDA kernels") as refusal:
            dist.all_reduce(torch.ones(3, device="cuda"), op=dist.ReduceOp.MAX, group=group)
        assert "error 209" in str(refusal.value)
        assert "PYDIST_BACKEND=native" in str(refusal.value)
    pydist.shutdown()
    return str(refusal.value)


@pytest.mark.skipif(gpu_ranks.IS_REAL, reason="no GPU is unknown to a build for this machine")
def test_what_needs_the_kernels_is_refused_with_the_reason_that_is_told_once() -> None:
    outcomes = rank_outcomes(refused_without_kernels, 2, env=NCCL, timeout=35)
    for outcome in outcomes:
        assert outcome.ok, outcome.describe()
        assert outcome.output.count("does without pydist's CUDA kernels: ") == 1, outcome.output
        assert "error 209" in outcome.output
    assert "rank 1 of group 'group 2' cannot use them" in outcomes[0].value


def trained_without_kernels() -> None:
    rank, size = start()
    assert pydist.backend() == "nccl"
    # At once: in a backward ranks would meet each other's refusals.
    with pytest.raises(pydist.InvalidUsage, match=r"in a wire type needs .*error 209"):
        pydist.DataParallel(nn.Linear(4, 2).to("cuda"), compress="bf16")
    pydist.DataParallel(nn.Linear(4, 2), compress="bf16")(torch.ones(3, 4)).sum().backward()

    # Models after one that was refused train on; each rank's mean counts as its rows do.
    def rows(each: int) -> int:
        return 2 * each + 1

    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        torch.manual_seed(8)
        module = nn.Linear(4, 2, dtype=dtype)
        reference = nn.Linear(4, 2, dtype=torch.float64)
        reference.load_state_dict(module.state_dict())
        model = pydist.DataParallel(module.to("cuda"))
        with model.weighted(rows(rank)):
            model(batch(rank, rows(rank), 4, dtype=dtype).to("cuda")).square().mean().backward()
        everything = torch.cat([batch(r, rows(r), 4, dtype=dtype) for r in range(size)])
        reference(everything.double()).square().mean().backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert ours.grad is not None
            assert_near(ours.grad.cpu().double(), theirs.grad, tolerance)

    # Ranks that run out of batches, and a mean over those that have one.
    module = nn.Linear(4, 2, dtype=torch.float64).to("cuda")
    model = pydist.DataParallel(module)
    with model.join(divide_by_initial_world_size=False):
        for step in range(1 + rank):
            model.zero_grad()
            model(batch(rank, 3, 4, step=step).to("cuda")).sum().backward()
            present = [batch(r, 3, 4, step=step).sum(0) for r in range(step, size)]
            assert module.weight.grad is not None
            mean = torch.stack(present).mean(0).expand(2, 4)
            assert_near(module.weight.grad.cpu(), mean)
    pydist.shutdown()


@pytest.mark.skipif(gpu_ranks.IS_REAL, reason="no GPU is unknown to a build for this machine")
def test_training_without_kernels() -> None:
    run_ranks(trained_without_kernels, 3, env={**NCCL, "FAKE_CUDA_KERNELS": "foreign"}, timeout=35)


def refused_on_the_ring() -> None:
    start()
    with pytest.raises(pydist.InvalidUsage, match=r"on the ring needs .*error 209"):
        pydist.DataParallel(nn.Linear(4, 2).to("cuda"), bucket_cap_mb=1)
    pydist.shutdown()


@pytest.mark.skipif(gpu_ranks.IS_REAL, reason="no GPU is unknown to a build for this machine")
def test_no_model_is_wrapped_whose_gradients_need_kernels_that_are_not_there() -> None:
    env = {**NCCL, "FAKE_CUDA_KERNELS": "foreign", "PYDIST_ALGORITHM": "ring"}
    run_ranks(refused_on_the_ring, 2, env=env, timeout=35)
