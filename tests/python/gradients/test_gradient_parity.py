"""Training on several ranks against one process on the whole batch: parameters, dtypes."""

import copy

import pytest
import torch
from launch import Ranks
from torch import Tensor, nn
from training import (
    LIMIT_S,
    TIME_LIMIT,
    Runner,
    Tied,
    assert_near,
    batch,
    joined,
    train_beside_reference,
    train_like_reference,
)

import pydist

pytestmark = TIME_LIMIT


@pytest.fixture(scope="module", params=["native", "gloo"])
def backend(request: pytest.FixtureRequest) -> str:
    """Both, each time: here DataParallel meets gloo in the everyday tests."""
    return str(request.param)


def test_parity_in_float64(ranks: Ranks) -> None:
    assert max(ranks.run(train_beside_reference, "float64", 50, None, timeout=LIMIT_S)) < 1e-9


def spread_of_reordered_sums(size: int, steps: int) -> float:
    """How far runs in one process come apart if the samples of each batch are in another order."""
    runs = []
    for run in range(6):
        torch.manual_seed(3)
        model = Tied(torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(steps):
            x = torch.cat([batch(r, 6, 8, step=step, dtype=torch.float32) for r in range(size)])
            generator = torch.Generator().manual_seed(run)
            order = torch.randperm(len(x), generator=generator) if run else torch.arange(len(x))
            optimizer.zero_grad()
            model(x[order]).mean().backward()
            optimizer.step()
        runs.append(torch.cat([p.detach().double().flatten() for p in model.parameters()]))
    return max((run - runs[0]).abs().max().item() for run in runs)


def test_parity_in_float32(ranks: Ranks) -> None:
    worst = max(ranks.run(train_beside_reference, "float32", 20, None, timeout=LIMIT_S))
    # Ours is one more order; the largest of five is a sample of the spread, not its bound.
    assert worst < 4 * spread_of_reordered_sums(ranks.nprocs, 20)


def test_parity_with_a_bucket_for_each_parameter(run: Runner) -> None:
    assert max(run(train_beside_reference, "float64", 20, 1e-6)) < 1e-9


class ManyDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        names = ("float64", "float32", "bfloat16", "float16", "complex64", "complex128")
        self.values = nn.ParameterList(
            [torch.ones(5, 3, dtype=getattr(torch, name)) for name in names]
            + [torch.empty(0, 4), torch.ones(())]
        )

    def forward(self, rank: int) -> Tensor:
        # The derivative of the real part of p * conj(v) reaches the gradient of p as v.
        parts = [(p * self.factor(rank, p).conj()).sum().real for p in self.values]
        return torch.stack([part.double() for part in parts]).sum()

    def factor(self, rank: int, parameter: Tensor) -> Tensor:
        values = batch(rank, *parameter.shape).to(parameter.dtype)
        return values * (1 + 2j) if parameter.is_complex() else values


def mean_of_dtypes(cap_mb: float) -> None:
    rank, size = joined()
    model = pydist.DataParallel(ManyDtypes(), bucket_cap_mb=cap_mb)
    model(rank).backward()
    for parameter in model.values:
        wide = torch.complex128 if parameter.is_complex() else torch.float64
        everyone = [model.factor(r, parameter).to(wide) for r in range(size)]
        assert parameter.grad is not None
        tolerance = 4 * torch.finfo(parameter.dtype).eps
        assert_near(parameter.grad.to(wide), torch.stack(everyone).mean(0), tolerance)


@pytest.mark.parametrize("cap_mb", [1e-6, 1.0])
def test_dtypes(run: Runner, cap_mb: float) -> None:
    run(mean_of_dtypes, cap_mb)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


class Layouts(nn.Module):
    """Gradients that autograd hands over in other layouts than their parameters'."""

    def __init__(self) -> None:
        super().__init__()
        self.expanded = nn.Parameter(normal(3, 4))
        self.transposed = nn.Parameter(normal(3, 4))
        self.conjugated = nn.Parameter(torch.randn(3, dtype=torch.complex128))
        self.negated = nn.Parameter(torch.randn(3, dtype=torch.complex128))
        # Neither dense nor in order: no stride of its own for the gradient.
        self.holes = nn.Parameter(normal(3, 8)[:, ::2])
        self.permuted = nn.Parameter(normal(2, 3, 4).permute(1, 2, 0))
        volume = nn.Conv3d(2, 2, 2, dtype=torch.float64)
        self.volume = volume.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
        self.pieces = nn.Parameter(normal(6))
        self.scalar = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        self.empty = nn.Parameter(normal(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        scale = x.sum()
        parts = [
            self.expanded.sum() * scale,  # one number, with strides of zero
            (self.transposed.t() @ x[:3, :1]).sin().sum(),
            (self.conjugated.conj() * x[0, 0]).imag.sum(),  # a view with the conjugate bit
            (self.negated.conj().imag * x[0, 1]).sum(),
            (self.holes * x[:3, :4]).sum(),
            (self.permuted.sum(2) @ x[:4, :4]).sin().sum(),
            self.volume(x[:4, :4].reshape(1, 2, 2, 2, 2)).sin().sum(),
            torch.stack([p * x[0, 0] for p in self.pieces.chunk(3)]).sum(),
            self.scalar.sin() * scale,
            self.empty.sum(),
        ]
        return torch.stack([part.real for part in parts]).sum()


def train_layouts(cap_mb: float, relaid: bool) -> None:
    joined()
    torch.manual_seed(0)
    reference = Layouts()
    model = pydist.DataParallel(copy.deepcopy(reference), bucket_cap_mb=cap_mb)
    if relaid:
        # Other memory and other strides for the parameter than when it was wrapped.
        model.volume.to(memory_format=torch.contiguous_format)

    def loss(net: nn.Module, rank: int, step: int) -> Tensor:
        out: Tensor = net(batch(rank, 5, 5, step=step))
        return out

    train_like_reference(model, reference, loss, tolerance=1e-11)
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.is_conj()
        assert not parameter.grad.is_neg()


@pytest.mark.parametrize("cap_mb", [1e-6, 1.0])
@pytest.mark.parametrize("relaid", [False, True])
def test_layouts(run: Runner, cap_mb: float, relaid: bool) -> None:
    run(train_layouts, cap_mb, relaid)
