"""Checkpoints with the optimizer's state on the host: as without, and either loads both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gpu_ranks
import pytest
import torch
from gpu_ranks import needs_gpu_ranks
from gpu_twins import ENVIRONMENTS, start
from launch import run_ranks
from offload_twins import Uneven, flat
from torch import Tensor
from training import batch

import pydist

LIMIT_S = 40.0
ROWS = 12

pytestmark = [needs_gpu_ranks, pytest.mark.timeout(60)]


class Resumable:
    """Every number of ranks trains the same but for rounding: they share out a step's rows."""

    def __init__(self, seed: int, dtype: torch.dtype, **options: Any) -> None:
        self.rank, self.size = start()
        torch.manual_seed(seed)
        self.model = pydist.DataParallel(Uneven(dtype).to("cuda"), bucket_cap_mb=0.004)
        self.optimizer = pydist.ShardedOptimizer(
            self.model, torch.optim.AdamW, lr=0.02, fused=True, **options
        )

    def train(self, steps: range) -> list[Tensor]:
        for step in steps:
            self.optimizer.zero_grad()
            rows = batch(0, ROWS, 10, step=step).view(self.size, -1, 10)[self.rank]
            self.model(rows).backward()
            self.optimizer.step()
        self.optimizer.finish()
        return [flat(p) for p in self.model.parameters()]


def copied(state: Any) -> Any:
    """A copy of a state, whose tensors the stand-in has no deepcopy for."""
    if isinstance(state, Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return {key: copied(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(map(copied, state))
    return state


def save(folder: str, dtype: torch.dtype, delayed: bool, is_with: bool) -> list[Tensor]:
    """Returns the parameters after four more steps."""
    options = {"offload": "cpu", "delayed": delayed} if is_with else {}
    training = Resumable(7, dtype, **options)
    for step in range(4):  # what is late is late when it is saved
        training.optimizer.zero_grad()
        rows = batch(0, ROWS, 10, step=step).view(training.size, -1, 10)[training.rank]
        training.model(rows).backward()
        training.optimizer.step()
    handle = pydist.save(
        f"{folder}/later", model=training.model, optimizer=training.optimizer, asynchronous=True
    )
    own = training.optimizer.state_dict()
    kept, values = copied(own), copied(training.model.state_dict())
    pydist.save(f"{folder}/now", model=training.model, optimizer=training.optimizer)
    ours = training.train(range(4, 8))
    handle.wait()
    training.model.load_state_dict(values)
    training.optimizer.load_state_dict(kept)
    assert all(map(torch.equal, training.train(range(4, 8)), ours))
    return ours


def resume(folder: str, dtype: torch.dtype, expected: list[Tensor]) -> None:
    for name in ("now", "later"):
        for options in ({}, {"offload": "cpu"}, {"offload": "cpu", "stage": 2}):
            training = Resumable(8, dtype, **options)
            training.train(range(50, 51))
            pydist.load(f"{folder}/{name}", model=training.model, optimizer=training.optimizer)
            for state in training.optimizer.sharded_state().parameters.values():
                for piece in state.ranges:
                    for key in ("exp_avg", "master"):
                        value = piece.values.get(key)
                        where = "cpu" if options else "cuda"
                        assert value is None or value.device.type == where
            for ours, theirs in zip(training.train(range(4, 8)), expected, strict=True):
                tolerance = 0.02 if dtype == torch.bfloat16 else 1e-4
                torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("dtype", "is_with", "count"),
    [
        (torch.float32, True, 3),
        (torch.bfloat16, False, 2),
        *(
            pytest.param(dtype, is_with, count, marks=pytest.mark.thorough)
            for dtype, is_with, count in (
                *((torch.float32, True, 2), (torch.float32, False, 2), (torch.float32, False, 3)),
                *((torch.bfloat16, False, 3), (torch.bfloat16, True, 2), (torch.bfloat16, True, 3)),
            )
        ),
    ],
)
def test_checkpoints_load_with_and_without(
    dtype: torch.dtype, is_with: bool, count: int, tmp_path: Path
) -> None:
    if gpu_ranks.IS_REAL and count > 2:
        pytest.skip("three ranks that share a real GPU by sockets take minutes")
    nccl = ENVIRONMENTS["nccl"]
    told = run_ranks(save, 2, str(tmp_path), dtype, False, is_with, env=nccl, timeout=LIMIT_S)
    run_ranks(resume, count, str(tmp_path), dtype, told[0], env=nccl, timeout=LIMIT_S)


def save_late(folder: str) -> list[Tensor]:
    return save(folder, torch.float32, True, True)


def resume_late(folder: str, expected: list[Tensor]) -> None:
    training = Resumable(8, torch.float32, offload="cpu", delayed=True)
    pydist.load(f"{folder}/now", model=training.model, optimizer=training.optimizer)
    ours = training.train(range(4, 8))
    assert all(map(torch.equal, ours, expected))


def test_checkpoints_amid_a_delayed_step(tmp_path: Path) -> None:
    nccl = ENVIRONMENTS["nccl"]
    expected = run_ranks(save_late, 2, str(tmp_path), env=nccl, timeout=LIMIT_S)[0]
    run_ranks(resume_late, 2, str(tmp_path), expected, env=nccl, timeout=LIMIT_S)
