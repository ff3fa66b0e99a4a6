"""Training on several ranks against one process on the whole batch: parameters, dtypes."""

import pytest
import torch
from launch import Ranks
from torch import Tensor, nn
from training import LIMIT_S, TIME_LIMIT, Runner, assert_near, batch, joined, train_beside_reference

import pydist

pytestmark = TIME_LIMIT


def test_parity_in_float64(ranks: Ranks) -> None:
    assert max(ranks.run(train_beside_reference, "float64", 50, None, timeout=LIMIT_S)) < 1e-9


def test_parity_in_float32(ranks: Ranks) -> None:
    # 20 steps of Adam: rounding differences grow where a gradient is near zero.
    assert max(ranks.run(train_beside_reference, "float32", 20, None, timeout=LIMIT_S)) < 2e-3


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
