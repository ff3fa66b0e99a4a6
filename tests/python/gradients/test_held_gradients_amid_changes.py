"""Gradients that are held while backward raises, and while wrappers and parameters change."""

import copy
from typing import Any

import pytest
import torch
from beside_torch import STEPS, Moody, compare, gradients, order_of
from torch import Tensor, nn
from training import TIME_LIMIT, Parts, Runner, batch, joined

import pydist

pytestmark = TIME_LIMIT


def raise_while_held(cap_mb: float) -> None:
    rank, size = joined()
    model = pydist.DataParallel(Moody(), bucket_cap_mb=cap_mb)
    reference = copy.deepcopy(model)
    held: list[tuple[Tensor, Any, Tensor]] = []

    def explode(_: Tensor) -> None:
        raise ValueError("in the middle of backward")

    for step in range(STEPS):
        model.zero_grad()
        loss = model(batch(rank, 5, 4, step=step), order_of(step))
        if step % 3 == 2:
            handle = model.branches[1].weight.register_hook(explode) if rank == 1 else None
            with pytest.raises((ValueError, pydist.Error), match=r"in the middle|on rank 1"):
                loss.backward()
            if handle is not None:
                handle.remove()
        else:
            loss.backward()
            reference.zero_grad()
            for r in range(size):
                (reference(batch(r, 5, 4, step=step), order_of(step)) / size).backward()
            compare(gradients(model), gradients(reference))
            held += [(g, g.numpy(), g.clone()) for g in gradients(model) if g is not None]
        pydist.barrier()  # what was under way has arrived
        for kept, array, value in held:
            assert torch.equal(kept, value)
            assert torch.equal(torch.as_tensor(array), value)
        held = held[-20:]


@pytest.mark.parametrize("cap_mb", [1e-6, 1.0])
def test_a_backward_that_raises_leaves_what_is_held(run_on_some: Runner, cap_mb: float) -> None:
    run_on_some(raise_while_held, cap_mb)


def wrap_anew() -> None:
    rank, size = joined()
    module = Moody()
    model = pydist.DataParallel(module)
    model(batch(rank, 5, 4)).backward()
    held = [(g, g.clone()) for g in gradients(model)[:3] if g is not None]
    model = pydist.DataParallel(module)
    for step in range(4):
        model(batch(rank, 5, 4, step=step + 1)).backward()
    # Not those that the first wrapper alone still knew.
    model.zero_grad(set_to_none=False)
    model(batch(rank, 5, 4)).backward()
    model.reset_stats()
    model(batch(rank, 5, 4)).backward()
    held_bytes = sum(kept.nbytes for kept, _ in held)
    assert model.stats().copied_bytes == 2 * held_bytes, "in and out, of what is held alone"
    for (kept, _), parameter in zip(held, model.parameters(), strict=False):
        assert kept is parameter.grad
    assert size == pydist.world_size()


def test_a_model_that_is_wrapped_anew(run_on_some: Runner) -> None:
    run_on_some(wrap_anew)


def add_while_held() -> None:
    rank, size = joined()
    torch.manual_seed(5)
    module = Parts({"first": nn.Linear(4, 2, dtype=torch.float64)})
    model = pydist.DataParallel(module)
    held: list[tuple[Tensor, Tensor]] = []
    for step in range(STEPS):
        if step == 3:
            added = nn.Linear(4, 2, dtype=torch.float64)
            module["second"] = added
        for name in module:
            model.zero_grad()
            model(name, batch(rank, 5, 4, step=step)).sum().backward()
            gradient = module[name].weight.grad
            expected = torch.stack([batch(r, 5, 4, step=step).sum(0) for r in range(size)]).mean(0)
            torch.testing.assert_close(gradient, expected.expand(2, 4))
            held += [(gradient, gradient.clone())]
        for kept, value in held:
            assert torch.equal(kept, value)


def test_parameters_that_are_added_while_gradients_are_held(run_on_some: Runner) -> None:
    run_on_some(add_while_held)


def share_out_a_part() -> None:
    """Beside a sharded optimizer, which has other gradients of the model."""
    rank, size = joined()
    torch.manual_seed(5)
    module = Parts({name: nn.Linear(4, 2, dtype=torch.float64) for name in ("sharded", "whole")})

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = module

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([self.parts(name, x) for name in ("sharded", "whole")])

    model = pydist.DataParallel(Both())
    held: list[tuple[Tensor, Tensor]] = []
    for step in range(STEPS):
        if step == 2:
            optimizer = pydist.ShardedOptimizer(
                module["sharded"].parameters(), torch.optim.SGD, lr=0
            )
        model.zero_grad()
        model(batch(rank, 5, 4, step=step)).sum().backward()
        expected = torch.stack([batch(r, 5, 4, step=step).sum(0) for r in range(size)]).mean(0)
        gradient = module["whole"].weight.grad
        torch.testing.assert_close(gradient, expected.expand(2, 4))
        held += [(gradient, gradient.clone())]
        if step < 2:
            gradient = module["sharded"].weight.grad
            held += [(gradient, gradient.clone())]
            del gradient
            model.zero_grad()
        else:
            weight = module["sharded"].weight
            torch.testing.assert_close(optimizer.gradient_of(weight), expected.expand(2, 4))
            optimizer.step()
        for kept, value in held:
            assert torch.equal(kept, value)


def test_held_gradients_beside_a_sharded_optimizer(run_on_some: Runner) -> None:
    run_on_some(share_out_a_part)
