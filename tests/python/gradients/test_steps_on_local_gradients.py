"""Steps of the optimizer on gradients that are not averaged are refused, or meant so."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from training import TIME_LIMIT, Runner, batch, joined

import pydist

pytestmark = TIME_LIMIT


def step_too_early() -> None:
    rank, _ = joined()
    model = pydist.DataParallel(nn.Linear(2, 1))
    other = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = batch(rank, 3, 2, dtype=torch.float32)
    with model.no_sync():
        model(x).sum().backward()
    other(x).sum().backward()
    with pytest.raises(pydist.InvalidUsage, match="never averaged"):
        optimizer.step()
    # Others' parameters are others' business; and who steps inside no_sync() means it.
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    with model.no_sync():
        optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
    with model.no_sync():
        model(x).sum().backward()
    model(x).sum().backward()
    optimizer.step()


def test_a_step_before_averaging_is_refused(run: Runner) -> None:
    run(step_too_early)


class Twice(torch.optim.SGD):
    """Whose step runs its closure two times."""

    def step(self, closure: Any = None) -> Any:
        losses = [closure(), closure()]
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter -= 0.1 * parameter.grad
        return losses[-1]


def step_with_a_closure(optimizer_class: Any, options: dict[str, Any], by_name: bool) -> None:
    """As Lightning accumulates: the closure of the step runs the last micro-batch."""
    rank, size = joined()
    torch.manual_seed(0)
    reference = nn.Linear(3, 1, dtype=torch.float64)
    model = pydist.DataParallel(copy.deepcopy(reference))
    ours, theirs = (optimizer_class(net.parameters(), **options) for net in (model, reference))
    micro_batches = 3
    runs = []
    for step in range(4):

        def loss_of(net: Any, r: int, micro: int, step: int = step) -> Any:
            return net(batch(r, 5, 3, step=10 * step + micro)).square().mean() / micro_batches

        def expected() -> Any:
            theirs.zero_grad()
            for r in range(size):
                for micro in range(micro_batches):
                    (loss_of(reference, r, micro) / size).backward()
            return loss_of(reference, 0, 0).detach()

        def closure(step: int = step) -> Any:
            runs.append(step)
            if runs.count(step) > 1:  # another run in one step begins anew
                ours.zero_grad()
                with model.no_sync():
                    for micro in range(micro_batches - 1):
                        loss_of(model, rank, micro).backward()
            loss_of(model, rank, micro_batches - 1).backward()
            return loss_of(model.module, 0, 0).detach()

        ours.zero_grad()
        with model.no_sync():
            for micro in range(micro_batches - 1):
                loss_of(model, rank, micro).backward()
        returned = ours.step(closure=closure) if by_name else ours.step(closure)
        torch.testing.assert_close(returned, theirs.step(expected))
        for a, b in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    assert len(runs) >= 4


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize(
    ("optimizer_class", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.LBFGS, {"lr": 0.5, "max_iter": 4}),
        (Twice, {"lr": 0.1}),
    ],
)
def test_a_closure_may_run_the_backward_that_averages(
    run: Runner, optimizer_class: Any, options: dict[str, Any], by_name: bool
) -> None:
    run(step_with_a_closure, optimizer_class, options, by_name)


def leave_gradients_in_a_closure() -> None:
    rank, _ = joined()
    model = pydist.DataParallel(nn.Linear(2, 1))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    x = torch.full((1, 2), rank + 1.0)

    def closure(is_past: bool) -> Any:
        net = model.module if is_past else model
        with model.no_sync():
            loss = net(x).sum()
            loss.backward()
        return loss

    for optimizer in (
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.optim.LBFGS(model.parameters(), lr=0.1),
    ):
        for is_past in (False, True):
            optimizer.zero_grad()
            with pytest.raises(pydist.InvalidUsage, match="never averaged"):
                optimizer.step(lambda is_past=is_past: closure(is_past))
            for parameter, value in zip(model.parameters(), before, strict=True):
                assert torch.equal(parameter, value)
        model.sync_gradients()
        # What a closure raises comes out as it is.
        with pytest.raises(ZeroDivisionError):
            optimizer.step(lambda: 1 / 0)
        optimizer.zero_grad()
    # On purpose, and of other parameters.
    with model.no_sync():
        torch.optim.SGD(model.parameters(), lr=0.1).step(lambda: closure(False))
    other = nn.Linear(2, 1)
    with model.no_sync():
        model(x).sum().backward()
    other(x).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step(lambda: closure(False))


def test_a_closure_that_averages_nothing_is_refused(run: Runner) -> None:
    run(leave_gradients_in_a_closure)


class Deaf(torch.optim.SGD):
    """Takes a closure, and does not call it."""

    def step(self, closure: Any = None) -> Any:
        return super().step()


def step_without_the_closure() -> None:
    joined()
    model = pydist.DataParallel(nn.Linear(2, 1))
    optimizer = Deaf(model.parameters(), lr=0.1)
    with model.no_sync():
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step(lambda: 0.0)
    for closure in (None, lambda: 0.0):
        with pytest.raises(pydist.InvalidUsage, match="never averaged"):
            optimizer.step(closure)
    model.sync_gradients()
    optimizer.step(lambda: 0.0)


def test_a_closure_that_is_not_called_hides_nothing(run: Runner) -> None:
    run(step_without_the_closure)


def update_by_hand() -> None:
    """What was accumulated once, and thrown away, is no part of what is put there later."""
    rank, _ = joined()
    model = pydist.DataParallel(nn.Linear(2, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.full((1, 2), rank + 1.0)
    with model.no_sync():
        model(x).sum().backward()
    for _ in range(2):
        optimizer.zero_grad()
        (gradient,) = torch.autograd.grad(model(x).sum(), model.weight)
        pydist.all_reduce(gradient)
        model.weight.grad = gradient
        optimizer.step()


def test_updates_by_hand_after_no_sync(run: Runner) -> None:
    run(update_by_hand)


def step_within_backward(set_to_none: bool) -> None:
    rank, _ = joined()
    model = pydist.DataParallel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    hooks = []
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)

        def step(_: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)

        hooks.append(parameter.register_post_accumulate_grad_hook(step))
    with pytest.raises(pydist.InvalidUsage, match=r"SGD\.step\(\) is called within backward"):
        model(torch.full((1, 2), rank + 1.0)).sum().backward()
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, value)
    for hook in hooks:
        hook.remove()
    model.zero_grad()
    model(torch.full((1, 2), rank + 1.0)).sum().backward()
    assert model.module[1].bias.grad.tolist() == [1.0]
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_step_within_backward_is_refused(run: Runner, set_to_none: bool) -> None:
    run(step_within_backward, set_to_none)
