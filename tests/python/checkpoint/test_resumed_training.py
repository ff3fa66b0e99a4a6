"""Training that stops amid an epoch and goes on with another number of ranks: the same losses."""

import copy
from typing import Any

import pytest
import torch
from launch import Ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from training import LIMIT_S, joined

import pydist

pytestmark = pytest.mark.timeout(40)

BATCH = 10
STEPS_AN_EPOCH = 8
STEPS = 2 * STEPS_AN_EPOCH + 3
# In the middle of the second epoch.
STOP = STEPS_AN_EPOCH + 3

# Sums of float64 in another order: a few units in the last place in each step, and Adam divides
# small gradients by their own size, so that some steps later it is more.
ROUNDING = 1e-9


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(BATCH * STEPS_AN_EPOCH + 5, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))


def train(first: int, last: int, state: dict[str, Any] | None) -> dict[str, Any]:
    """Trains from one step to another; returns the losses, and what is needed to go on."""
    joined()
    torch.manual_seed(5)
    model = pydist.DataParallel(
        nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    whole: Any = DataLoader(dataset(), BATCH, shuffle=True, drop_last=True)
    loader = pydist.prepare(whole, seed=3, split_batches=True)
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["data"])
    losses: list[float] = []
    seen: list[list[float]] = []
    while first + len(losses) < last:
        for inputs, targets in loader:
            errors = (model(inputs) - targets).square()
            optimizer.zero_grad()
            with model.weighted(len(errors)):
                errors.mean().backward()
            optimizer.step()
            losses.append(pydist.metrics.mean(errors))
            rows: Tensor = pydist.metrics.all_gather_ragged(inputs[:, 0])
            seen.append(sorted(rows.tolist()))
            if first + len(losses) == last:
                break
    return {
        "losses": losses,
        "seen": seen,
        "model": copy.deepcopy(model.state_dict()),
        "optimizer": optimizer.state_dict(),
        "data": loader.state_dict(),
    }


def train_on(nprocs: int, first: int, last: int, state: dict[str, Any] | None) -> dict[str, Any]:
    with Ranks(nprocs) as ranks:
        everybody = ranks.run(train, first, last, state, timeout=LIMIT_S)
    assert all(rank["losses"] == everybody[0]["losses"] for rank in everybody)
    assert all(rank["data"] == everybody[0]["data"] for rank in everybody)
    result: dict[str, Any] = everybody[0]
    return result


@pytest.fixture(scope="module")
def uninterrupted() -> dict[str, Any]:
    return train_on(1, 0, STEPS, None)


@pytest.fixture(scope="module")
def interrupted() -> dict[str, Any]:
    """Two ranks, up to the middle of the second epoch."""
    return train_on(2, 0, STOP, None)


@pytest.mark.parametrize("nprocs", [1, 3])
def test_losses_go_on(
    uninterrupted: dict[str, Any], interrupted: dict[str, Any], nprocs: int
) -> None:
    """On one rank, and on three, which do not divide the batch."""
    rest = train_on(nprocs, STOP, STEPS, interrupted)
    losses = interrupted["losses"] + rest["losses"]
    assert losses == pytest.approx(uninterrupted["losses"], rel=ROUNDING, abs=ROUNDING)
    # Every batch of the job has the same samples, to the bit.
    assert interrupted["seen"] + rest["seen"] == uninterrupted["seen"]
    assert rest["data"] == uninterrupted["data"]
    epoch = [row for batch in uninterrupted["seen"][:STEPS_AN_EPOCH] for row in batch]
    assert len(set(epoch)) == len(epoch) == BATCH * STEPS_AN_EPOCH
