"""`pydist.plan(offload="cpu")` beside what an optimizer has on the host."""

from __future__ import annotations

import pytest
import torch
from gpu_ranks import needs_gpu_ranks
from gpu_twins import ENVIRONMENTS, start
from launch import run_ranks
from torch import Tensor, nn

import pydist
from pydist.sharding.state.ranges import MASTER

LIMIT_S = 40.0

pytestmark = [needs_gpu_ranks, pytest.mark.timeout(60)]


def on_the_host(dtype: torch.dtype, delayed: bool) -> tuple[int, int]:
    """Pinned bytes, and those of the state, of which none is on the GPU."""
    start()
    module = build(dtype).to("cuda")
    model = pydist.DataParallel(module, bucket_cap_mb=0.01)
    optimizer = pydist.ShardedOptimizer(
        model, torch.optim.AdamW, lr=0.1, offload="cpu", delayed=delayed
    )
    model(torch.ones(2, 130, device="cuda", dtype=dtype)).square().mean().backward()
    optimizer.step()
    state = [
        value
        for known in optimizer.sharded_state().parameters.values()
        for piece in known.ranges
        for key, value in piece.values.items()
        if isinstance(value, Tensor) and (key != MASTER or dtype == torch.bfloat16)
    ]
    assert {value.device.type for value in state} == {"cpu"}
    assert optimizer._offload is not None
    return optimizer._offload.pinned_bytes, sum(value.nbytes for value in state)


def build(dtype: torch.dtype) -> nn.Module:
    return nn.Sequential(nn.Linear(130, 211), nn.Tanh(), nn.Linear(211, 77)).to(dtype)


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_plan_tells_what_there_is(dtype: torch.dtype, delayed: bool) -> None:
    found = run_ranks(on_the_host, 2, dtype, delayed, env=ENVIRONMENTS["nccl"], timeout=LIMIT_S)
    plan = pydist.plan(build(dtype), 2, bucket_cap_mb=0.01, offload="cpu", delayed=delayed)
    assert plan.host is not None
    assert {pinned for pinned, _ in found} == {plan.host.pinned}
    assert max(state for _, state in found) == plan.host.state
