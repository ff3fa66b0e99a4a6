"""A training step with pydist.ShardedOptimizer, beside the whole optimizer without synchronisation.

A call begins with the optimizer's step and ends with a backward: so parameters travel while the
forward of the same call runs, as they do in training, and nothing is under way when the other's
turn comes.
"""

from copy import deepcopy
from typing import Literal

import pytest
import torch
from rank_groups import MeasureInTurns
from torch import Tensor, nn
from torch.optim import Optimizer
from turns import Pair

import pydist

# 17 MB of gradients, beyond the caches of a core.
LAYERS, WIDTH = 4, 1024
# Buckets follow the order that the first steps show, and the speed of the link.
WARM_UP_STEPS = 10


def step_pair(stage: Literal[1, 2]) -> Pair:
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    alone = nn.Sequential(*layers)
    synchronised = pydist.DataParallel(deepcopy(alone))
    sharded = pydist.ShardedOptimizer(
        synchronised, torch.optim.AdamW, stage=stage, lr=1e-4, fused=True
    )
    whole = torch.optim.AdamW(alone.parameters(), lr=1e-4, fused=True)
    inputs = torch.randn(8, WIDTH)
    return Pair(
        lambda: step(synchronised, sharded, inputs),
        lambda: step(alone, whole, inputs),
        "the whole optimizer, no synchronisation",
        WARM_UP_STEPS,
    )


def step(model: nn.Module, optimizer: Optimizer, inputs: Tensor) -> None:
    optimizer.step()
    optimizer.zero_grad()
    model(inputs).square().mean().backward()


@pytest.mark.parametrize("stage", [1, 2])
def bench_sharded_step(measure_in_turns: MeasureInTurns, stage: int) -> None:
    measure_in_turns(2, step_pair, stage)
