"""Forwards that run ahead of the backwards before them train what they train in turn."""

from typing import Any

import pytest
import torch
from launch import Ranks
from thorough import everyday
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import pydist

SAMPLES = 48


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 5, dtype=torch.float64, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def one_layer() -> nn.Module:
    """Its backward needs no weights, so a step may come between forward and backward."""
    torch.manual_seed(0)
    return nn.Linear(5, 1).double()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05)


def forwards_first(steps: int, ahead: int, stage: int) -> list[Tensor]:
    """Runs so many forwards before their backwards."""
    config: Any = {
        "training": {"accumulation_steps": steps, "clip_grad_norm": 0.1},
        "optimizer": {"stage": stage},
    }
    engine, *_ = pydist.initialize(one_layer(), adamw, config=config)
    half = DataLoader(TensorDataset(*data()[pydist.rank() :: 2]), batch_size=2)
    batches = list(half)
    for begin in range(0, len(batches), ahead):
        losses = [nn.functional.mse_loss(engine(x), y) for x, y in batches[begin : begin + ahead]]
        for loss in losses:
            engine.backward(loss)
            engine.step()
    assert engine.global_steps == len(batches) // steps
    return [p.detach().clone() for p in engine.parameters()]


def kept_ahead(steps: int, ahead: int, stage: int) -> list[Tensor]:
    """Keeps so many forwards whose backwards are still to come."""
    config: Any = {
        "training": {"accumulation_steps": steps, "clip_grad_norm": 0.1},
        "optimizer": {"stage": stage},
    }
    engine, *_ = pydist.initialize(one_layer(), adamw, config=config)
    losses: list[Tensor] = []
    for x, y in DataLoader(TensorDataset(*data()[pydist.rank() :: 2]), batch_size=2):
        losses.append(nn.functional.mse_loss(engine(x), y))
        if len(losses) > ahead:
            engine.backward(losses.pop(0))
            engine.step()
    for loss in losses:
        engine.backward(loss)
        engine.step()
    assert engine.global_steps == SAMPLES // 4 // steps
    return [p.detach().clone() for p in engine.parameters()]


def twin(steps: int, ahead: int) -> list[Tensor]:
    """What `kept_ahead` trains, in one process: a forward has the weights of its time."""
    model = one_layer()
    optimizer = adamw(model.parameters())
    x, y = data()[:]
    losses: list[Tensor] = []
    made = 0

    def backward(loss: Tensor) -> None:
        nonlocal made
        (loss / steps).backward()
        made += 1
        if made % steps == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()

    for begin in range(0, SAMPLES, 4):
        batch = slice(begin, begin + 4)
        losses.append(nn.functional.mse_loss(model(x[batch]), y[batch]))
        if len(losses) > ahead:
            backward(losses.pop(0))
    for loss in losses:
        backward(loss)
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("stage", everyday(0, 2, thorough=(1,)))
def test_forwards_may_run_ahead_of_their_backwards(stage: int) -> None:
    with Ranks(2) as ranks:
        in_turn = ranks.run(forwards_first, 2, 1, stage)
        ahead = ranks.run(forwards_first, 2, 2, stage)
        for found, wanted in zip(ahead[0], in_turn[0], strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
        assert all(map(torch.equal, *ahead))
        for steps, forwards in ((2, 1), (3, 2)):
            both = ranks.run(kept_ahead, steps, forwards, stage)
            for found, wanted in zip(both[0], twin(steps, forwards), strict=True):
                torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
            assert all(map(torch.equal, *both))
