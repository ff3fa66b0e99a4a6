"""Gradients of several MiB, in whatever form backward hands them over."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import TIME_LIMIT, Runner, joined

import pydist

pytestmark = TIME_LIMIT


class Give(torch.autograd.Function):
    """A scalar of which a parameter's gradient is the given one."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Tensor, None]:
        return ctx.gradient, None


class Holder(nn.Module):
    def __init__(self, parameter: Tensor) -> None:
        super().__init__()
        self.parameter = nn.Parameter(parameter)

    def forward(self, gradient: Tensor) -> Tensor:
        out: Tensor = Give.apply(self.parameter, gradient)
        return out


def in_form(values: Tensor, form: str) -> Tensor:
    """The same values in other memory."""
    if form == "transposed":
        return values.t().contiguous().t()
    if form == "behind one element":
        room = values.new_zeros(values.numel() + 1)
        return room[1:].view_as(values).copy_(values)
    if form == "one row":
        return values[:1].expand_as(values)
    if form == "negated":
        return torch._neg_view(-values)
    if form == "conjugated":
        return values.conj().resolve_conj().conj()
    return values.clone()


FORMS = ("dense", "transposed", "behind one element", "one row", "negated")


def average(dtype: torch.dtype, shape: tuple[int, int], threads: int) -> None:
    rank, size = joined()
    torch.set_num_threads(threads)
    holder = Holder(torch.zeros(shape, dtype=dtype))
    model = pydist.DataParallel(holder)
    # So small that every sum is exact in any type.
    values = (torch.arange(shape[0] * shape[1]).view(shape) * 7 % 13).to(dtype)
    if dtype.is_complex:
        values = values + 1j * (values.real + 1)
    for form in (*FORMS, "conjugated"):
        if form == "conjugated" and not dtype.is_complex:
            continue
        for turn in range(2):
            model.zero_grad()
            model(in_form(values * 2 * (rank + 1), form)).backward()
            wanted = values[:1].expand_as(values) if form == "one row" else values
            assert holder.parameter.grad is not None
            assert torch.equal(holder.parameter.grad, wanted * (size + 1)), (form, turn)
        # Added to what is there.
        model(in_form(values * 2 * (rank + 1), form)).backward()
        assert torch.equal(holder.parameter.grad, wanted * 2 * (size + 1)), form


@pytest.mark.parametrize(
    ("dtype", "shape", "threads"),
    [
        (torch.float32, (1021, 1031), 3),
        (torch.bfloat16, (1201, 1301), 2),
        (torch.complex64, (701, 601), 1),
    ],
    ids=str,
)
def test_they_are_averaged_in_whatever_form(
    run_on_each: Runner, dtype: torch.dtype, shape: tuple[int, int], threads: int
) -> None:
    run_on_each(average, dtype, shape, threads)
