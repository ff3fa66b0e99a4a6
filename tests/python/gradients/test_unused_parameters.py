"""Parameters that a rank's backward, or everybody's, does not reach."""

import copy

import pytest
import torch
from launch import Ranks
from torch import Tensor, nn
from training import (
    LIMIT_S,
    TIME_LIMIT,
    Branches,
    Runner,
    assert_near,
    batch,
    joined,
    train_like_reference,
)

import pydist

pytestmark = TIME_LIMIT


def use_different_branches(cap_mb: float) -> None:
    rank, size = joined()
    torch.manual_seed(0)
    model = pydist.DataParallel(Branches(size + 1), bucket_cap_mb=cap_mb)
    reference = copy.deepcopy(model.module)
    for step in range(3):
        model.zero_grad()
        reference.zero_grad()
        # In the last step only rank 0 leaves the trunk's own branch.
        chosen = [(r + step) % size if step < 2 else int(r == 0) for r in range(size)]
        model(batch(rank, 5, 4, step=step), chosen[rank]).backward()
        losses = [reference(batch(r, 5, 4, step=step), chosen[r]) for r in range(size)]
        (torch.stack(losses).sum() / size).backward()
        for (name, ours), theirs in zip(
            model.named_parameters(), reference.parameters(), strict=True
        ):
            if theirs.grad is None:
                assert ours.grad is None, name
            else:
                assert_near(ours.grad, theirs.grad)


@pytest.mark.parametrize("cap_mb", [1e-6, 1.0])
def test_unused_parameters(ranks: Ranks, cap_mb: float) -> None:
    ranks.run(use_different_branches, cap_mb, timeout=LIMIT_S)


def use_nothing_on_one_rank() -> None:
    rank, size = joined()
    linear = nn.Linear(2, 2, bias=False, dtype=torch.float64)

    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = linear

        def forward(self, x: Tensor) -> Tensor:
            return x.square() if rank == 0 else self.linear(x)

    model = pydist.DataParallel(Sometimes())
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(1, 2, dtype=torch.float64, requires_grad=True)).sum().backward()
        expected = torch.ones(2, 2, dtype=torch.float64) * (size - 1) / size
        assert_near(linear.weight.grad, expected)


def test_a_rank_that_uses_no_parameter(run: Runner) -> None:
    run(use_nothing_on_one_rank)


def keep_what_nobody_touches() -> None:
    rank, size = joined()
    torch.manual_seed(0)
    model = pydist.DataParallel(Branches(2))
    model(batch(rank, 5, 4), 0).backward()
    kept = model.branches[0].weight.grad.clone()
    # No zero_grad: an average of three equal numbers could differ in the last bit.
    for step in range(20):
        model(batch(rank, 5, 4, step=step), 1).backward()
    assert torch.equal(model.branches[0].weight.grad, kept)
    assert model.never.weight.grad is None
    # Accumulation onto what is averaged already.
    model.zero_grad()
    for step in range(3):
        model(batch(rank, 5, 4, step=step), 1).backward()
    reference = copy.deepcopy(model)
    for step in range(3):
        losses = [reference(batch(r, 5, 4, step=step), 1) for r in range(size)]
        (torch.stack(losses).sum() / size).backward()
    assert_near(model.trunk.weight.grad, reference.trunk.weight.grad)


def test_unused_gradients_stay_as_they_are(run: Runner) -> None:
    run(keep_what_nobody_touches)


def freeze_for_a_while() -> None:
    joined()
    torch.manual_seed(0)
    reference = Branches(2)
    model = pydist.DataParallel(copy.deepcopy(reference))

    def loss(net: nn.Module, rank: int, step: int) -> Tensor:
        out: Tensor = net(batch(rank, 5, 4, step=step), (rank + step) % 2)
        return out

    for frozen in ([], ["trunk"], ["branches"], []):
        for net in (model, reference):
            net.requires_grad_(True)
            for name in frozen:
                net.get_submodule(name).requires_grad_(False)
        train_like_reference(model, reference, loss, steps=range(2))
    for net in (model, reference):
        net.requires_grad_(False)
    rounds = model.stats().rounds
    assert not model(batch(0, 5, 4), 0).requires_grad
    for net in (model, reference):
        net.requires_grad_(True)
    train_like_reference(model, reference, loss)
    assert model.stats().rounds == rounds + 3


def test_parameters_frozen_for_a_while(run: Runner) -> None:
    run(freeze_for_a_while)
