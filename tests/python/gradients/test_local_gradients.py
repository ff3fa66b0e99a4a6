"""Gradients that were not averaged: `sync_gradients()`, and optimizers that would use them."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from training import TIME_LIMIT, Parts, Runner, joined

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
