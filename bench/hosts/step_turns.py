"""The ranks of train_step.py: steps of pydist.DataParallel and of torch's DDP take turns."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import nn

import pydist
from pydist.benchmarks.steps import step_times
from pydist.benchmarks.steps.models import MODELS

# Beside the arms: an all_reduce of as many bytes as the gradients have, with nothing beside it.
TRANSFER = "pydist transfer"


def run_rounds(
    name: str, batch: int, ddp_arms: Sequence[str], seconds: float, journal: str
) -> None:
    """Rounds of a model's steps, 10 at least. Every rank calls it.

    Args:
        name: of the model.
        batch: how many times as many samples as the model's own batch has.
        ddp_arms: of `ddp_knobs.KNOBS`.
        seconds: for all rounds, without those for warming up.
        journal: where rank 0 writes the rounds, for `step_times.read_rounds`.
    """
    torch.manual_seed(0)
    model, samples = MODELS[name].make()
    inputs = tuple(torch.cat([each] * batch) for each in samples)
    gradients = torch.zeros(gradient_bytes(model) // 4)
    arms = step_times.make_arms(model, ddp_arms)
    slowest = torch.zeros(2, dtype=torch.float64)

    def time_round(number: int) -> dict[str, float]:
        times: dict[str, float] = {}
        turns: dict[str, nn.Module | None] = {**arms, TRANSFER: None}
        for arm, module in step_times.in_turns(turns, number):
            if module is None:
                times[arm] = _time_transfer(gradients, slowest)
            else:
                times |= step_times.time_step(arm, module, inputs, slowest)
        return times

    step_times.in_rounds(f"{name}: steps", seconds, journal, time_round)


def gradient_bytes(model: nn.Module) -> int:
    """Of all gradients together, as float32."""
    return 4 * sum(parameter.numel() for parameter in model.parameters())


def _time_transfer(gradients: torch.Tensor, slowest: torch.Tensor) -> float:
    """Seconds of the slowest rank."""
    pydist.barrier()
    start_s = time.perf_counter()
    pydist.all_reduce(gradients)
    slowest[0] = time.perf_counter() - start_s
    pydist.all_reduce(slowest, "max")
    return float(slowest[0])
