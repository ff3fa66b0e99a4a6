"""Checkpoints of sharded training on GPUs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_ranks import needs_gpu_ranks
from gpu_twins import ENVIRONMENTS, assert_near, start
from launch import run_ranks
from torch import Tensor, nn
from training import batch

import pydist

LIMIT_S = 40.0

pytestmark = [needs_gpu_ranks, pytest.mark.timeout(60)]


ROWS = 12


def small_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(10, 33, dtype=torch.float64),
        nn.Tanh(),
        nn.Linear(33, 7, dtype=torch.float64),
    )


def rows(step: int) -> Tensor:
    return batch(0, ROWS, 10, step=step)


class Resumable:
    """Every number of ranks trains the same: they share out the rows of a step."""

    def __init__(self, stage: Any, seed: int, **options: Any) -> None:
        self.rank, self.size = start()
        torch.manual_seed(seed)
        self.model = pydist.DataParallel(small_model().to("cuda"), bucket_cap_mb=0.001)
        self.optimizer = pydist.ShardedOptimizer(
            self.model, torch.optim.AdamW, lr=0.02, stage=stage, **options
        )

    def train(self, steps: range) -> list[Tensor]:
        for step in steps:
            self.optimizer.zero_grad()
            share = rows(step).view(self.size, -1, 10)[self.rank]
            self.model(share.to("cuda")).square().mean().backward()
            self.optimizer.step()
        return [p.detach().cpu() for p in self.model.parameters()]


def alone(first: dict[str, Any] | None, seed: int, steps: range) -> list[Tensor]:
    """The same in plain torch on the CPU, from the beginning or a state."""
    torch.manual_seed(seed)
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    if first is not None:
        model.load_state_dict(first["model"])
        optimizer.load_state_dict(first["optimizer"])
    for step in steps:
        optimizer.zero_grad()
        model(rows(step)).square().mean().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def assert_all_near(ours: list[Tensor], theirs: list[Tensor], what: str) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert_near(a, b, what)


def save(folder: str, stage: int) -> None:
    training = Resumable(stage, seed=7)
    training.train(range(4))
    pydist.save(
        f"{folder}/now", model=training.model, optimizer=training.optimizer, extra={"step": 4}
    )
    handle = pydist.save(
        f"{folder}/later", model=training.model, optimizer=training.optimizer, asynchronous=True
    )
    # What is saved is what was there at the call.
    ours = training.train(range(4, 8))
    handle.wait()
    assert_all_near(ours, alone(None, 7, range(8)), "saved")


def resume(folder: str, stage: int) -> None:
    """Of another number of ranks, in the other stage; from and to plain torch."""
    start()
    expected = alone(None, 7, range(8))
    for name, options in (("now", {}), ("later", {}), ("later", {"fused": True})):
        training = Resumable(3 - stage, seed=8, **options)
        training.train(range(50, 51))
        extra = pydist.load(f"{folder}/{name}", model=training.model, optimizer=training.optimizer)
        assert extra == ({"step": 4} if name == "now" else {})
        for state in training.optimizer.sharded_state().parameters.values():
            for piece in state.ranges:
                assert piece.values["exp_avg"].device.type == "cuda"
        assert_all_near(training.train(range(4, 8)), expected, f"{name}, {options}")
    plain = pydist.checkpoint.to_torch(f"{folder}/later")
    assert_all_near(alone(copy.deepcopy(plain), 9, range(4, 8)), expected, "in plain torch")
    training = Resumable(stage, seed=8)
    pydist.checkpoint.from_torch(plain, model=training.model, optimizer=training.optimizer)
    assert_all_near(training.train(range(4, 8)), expected, "from plain torch")
    training.optimizer.load_state_dict(training.optimizer.state_dict())


@pytest.mark.parametrize(
    ("kind", "stage"),
    [
        ("nccl", 2),
        ("native", 1),
        *(
            pytest.param(*each, marks=pytest.mark.thorough)
            for each in (("nccl", 1), ("native", 2), ("gloo", 1), ("gloo", 2))
        ),
    ],
)
def test_checkpoints_load_on_other_ranks(kind: str, stage: int, tmp_path: Path) -> None:
    run_ranks(save, 2, str(tmp_path), stage, env=ENVIRONMENTS[kind], timeout=LIMIT_S)
    for count in (1, 3):
        run_ranks(resume, count, str(tmp_path), stage, env=ENVIRONMENTS[kind], timeout=LIMIT_S)
