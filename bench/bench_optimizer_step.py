"""The fused AdamW step of a shard, beside torch's and beside its memory traffic alone."""

import pytest
import torch
from optimizer_step import arms_of
from rank_groups import MeasureInTurns
from turns import Pair

# Of 4 MB a tensor, beyond a core's own caches, and of 64 KB, within them.
ELEMENTS = {"large": 1 << 20, "small": 1 << 14}


def torch_pair(elements: int) -> Pair:
    arms = arms_of(elements, torch.float32)
    assert arms.torchs is not None
    return Pair(arms.ours, arms.torchs, "torch's fused step")


def traffic_pair(elements: int) -> Pair:
    arms = arms_of(elements, torch.bfloat16)
    return Pair(arms.ours, arms.traffic, "its reads and writes alone")


@pytest.mark.parametrize("size", ELEMENTS)
def bench_optimizer_step(measure_in_turns: MeasureInTurns, size: str) -> None:
    measure_in_turns(1, torch_pair, ELEMENTS[size])


def bench_optimizer_step_bfloat16(measure_in_turns: MeasureInTurns) -> None:
    measure_in_turns(1, traffic_pair, ELEMENTS["large"])
