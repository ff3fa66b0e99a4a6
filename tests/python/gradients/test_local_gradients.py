"""Gradients that were not averaged: `sync_gradients()`, and optimizers that would use them."""

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import nn
from training import TIME_LIMIT, Parts, Runner, batch, joined

import pydist

pytestmark = TIME_LIMIT


def mean_of(rank_values: list[float]) -> float:
    return sum(rank_values) / len(rank_values)


def synchronize_by_hand(reduction: str) -> None:
    rank, size = joined()
    model = pydist.DataParallel(nn.Linear(2, 1, bias=False), reduction=reduction)
    values = [r + 1.0 for r in range(size)]
    expected = mean_of(values) if reduction == "mean" else sum(values)
    x = torch.full((1, 2), values[rank])
    with model.no_sync():
        model(x).sum().backward()
    model.sync_gradients()
    assert model.weight.grad.tolist() == [[expected] * 2]
    # Once more changes nothing.
    model.sync_gradients()
    assert model.weight.grad.tolist() == [[expected] * 2]
    # What autograd.grad returns is the rank's own, until it is handed over.
    model.zero_grad()
    (gradient,) = torch.autograd.grad(model(x).sum(), model.weight)
    assert gradient.tolist() == x.tolist()
    model.weight.grad = gradient
    model.sync_gradients()
    assert model.weight.grad.tolist() == [[expected] * 2]
    # Nothing at all.
    model.zero_grad()
    model.sync_gradients()
    assert model.weight.grad is None
    # A rank that has nothing counts as zeros.
    if rank:
        with model.no_sync():
            model(x).sum().backward()
    model.sync_gradients()
    total = sum(values) - values[0]
    expected = total / size if reduction == "mean" else total
    torch.testing.assert_close(model.weight.grad, torch.full((1, 2), expected))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_sync_gradients(run_on_each: Runner, reduction: str) -> None:
    run_on_each(synchronize_by_hand, reduction)


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


def call_no_sync_with_arguments() -> None:
    rank, size = joined()
    model = pydist.DataParallel(nn.Linear(2, 1, bias=False))
    for micro in range(3):
        with model.no_sync(enabled=micro < 2):
            model(torch.full((1, 2), rank + 1.0)).sum().backward()
        if micro < 2:
            assert model.stats().rounds == 0
    assert model.stats().rounds == 1
    assert model.weight.grad.tolist() == [[3 * (size + 1) / 2] * 2]
    with model.no_sync(), model.no_sync(enabled=False):
        model(torch.ones(1, 2)).sum().backward()
    assert model.stats().rounds == 1, "the inner one does not undo the outer one"


def switch_by_torchs_name() -> None:
    rank, size = joined()
    model = pydist.DataParallel(nn.Linear(2, 1, bias=False))
    x = torch.full((1, 2), rank + 1.0)
    for micro in range(2):
        model.require_backward_grad_sync = micro == 1
        model(x).sum().backward()
        assert model.stats().rounds == micro
    assert model.weight.grad.tolist() == [[float(size + 1)] * 2]


def test_require_backward_grad_sync(run: Runner) -> None:
    run(switch_by_torchs_name)


def test_no_sync_can_be_switched_off(run: Runner) -> None:
    run(call_no_sync_with_arguments)


def write_gradients_in_place(reduction: str) -> None:
    rank, size = joined()
    model = pydist.DataParallel(nn.Linear(2, 1, bias=False), reduction=reduction)
    x = torch.full((1, 2), rank + 1.0)
    model(x).sum().backward()
    model.zero_grad(set_to_none=False)
    (gradient,) = torch.autograd.grad(model(x).sum(), model.weight)
    model.weight.grad.copy_(gradient)
    if reduction == "sum":
        # Whether it holds a sum already, and of what, nobody can tell.
        with pytest.raises(
            pydist.InvalidUsage, match="parameter weight was summed and then changed"
        ):
            model.sync_gradients()
        model.zero_grad()
        model(x).sum().backward()
        assert model.weight.grad.tolist() == [[size * (size + 1) / 2] * 2]
        return
    model.sync_gradients()
    assert model.weight.grad.tolist() == [[(size + 1) / 2] * 2]
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    # What a weight was given to, and thrown away, weighs nothing.
    model.zero_grad()
    with model.no_sync(), model.weighted(1 if rank else 9):
        model(x).sum().backward()
    model.zero_grad()
    model.sync_gradients()
    model.weight.grad = gradient
    model.sync_gradients()
    assert model.weight.grad.tolist() == [[(size + 1) / 2] * 2]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradients_written_in_place(run: Runner, reduction: str) -> None:
    run(write_gradients_in_place, reduction)


def synchronize_without_a_backward() -> None:
    rank, size = joined()
    model = pydist.DataParallel(nn.Linear(2, 1, bias=False, dtype=torch.float64))
    if rank:
        with model.no_sync(), model.weighted(2 * rank + 1):
            model(torch.full((1, 2), rank + 1.0, dtype=torch.float64)).sum().backward()
    model.sync_gradients()
    weights = [2 * r + 1 for r in range(1, size)]
    mean = sum(w * (r + 2.0) for r, w in enumerate(weights)) / sum(weights)
    torch.testing.assert_close(
        model.weight.grad, torch.full((1, 2), mean, dtype=torch.float64), rtol=0, atol=1e-12
    )


def test_a_rank_without_a_backward_has_no_weight_in_sync_gradients(run: Runner) -> None:
    run(synchronize_without_a_backward)


def add_to_what_was_put_by_hand(reduction: str) -> None:
    rank, size = joined()
    ranks = range(1, size + 1)
    for weighted in (False, True):
        model = pydist.DataParallel(
            Parts({"used": nn.Linear(2, 1, bias=False), "unused": nn.Linear(2, 1)}),
            reduction=reduction,
        )
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 100.0 * (rank + 1))
        x = torch.full((1, 2), rank + 1.0)
        with model.weighted(rank + 2) if weighted else contextlib.nullcontext():
            model("used", x).sum().backward()
        weights = [r + 1 if weighted else 1 for r in ranks]
        total = sum(weights) if reduction == "mean" else 1
        for name, parameter in model.module.named_parameters():
            each = 101.0 if name.startswith("used") else 100.0
            expected = sum(w * r * each for w, r in zip(weights, ranks, strict=True)) / total
            torch.testing.assert_close(parameter.grad, torch.full_like(parameter, expected))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_backward_on_gradients_put_by_hand(run: Runner, reduction: str) -> None:
    run(add_to_what_was_put_by_hand, reduction)


def replace_between_weights() -> None:
    """Nobody can tell what the new one counts: its own, or what it replaces."""
    rank, size = joined()
    model = pydist.DataParallel(nn.Linear(2, 1, bias=False, dtype=torch.float64))
    x = torch.full((1, 2), rank + 1.0, dtype=torch.float64)
    for in_place in (False, True):
        with model.no_sync(), model.weighted(rank + 1):
            model(x).sum().backward()
        if in_place:
            model.weight.grad.mul_(0.5)
        else:
            model.weight.grad = model.weight.grad * 0.5
            loss = model(x).sum()
            match = "weight was replaced between backward"
            with pytest.raises(pydist.InvalidUsage, match=match), model.weighted(2 * rank + 3):
                loss.backward()
            model.zero_grad()
    with model.weighted(2 * rank + 3):
        model(x).sum().backward()
    parts = [(r + 1) * 0.5 * (r + 1) + (2 * r + 3) * (r + 1) for r in range(size)]
    mean = sum(parts) / sum(3 * r + 4 for r in range(size))
    torch.testing.assert_close(
        model.weight.grad, torch.full((1, 2), mean, dtype=torch.float64), rtol=1e-12, atol=0
    )


def test_gradients_replaced_between_weights(run: Runner) -> None:
    run(replace_between_weights)


def replace_what_weighs_nothing_on_a_rank() -> None:
    """All ranks hear of it, also one whose gradients are zero."""
    rank, _ = joined()
    model = pydist.DataParallel(nn.Linear(2, 1, bias=False))
    x = torch.full((1, 2), rank + 1.0)
    with model.no_sync(), model.weighted(0 if rank == 1 else 2):
        model(x).sum().backward()
    model.weight.grad = model.weight.grad * 0.5
    with pytest.raises(pydist.Error, match=r"was replaced between backward|raised on rank 0"):
        model.sync_gradients()
    for step in range(2):
        model.zero_grad()
        model(torch.full((1, 2), 10.0 * step)).sum().backward()
        assert model.weight.grad.tolist() == [[10.0 * step] * 2]


def test_a_replaced_gradient_is_refused_on_all_ranks(run: Runner) -> None:
    run(replace_what_weighs_nothing_on_a_rank)


def put_back_what_was_saved() -> None:
    """Gradients that were not averaged, taken away while the model is looked at."""
    rank, size = joined()
    model = pydist.DataParallel(nn.Linear(2, 1, bias=False))
    x = torch.full((1, 2), rank + 1.0)
    with model.no_sync():
        model(x).sum().backward()
    saved = model.weight.grad
    model.zero_grad()
    with torch.no_grad():
        model(x)
    model.weight.grad = saved
    with pytest.raises(pydist.InvalidUsage, match="never averaged"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.sync_gradients()
    assert model.weight.grad.tolist() == [[(size + 1) / 2] * 2]


def test_gradients_that_come_back_are_not_averaged_yet(run: Runner) -> None:
    run(put_back_what_was_saved)


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


def nest_a_backward() -> None:
    """Of the same parameter, while its gradient lands."""
    rank, _ = joined()
    wrapped = pydist.DataParallel(nn.Linear(2, 1, bias=False))
    plain = copy.deepcopy(wrapped.module)
    x = torch.full((1, 2), rank + 1.0)
    gradients = []
    for model in (wrapped, plain):
        with wrapped.no_sync():
            inner = 3 * model(x).sum()
        weight = next(model.parameters())
        accumulation = weight.view_as(weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        done: list[int] = []

        def within(_: object, inner: torch.Tensor = inner, done: list[int] = done) -> None:
            if not done:
                done.append(1)
                inner.backward()

        handle = accumulation.register_prehook(within)
        with wrapped.no_sync():
            model(x).sum().backward()
        handle.remove()
        gradients.append(weight.grad)
    assert torch.equal(*gradients)


def test_a_backward_within_the_landing_of_a_gradient(run: Runner) -> None:
    run(nest_a_backward)


def put_zeros_beside_weights() -> None:
    rank, size = joined()
    model = pydist.DataParallel(
        Parts({"used": nn.Linear(2, 1, bias=False), "unused": nn.Linear(2, 1)})
    )
    with model.no_sync(), model.weighted(rank + 2):
        model("used", torch.full((1, 2), rank + 1.0)).sum().backward()
    for parameter in model.module["unused"].parameters():
        parameter.grad = torch.zeros_like(parameter)
    model.sync_gradients()
    mean = sum((r + 2) * (r + 1) for r in range(size)) / sum(r + 2 for r in range(size))
    for name, parameter in model.module.named_parameters():
        expected = mean if name.startswith("used") else 0.0
        torch.testing.assert_close(parameter.grad, torch.full_like(parameter, expected))


def test_zeros_put_by_hand_have_no_weight(run: Runner) -> None:
    run(put_zeros_beside_weights)


def hand_over_a_graph() -> None:
    rank, size = joined()
    model = pydist.DataParallel(nn.Linear(2, 1, bias=False))
    x = torch.full((1, 2), rank + 1.0)
    loss = model(x).sum().square()
    (model.weight.grad,) = torch.autograd.grad(loss, model.weight, create_graph=rank == 0)
    message = "parameter weight is part of a graph" if rank == 0 else "raised on rank 0"
    with pytest.raises(pydist.Error, match=message):
        model.sync_gradients()
    for step in range(2):
        model.zero_grad()
        model(torch.full((1, 2), 100.0 * step + rank)).sum().backward()
        assert model.weight.grad.tolist() == [[100.0 * step + (size - 1) / 2] * 2]


def test_a_gradient_that_is_refused_ends_sync_gradients_on_all_ranks(run: Runner) -> None:
    run(hand_over_a_graph)


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
