"""A backward through an output that is a view, which the program has changed in place."""

import copy

import torch
from torch import Tensor, nn
from training import TIME_LIMIT, Runner, assert_near, batch, joined

import pydist

pytestmark = TIME_LIMIT


class View(nn.Module):
    """Whose output is a view, of what a layer makes or of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(4, 1).double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x).squeeze(1), x[:, 1:]


def change_a_view_in_place() -> None:
    """A backward that comes through it goes by its own forward, not by the last one."""
    rank, size = joined()
    reference = View()
    model = pydist.DataParallel(copy.deepcopy(reference))

    def loss(net: nn.Module, rank: int, step: int) -> Tensor:
        outputs, _ = net(batch(rank, 5, 4, step=step))
        outputs *= 2
        total: Tensor = outputs.square().mean()
        return total

    for averages in (True, False):
        for step in range(2):
            model.zero_grad()
            with model.no_sync(enabled=not averages):
                first = loss(model, rank, step)
            with model.no_sync(enabled=averages):
                loss(model, rank, step + 5)
            first.backward()
            reference.zero_grad()
            for r in range(size) if averages else [rank]:
                (loss(reference, r, step) / (size if averages else 1)).backward()
            for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
                assert_near(ours.grad, theirs.grad)
    # What the model was given is not of this forward: no round begins where that goes backward.
    given = batch(rank, 5, 4).requires_grad_() * 1
    model.zero_grad()
    rounds = model.stats().rounds
    _, view = model(given)
    del view
    given.sum().backward()
    assert model.stats().rounds == rounds
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_view_that_is_changed_in_place(run: Runner) -> None:
    run(change_a_view_in_place)
