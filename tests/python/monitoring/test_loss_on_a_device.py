"""A loss on a GPU, which a stand-in plays: a step does not wait until it is computed."""

import json
from pathlib import Path

import fake_cuda
import pytest
import torch
from fake_cuda import needs_fake_cuda
from launch import run_ranks

import pydist

pytestmark = [needs_fake_cuda, pytest.mark.timeout(60)]


def train(folder: str) -> list[bool]:
    """Of each step: whether the device was still at it when the step had ended."""
    pydist.init()
    fake_cuda.install(1)
    # Longer than the end of a step takes.
    fake_cuda.set_delay_us(50_000)
    were_amid = []
    total = torch.zeros((), device="cuda")
    with pydist.monitor(folder, every=3, tensorboard=False) as monitor:
        for _ in range(8):
            total.add_(1)
            computed = torch.Event("cuda")
            computed.record()
            monitor.step(loss=total)
            were_amid.append(not computed.query())
            # The program may go on with the tensor: the line has what it was.
            total.add_(10)
            fake_cuda.synchronize()
    return were_amid


def test_a_step_does_not_wait_for_the_device(tmp_path: Path) -> None:
    (were_amid,) = run_ranks(train, 1, str(tmp_path / "a"))
    # A slow machine may take long over some step; one that waits does so in all.
    assert any(were_amid)
    lines = (tmp_path / "a" / "steps.jsonl").read_text().splitlines()
    told = [json.loads(line)["values"]["loss"] for line in lines]
    assert told == [1.0 + 11 * step for step in range(8)]
