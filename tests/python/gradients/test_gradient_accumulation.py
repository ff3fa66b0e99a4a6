"""Several backwards to one step: `no_sync()`."""

import copy

import pytest
import torch
from torch import Tensor, nn
from training import TIME_LIMIT, Branches, Runner, assert_near, batch, joined

import pydist

pytestmark = TIME_LIMIT


def accumulate(cap_mb: float) -> None:
    rank, size = joined()
    torch.manual_seed(0)
    model = pydist.DataParallel(Branches(3), bucket_cap_mb=cap_mb)
    reference = copy.deepcopy(model)
    for _ in range(2):
        model.zero_grad()
        reference.zero_grad()
        rounds = model.stats().rounds
        for micro in range(3):
            # Branches 0 and 1 get their gradient under no_sync alone.
            if micro < 2:
                with model.no_sync():
                    model(batch(rank, 5, 4, step=micro), micro).backward()
                    with model.no_sync():
                        pass
                    model(batch(rank, 5, 4, step=micro + 10), micro).backward()
            else:
                model(batch(rank, 5, 4, step=micro), 2).backward()
        assert model.stats().rounds == rounds + 1
        for r in range(size):
            for micro in range(3):
                steps = (micro, micro + 10) if micro < 2 else (micro,)
                for step in steps:
                    (reference(batch(r, 5, 4, step=step), micro) / size).backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            if theirs.grad is None:
                assert ours.grad is None
            else:
                assert_near(ours.grad, theirs.grad)


@pytest.mark.parametrize("cap_mb", [1e-6, 1.0])
def test_no_sync(run_on_each: Runner, cap_mb: float) -> None:
    run_on_each(accumulate, cap_mb)


# --- backwards of other kinds --------------------------------------------------------------------


def net_and_reference() -> tuple[pydist.DataParallel, nn.Sequential]:
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    return pydist.DataParallel(copy.deepcopy(reference)), reference


def mean_output(net: nn.Module, rank: int, step: int) -> Tensor:
    out: Tensor = net(batch(rank, 5, 4, step=step))
    return out.sin().mean()


def gradients_of(net: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in net.parameters() if p.grad is not None]


def leave_either_outside() -> None:
    rank, size = joined()
    model, reference = net_and_reference()
    # The backward alone under no_sync: averaged.
    loss = mean_output(model, rank, 0)
    with model.no_sync():
        loss.backward()
    assert model.stats().rounds == 1
    for r in range(size):
        (mean_output(reference, r, 0) / size).backward()
    for ours, theirs in zip(gradients_of(model), gradients_of(reference), strict=True):
        assert_near(ours, theirs)
    # The forward alone: this rank's own.
    model.zero_grad()
    reference.zero_grad()
    with model.no_sync():
        loss = mean_output(model, rank, 1)
    loss.backward()
    assert model.stats().rounds == 1
    mean_output(reference, rank, 1).backward()
    for ours, theirs in zip(gradients_of(model), gradients_of(reference), strict=True):
        assert_near(ours, theirs)


def test_it_is_the_forward_that_counts(run: Runner) -> None:
    run(leave_either_outside)


def accumulate_unevenly() -> None:
    """Nothing is said under no_sync, so each rank may have its own number of micro-batches."""
    rank, size = joined()
    model, reference = net_and_reference()
    for first in (0, 10):
        model.zero_grad()
        reference.zero_grad()
        with model.no_sync():
            for micro in range(rank):
                mean_output(model, rank, first + micro).backward()
        mean_output(model, rank, first + rank).backward()
        for r in range(size):
            for micro in range(r + 1):
                (mean_output(reference, r, first + micro) / size).backward()
        for ours, theirs in zip(gradients_of(model), gradients_of(reference), strict=True):
            assert_near(ours, theirs)
    assert model.stats().rounds == 2


def test_as_many_micro_batches_as_a_rank_likes(run: Runner) -> None:
    run(accumulate_unevenly)


def raise_while_accumulating() -> None:
    rank, size = joined()
    model, reference = net_and_reference()

    def explode(_: Tensor) -> None:
        raise ArithmeticError("boom")

    x = batch(rank, 5, 4, step=9).requires_grad_()
    if rank == 1:
        x.register_hook(explode)
    try:
        with model.no_sync():
            model(x).sum().backward()
            explode(x)  # on the others, after backward
    except ArithmeticError:
        pass
    # Nobody had to be told, and no_sync is over.
    model.zero_grad()
    mean_output(model, rank, 0).backward()
    assert model.stats().rounds == 1
    for r in range(size):
        (mean_output(reference, r, 0) / size).backward()
    for ours, theirs in zip(gradients_of(model), gradients_of(reference), strict=True):
        assert_near(ours, theirs)


def test_an_exception_while_accumulating(run: Runner) -> None:
    run(raise_while_accumulating)
