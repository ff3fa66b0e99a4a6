"""Sharded training on GPUs beside training with a whole optimizer."""

from __future__ import annotations

import copy
import os
from typing import Any

import fake_cuda
import gpu_ranks
import pytest
import torch
from torch import Tensor, nn
from training import batch, joined

import pydist

# Parts of 64 KiB, so that a bucket may take several.
ENVIRONMENTS: dict[str, dict[str, str | None]] = {
    "nccl": {"PYDIST_BACKEND": "nccl"},
    "native": {"PYDIST_BACKEND": "native", "PYDIST_STAGING_BYTES": "65536"},
    "gloo": {"PYDIST_BACKEND": "gloo", "PYDIST_STAGING_BYTES": "65536"},
}

# Of one call of ranks, in seconds.
LIMIT_S = 40.0

STAGES = pytest.mark.parametrize("stage", [1, 2])


def start(delay_us: int = 50) -> tuple[int, int]:
    if os.environ["PYDIST_BACKEND"] == "nccl":
        gpu_ranks.install(delay_us=delay_us)
    elif gpu_ranks.IS_REAL:
        torch.cuda.set_device(0)
    else:
        fake_cuda.install()
        fake_cuda.set_delay_us(delay_us)
    return joined()


def is_on_nccl() -> bool:
    return pydist.backend() == "nccl"


class Parts(nn.Module):
    """Sizes that nothing divides, complex numbers, a shared weight, what nobody uses or trains."""

    def __init__(self, turn: torch.dtype) -> None:
        super().__init__()
        self.inside = nn.Linear(10, 33, dtype=torch.float64)
        self.norm = nn.LayerNorm(33, dtype=torch.float64)
        self.branches = nn.ModuleList(nn.Linear(33, 71, dtype=torch.float64) for _ in range(3))
        self.turn = nn.Parameter(torch.randn(71, dtype=turn))
        self.scalar = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        self.empty = nn.Parameter(torch.zeros(0, 3, dtype=torch.float64))
        self.transposed = nn.Parameter(torch.randn(7, 71, dtype=torch.float64).div(20).t())
        self.single = nn.Parameter(torch.randn(301))
        self.never = nn.Linear(5, 3)
        self.frozen = nn.Parameter(torch.randn(7, dtype=torch.float64), requires_grad=False)

    def forward(self, x: Tensor, which: list[int]) -> Tensor:
        y = self.norm(self.inside(x.to(self.frozen.device)).tanh())
        y = sum(self.branches[i](y) for i in which)
        y = (y * self.turn).abs() @ self.transposed + self.frozen
        # In float32, and so of little weight.
        single = (self.single * 0.7).cos().mean().double() * 1e-3
        return (y * self.scalar).square().mean() + single + self.empty.sum()


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    # Ranks use other branches, and no rank uses the second one at first.
    which = [[0], [0, 2], [2]][(rank + step) % 3] + ([1] if step > 2 else [])
    loss: Tensor = model(batch(rank, 6, 10, step=step), which)
    return loss


class Twins:
    """A model on the GPU with a sharded optimizer, and the whole of it in this process."""

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
        *,
        stage: Any = 1,
        cap_mb: float = 0.004,
        turn: torch.dtype = torch.complex128,
        **options: Any,
    ) -> None:
        self.rank, self.size = start()
        torch.manual_seed(1)
        self.reference = Parts(turn)
        module = copy.deepcopy(self.reference).to("cuda")
        self.model = pydist.DataParallel(module, bucket_cap_mb=cap_mb)
        options = {"lr": 0.01, **options}
        self.ours = pydist.ShardedOptimizer(self.model, optimizer_class, stage=stage, **options)
        self.theirs = optimizer_class(self.reference.parameters(), **options)

    def backward(self, step: int) -> None:
        """On both, with the mean of all ranks' losses on the reference."""
        loss = loss_of(self.model, self.rank, step)
        loss.backward()
        for rank in range(self.size):
            theirs = loss_of(self.reference, rank, step)
            if rank == self.rank:
                assert_near(loss, theirs, f"loss of step {step}")
            (theirs / self.size).backward()

    def step(self, number: int) -> None:
        self.ours.zero_grad()
        self.theirs.zero_grad()
        self.backward(number)
        self.ours.step()
        self.theirs.step()

    def check(self, what: str) -> None:
        pairs = zip(self.model.named_parameters(), self.reference.parameters(), strict=True)
        for (name, ours), theirs in pairs:
            assert ours.device.type == "cuda"
            assert_near(ours, theirs, f"{what}: {name}")


def assert_near(ours: Tensor, theirs: Tensor, what: str) -> None:
    tolerance = 1e-9 if ours.dtype in (torch.float64, torch.complex128) else 1e-5
    torch.testing.assert_close(
        ours.detach().cpu(),
        theirs.detach(),
        rtol=tolerance,
        atol=tolerance,
        msg=lambda text: f"{what}: {text}",
    )
