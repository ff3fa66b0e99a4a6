"""Planning buckets, beside the assignment that torch's DDP computes in C++ for as many tensors."""

import pytest
import torch
import torch.distributed as dist
from rank_groups import MeasureInTurns
from turns import Pair

from pydist.parallel.bucket_planner import DEFAULT_CAP_BYTES, PlannedParameter, plan_buckets

# Of a layer of a transformer, in elements: matrices, biases and the scales of its norms.
COUNTS = (3 * 512 * 512, 3 * 512, 512 * 512, 512, 4 * 512 * 512, 4 * 512, 512, 512)


def plan_pair(parameters: int) -> Pair:
    counts = [COUNTS[index % len(COUNTS)] for index in range(parameters)]
    planned = [
        PlannedParameter(index, f"layer.{index}", 4 * count, block=0, is_regular=True)
        for index, count in enumerate(counts)
    ]
    # Never touched: only their sizes count.
    tensors = [torch.empty(count, device="meta") for count in counts]
    return Pair(
        lambda: plan_buckets(planned, DEFAULT_CAP_BYTES),
        lambda: dist._compute_bucket_assignment_by_size(tensors, [DEFAULT_CAP_BYTES]),
        "torch's assignment",
    )


@pytest.mark.parametrize("parameters", [100, 1000])
def bench_bucket_plan(measure_in_turns: MeasureInTurns, parameters: int) -> None:
    measure_in_turns(1, plan_pair, parameters)
