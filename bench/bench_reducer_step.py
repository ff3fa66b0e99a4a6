"""A training step of pydist.DataParallel, beside the same model without synchronisation.

A step is forward and backward. A ratio of 1 is a step in which communication costs nothing.
"""

from copy import deepcopy

import pytest
import torch
from rank_groups import MeasureInTurns
from torch import Tensor, nn
from turns import Pair

import pydist

# Layers and their width. In the small one hooks and buckets cost more than their bytes; the middle
# one has 17 MB of gradients, beyond the caches of a core.
MODELS = {"small": (50, 64), "middle": (4, 1024)}
# Buckets follow the order that the first steps show, and the speed of the link.
WARM_UP_STEPS = 10


def step_pair(model_name: str) -> Pair:
    torch.manual_seed(0)
    depth, width = MODELS[model_name]
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
    alone = nn.Sequential(*layers)
    synchronised = pydist.DataParallel(deepcopy(alone))
    inputs = torch.randn(8, width)
    return Pair(
        lambda: step(synchronised, inputs),
        lambda: step(alone, inputs),
        "no synchronisation",
        WARM_UP_STEPS,
    )


def step(model: nn.Module, inputs: Tensor) -> None:
    model.zero_grad()
    model(inputs).square().mean().backward()


@pytest.mark.parametrize(
    ("model", "nprocs"), [("small", 2), ("middle", 2), ("small", 4)], ids=lambda value: str(value)
)
def bench_reducer_step(measure_in_turns: MeasureInTurns, model: str, nprocs: int) -> None:
    measure_in_turns(nprocs, step_pair, model)
