"""What the tests of training share: ranks on each backend, batches, and a model with a reference.

Every rank computes the reference itself: the same model, on the batches of all ranks.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from launch import Ranks
from torch import Tensor, nn

import pydist

# Of a call on all ranks, and of a test: the first says more when it passes.
LIMIT_S = 25.0
TIME_LIMIT = pytest.mark.timeout(30)
Runner = Callable[..., list[Any]]


@pytest.fixture(scope="module", params=["native", "gloo"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=[2, 3, 4])
def ranks(request: pytest.FixtureRequest, backend: str) -> Iterator[Ranks]:
    with Ranks(request.param, {"PYDIST_BACKEND": backend}) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def three(backend: str) -> Iterator[Ranks]:
    with Ranks(3, {"PYDIST_BACKEND": backend}) as ranks:
        yield ranks


@pytest.fixture
def run(three: Ranks) -> Runner:
    return lambda function, *args: three.run(function, *args, timeout=LIMIT_S)


def joined() -> tuple[int, int]:
    """Joins the job; returns this process's rank and the number of ranks."""
    torch.set_num_threads(1)
    pydist.init()
    return pydist.rank(), pydist.world_size()


def assert_near(ours: Tensor | None, theirs: Tensor | None, tolerance: float = 1e-12) -> None:
    assert ours is not None
    assert theirs is not None
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def batch(rank: int, *shape: int, step: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """A rank's inputs in a step, which every rank can compute."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


class Branches(nn.Module):
    """Of several branches, each forward takes one."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4, dtype=torch.float64)
        self.branches = nn.ModuleList(nn.Linear(4, 1, dtype=torch.float64) for _ in range(count))
        self.never = nn.Linear(4, 1, dtype=torch.float64)

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.branches[which](self.trunk(x).tanh()).mean()


class Tied(nn.Module):
    """A shared weight, a frozen one, one in channels-last layout, and mixed precision inside."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.inside = nn.Linear(8, 16, dtype=dtype)
        self.image = nn.Conv2d(2, 3, 2, dtype=dtype).to(memory_format=torch.channels_last)
        self.frozen = nn.Parameter(torch.randn(16, dtype=dtype), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(16, dtype=torch.float64))
        self.outside = nn.Linear(16, 8, bias=False, dtype=dtype)
        self.outside.weight = nn.Parameter(self.inside.weight.detach().t().clone().t())
        self.again = nn.Linear(8, 16, dtype=dtype)
        self.again.weight = self.inside.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.inside(x).tanh() + self.frozen
        z = self.outside.weight.reshape(16, 8)
        y = self.again((y * self.scale).to(x.dtype) @ z)
        return y.square().mean(-1) + self.image(x.view(-1, 2, 2, 2)).square().mean((1, 2, 3))


def train_beside_reference(dtype_name: str, steps: int, cap_mb: float | None) -> float:
    """Trains `Tied` here and on the whole batch; returns how far the parameters ever were apart."""
    dtype = getattr(torch, dtype_name)
    rank, size = joined()
    torch.manual_seed(3)
    reference = Tied(dtype)
    torch.manual_seed(3 if rank == 0 else 4)  # the values come from rank 0
    module = Tied(dtype)
    model = pydist.DataParallel(module, bucket_cap_mb=cap_mb)
    ours = torch.optim.AdamW(model.parameters(), lr=1e-2)
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    worst = 0.0
    for step in range(steps):
        batches = [batch(r, 6, 8, step=step, dtype=dtype) for r in range(size)]
        ours.zero_grad(set_to_none=step % 2 == 0)
        model(batches[rank]).mean().backward()
        ours.step()
        theirs.zero_grad()
        reference(torch.cat(batches)).mean().backward()
        theirs.step()
        for a, b in zip(model.parameters(), reference.parameters(), strict=True):
            worst = max(worst, (a - b).abs().max().item())
    return worst
