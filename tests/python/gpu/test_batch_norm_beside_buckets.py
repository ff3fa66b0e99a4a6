"""SyncBatchNorm on NCCL beside the buckets of a step: ranks launch in other orders, and none waits.

On a GPU that the ranks share, or on fakes.
"""

from __future__ import annotations

import copy

import gpu_ranks
import pytest
import torch
from gpu_ranks import needs_gpu_ranks
from launch import run_ranks
from torch import Tensor, nn
from training import TIME_LIMIT, batch, joined

import pydist

pytestmark = [needs_gpu_ranks, TIME_LIMIT]


class Detour(nn.Module):
    """A layer between two normalisations that some ranks do without."""

    def __init__(self) -> None:
        super().__init__()
        wide = {"dtype": torch.float64}
        self.first, self.last = nn.Linear(4, 6, **wide), nn.Linear(6, 2, **wide)
        self.before, self.after = (nn.BatchNorm1d(6, **wide) for _ in range(2))
        self.detour = nn.Sequential(nn.Linear(6, 6, **wide), nn.Tanh(), nn.Linear(6, 6, **wide))

    def forward(self, parts: list[Tensor], detours: list[bool]) -> list[Tensor]:
        sizes = [len(part) for part in parts]
        x = self.before(self.first(torch.cat(parts)))
        ways = [
            part + self.detour(part) if takes else part
            for part, takes in zip(x.split(sizes), detours, strict=True)
        ]
        return list(self.last(self.after(torch.cat(ways))).split(sizes))


def in_other_orders() -> None:
    gpu_ranks.install(delay_us=100)
    rank, size = joined()
    torch.manual_seed(5)
    reference = Detour()
    module = pydist.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(reference)).to("cuda")
    # A bucket for each parameter, or nearly.
    model = pydist.DataParallel(module, bucket_cap_mb=0.0001)
    for step in range(6):
        detours = [(r + step) % size == 0 for r in range(size)]
        inputs = [batch(r, 3 + r, 4, step=step) for r in range(size)]
        model.zero_grad()
        reference.zero_grad()
        (mine,) = model([inputs[rank].to("cuda")], [detours[rank]])
        mine.square().sum().backward()
        outputs = reference(inputs, detours)
        (sum(output.square().sum() for output in outputs) / size).backward()
        torch.testing.assert_close(mine.cpu(), outputs[rank])
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad.cpu(), reference.get_parameter(name).grad)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer.cpu(), reference.get_buffer(name))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("backend", ["nccl", "native"])
def test_no_launch_waits_in_a_circle(size: int, backend: str) -> None:
    run_ranks(in_other_orders, size, env={"PYDIST_BACKEND": backend}, timeout=45)
