"""A backward that raises on some ranks: all hear of it, and all can go on."""

import copy
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import TIME_LIMIT, Runner, assert_near, batch, joined

import pydist

pytestmark = TIME_LIMIT


class Explode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise ArithmeticError("boom")


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(4))
        self.explode_before: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x).tanh()
            if number == self.explode_before:
                x = Explode.apply(x)
        return x


def survive_explosions(cap_mb: float) -> None:
    rank, size = joined()
    torch.manual_seed(0)
    model = pydist.DataParallel(Fragile(), bucket_cap_mb=cap_mb)
    reference = copy.deepcopy(model)
    for step, culprits in enumerate(([], [1], [], list(range(size)), [0, 1], [])):
        # 3: before any parameter has its gradient. 1: half way. Never after the last bucket.
        for place in (3, 1):
            model.zero_grad()
            reference.zero_grad()
            model.module.explode_before = place if rank in culprits else None
            loss = model(batch(rank, 5, 4, step=step)).mean()
            if rank in culprits:
                with pytest.raises(ArithmeticError, match="boom"):
                    loss.backward()
            elif culprits:
                names = ", ".join(map(str, culprits))
                with pytest.raises(pydist.Error, match=f"backward raised on rank {names},"):
                    loss.backward()
            else:
                loss.backward()
                for r in range(size):
                    (reference(batch(r, 5, 4, step=step)).mean() / size).backward()
                for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
                    assert_near(ours.grad, theirs.grad)
    # Other collectives of the job were never in the way.
    total = torch.ones(1)
    pydist.all_reduce(total)
    assert total == size


@pytest.mark.parametrize("cap_mb", [1e-6, 1.0])
def test_backward_that_raised(run: Runner, cap_mb: float) -> None:
    run(survive_explosions, cap_mb)


def raise_and_zero_in_place(set_to_none: bool) -> None:
    rank, size = joined()
    torch.manual_seed(0)
    model = pydist.DataParallel(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)).double())
    reference = copy.deepcopy(model)
    # So that gradients lie in the arena already.
    model(batch(rank, 2, 3)).sum().backward()
    model.zero_grad(set_to_none=set_to_none)

    def explode(_: Tensor) -> None:
        raise ValueError("in the middle of backward")

    out = model.module[0](batch(rank, 2, 3))
    if rank == 1:
        out.register_hook(explode)
    else:
        time.sleep(0.3)  # the round goes on after rank 1 has zeroed its gradients
    with pytest.raises((ValueError, pydist.Error), match=r"in the middle|raised on rank 1"):
        model.module[1](out).sum().backward()
    model.zero_grad(set_to_none=set_to_none)
    model(batch(rank, 2, 3, step=1)).sum().backward()
    for r in range(size):
        (reference(batch(r, 2, 3, step=1)).sum() / size).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert_near(ours.grad, theirs.grad)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_clean_after_a_backward_that_raised(run: Runner, set_to_none: bool) -> None:
    run(raise_and_zero_in_place, set_to_none)


def raise_at_the_very_end() -> str:
    rank, _ = joined()
    model = pydist.DataParallel(nn.Linear(3, 1))

    def explode(_: Tensor) -> None:
        raise ValueError("after the last parameter")

    x = torch.ones(1, 3, requires_grad=True)
    if rank == 2:
        x.register_hook(explode)
    with pytest.raises((ValueError, pydist.Error)) as caught:
        model(x).sum().backward()
    pydist.barrier()  # whoever leaves earlier is lost to the others
    return str(caught.value)


def test_backward_that_raises_after_its_last_parameter(run: Runner) -> None:
    first, second, third = run(raise_at_the_very_end)
    assert "raised on rank 2" in first
    assert "raised on rank 2" in second
    assert third == "after the last parameter"
