"""Threads of their own for the fused steps of the host."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from torch import Tensor

import pydist
from pydist import _native

COUNT = 400_003

pytestmark = pytest.mark.timeout(60)


def step(values: list[Tensor], gradients: list[Tensor], threads: int | None) -> list[Tensor]:
    """SGD with momentum, three times; the same bits on whatever threads."""
    stepped = [v.clone() for v in values]
    buffers = [torch.empty_like(v) for v in values]
    pool = None if threads is None else _native.StepThreads(threads)
    for number in range(3):
        _native.sgd_step(
            stepped,
            gradients,
            None,
            buffers,
            begins=[number == 0] * len(values),
            lr=0.1,
            momentum=0.9,
            dampening=0.0,
            weight_decay=0.1,
            nesterov=True,
            threads=pool,
        )
    return stepped


def subtract(values: list[Tensor], gradients: list[Tensor], threads: _native.StepThreads) -> None:
    """One step of plain SGD with a rate of 1."""
    _native.sgd_step(
        *(values, gradients, None, None),
        begins=[False] * len(values),
        lr=1.0,
        momentum=0.0,
        dampening=0.0,
        weight_decay=0.0,
        nesterov=False,
        threads=threads,
    )


def tensors() -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    counts = (COUNT, 1, 0, 33, 70_001)
    return [torch.randn(c) for c in counts], [torch.randn(c) for c in counts]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_change_no_bit(threads: int) -> None:
    values, gradients = tensors()
    expected = step(values, gradients, None)
    assert _native.StepThreads(threads).count == threads
    for ours, theirs in zip(step(values, gradients, threads), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_callers_take_turns() -> None:
    """Several threads of the program share one object."""
    pool = _native.StepThreads(3)
    results: list[Tensor] = []

    def run() -> None:
        values, gradients = [torch.ones(COUNT)], [torch.ones(COUNT)]
        for _ in range(20):
            subtract(values, gradients, pool)
        results.append(values[0])

    callers = [threading.Thread(target=run) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(results) == 4
    for result in results:
        assert torch.equal(result, torch.full((COUNT,), -19.0))


def test_a_forked_child_steps_alone() -> None:
    pool = _native.StepThreads(3)
    values, gradients = [torch.ones(COUNT)], [torch.ones(COUNT)]
    child = os.fork()
    if child == 0:
        subtract(values, gradients, pool)
        # Not by an operator over all: torch's own threads are not there either.
        os._exit(0 if {values[0][i].item() for i in (0, COUNT // 2, COUNT - 1)} == {0.0} else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_no_threads_are_refused() -> None:
    with pytest.raises(pydist.InvalidUsage, match="0 threads; it takes 1 or more"):
        _native.StepThreads(0)
