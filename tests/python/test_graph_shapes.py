"""The shapes that a backward can have: checkpoints, penalties, chosen leaves, several passes."""

import copy

import pytest
import torch
from launch import Ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import LIMIT_S, TIME_LIMIT, Runner, assert_near, batch, joined

import pydist

pytestmark = TIME_LIMIT


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool, shared: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, dtype=torch.float64)
        self.second = self.first if shared else nn.Linear(4, 4, dtype=torch.float64)
        self.last = nn.Linear(4, 1, dtype=torch.float64)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> dict[str, list[Tensor]]:
        x = checkpoint(self.first, x, use_reentrant=self.reentrant).tanh()
        x = checkpoint(self.second, x, use_reentrant=self.reentrant)
        return {"out": [self.last(x)]}


def train_checkpointed(reentrant: bool, shared: bool, cap_mb: float) -> None:
    rank, size = joined()
    torch.manual_seed(0)
    model = pydist.DataParallel(
        Checkpointed(reentrant=reentrant, shared=shared), bucket_cap_mb=cap_mb
    )
    reference = copy.deepcopy(model)
    for step in range(3):
        model.zero_grad()
        reference.zero_grad()
        x = batch(rank, 5, 4, step=step).requires_grad_()
        model(x)["out"][0].mean().backward()
        assert model.stats().rounds == step + 1
        for r in range(size):
            x = batch(r, 5, 4, step=step).requires_grad_()
            (reference(x)["out"][0].mean() / size).backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert_near(ours.grad, theirs.grad)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("cap_mb", [1e-6, 1.0])
def test_activation_checkpointing(run: Runner, reentrant: bool, cap_mb: float) -> None:
    run(train_checkpointed, reentrant, False, cap_mb)


def test_weight_shared_by_reentrant_checkpoints(three: Ranks) -> None:
    outcomes = three.outcomes(train_checkpointed, True, True, 1e-6, timeout=LIMIT_S)
    # A rank may find that another one has already given up.
    assert {outcome.error for outcome in outcomes} <= {"InvalidUsage", "PeerLost"}, outcomes
    refused = [outcome for outcome in outcomes if outcome.error == "InvalidUsage"]
    assert refused
    for outcome in refused:
        assert "parameter first.bias received a second gradient" in outcome.message
        assert "use_reentrant=False" in outcome.message
    three.run(train_checkpointed, False, True, 1e-6, timeout=LIMIT_S)


def penalize_gradients() -> None:
    rank, size = joined()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    model = pydist.DataParallel(module)
    reference = copy.deepcopy(model)

    def loss(net: nn.Module, r: int) -> Tensor:
        x = batch(r, 5, 4).requires_grad_()
        out = net(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.mean() + slope.square().sum()

    model_loss = loss(model, rank)
    assert model.stats().rounds == 0
    assert all(p.grad is None for p in model.parameters())
    model_loss.backward()
    assert model.stats().rounds == 1
    (torch.stack([loss(reference, r) for r in range(size)]).sum() / size).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert_near(ours.grad, theirs.grad)
    # Gradients asked for by name are not averaged: those of autograd.grad never are.
    (alone,) = torch.autograd.grad(model(batch(rank, 5, 4)).mean(), [module[0].weight])
    (expected,) = torch.autograd.grad(module(batch(rank, 5, 4)).mean(), [module[0].weight])
    assert torch.equal(alone, expected)
    assert model.stats().rounds == 1


def test_autograd_grad_is_left_alone(run: Runner) -> None:
    run(penalize_gradients)


def go_backward_in_odd_ways() -> None:
    rank, size = joined()
    torch.manual_seed(0)
    model = pydist.DataParallel(nn.Linear(4, 2, dtype=torch.float64))
    mean = torch.stack([batch(r, 5, 4).sum(0) for r in range(size)]).mean(0).expand(2, 4)
    # Twice through one graph.
    loss = model(batch(rank, 5, 4)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert_near(model.weight.grad, 2 * mean)
    # For chosen leaves.
    model.zero_grad()
    model(batch(rank, 5, 4)).sum().backward(inputs=[model.weight])
    assert_near(model.weight.grad, mean)
    assert model.bias.grad is None
    # Without the outputs of forward.
    model.zero_grad()
    with torch.no_grad():
        model(batch(rank, 5, 4))
    model.module(batch(rank, 5, 4)).sum().backward()
    assert_near(model.weight.grad, mean)
    # An output changed in place.
    model.zero_grad()
    model(batch(rank, 5, 4)).mul_(2).sum().backward()
    assert_near(model.weight.grad, 2 * mean)


def test_odd_backwards(run: Runner) -> None:
    run(go_backward_in_odd_ways)


def drop_the_wrapper() -> None:
    rank, size = joined()
    module = nn.Linear(3, 1)
    pydist.DataParallel(module)(torch.full((1, 3), rank + 1.0)).sum().backward()
    mean = sum(range(1, size + 1)) / size
    assert torch.equal(module.weight.grad, torch.full((1, 3), mean))


def test_wrapper_may_go_before_backward(run: Runner) -> None:
    run(drop_the_wrapper)
