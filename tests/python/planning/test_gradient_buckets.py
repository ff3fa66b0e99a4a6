"""The buckets that a plan predicts are those that the reducer makes."""

import pytest
import torch
from torch import nn
from training import TIME_LIMIT

from pydist.parallel.bucket_planner import DEFAULT_CAP_BYTES, typical_cap_bytes
from pydist.planning.gradient_buckets import (
    data_parallel_cap_bytes,
    gradients_of,
    ready_buckets,
    ready_shares_by_size,
    sharded_cap_bytes,
)
from pydist.planning.step_time import ReadyBucket

pytestmark = TIME_LIMIT

MIB = 1 << 20


def test_gradients_that_travel() -> None:
    """Neither frozen nor sparse ones, in the order of backward, in the dtype that is asked for."""
    model = nn.Sequential(
        nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4), nn.Linear(4, 8), nn.Linear(8, 2)
    )
    model[1].requires_grad_(False)
    model[3].double()
    found = gradients_of(model, None)
    names = ["3.bias", "3.weight", "2.bias", "2.weight"]
    assert [gradient.name for gradient in found] == names
    assert [gradient.size_bytes for gradient in found] == [16, 128, 32, 128]
    assert found[0].block == found[1].block != found[2].block == found[3].block
    half = gradients_of(model, torch.bfloat16)
    assert [gradient.size_bytes for gradient in half] == [4, 32, 16, 64]
    assert len({gradient.block for gradient in half}) == 1


def test_buckets_are_ready_with_their_last_gradient() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))
    gradients = gradients_of(model, None)
    shares = ready_shares_by_size(gradients)
    assert shares == {"3.weight": 0.25, "2.weight": 0.5, "1.weight": 0.75, "0.weight": 1.0}
    assert ready_buckets(gradients, shares, 2 * MIB) == [
        ReadyBucket(2 * MIB, 0.5),
        ReadyBucket(2 * MIB, 1.0),
    ]
    assert ready_buckets(gradients, shares, 3 * MIB) == [
        ReadyBucket(3 * MIB, 0.75),
        ReadyBucket(MIB, 1.0),
    ]
    assert ready_buckets([], {}, MIB) == []


def test_the_size_of_buckets_follows_the_link() -> None:
    """As pydist.DataParallel chooses: by what small and large all-reduces take."""
    fast, slow = (
        data_parallel_cap_bytes(
            100 * MIB,
            None,
            lambda size, speed=speed: 10e-6 + size / speed,  # type: ignore[misc]
        )
        for speed in (10e9, 0.1e9)
    )
    assert fast == typical_cap_bytes(100 * MIB)
    assert slow < fast
    assert data_parallel_cap_bytes(100 * MIB, None, lambda _: 1.0) == DEFAULT_CAP_BYTES
    assert data_parallel_cap_bytes(100 * MIB, 3, lambda _: 1.0) == 3 * MIB
    assert sharded_cap_bytes(100 * MIB, None) == typical_cap_bytes(100 * MIB)
    assert sharded_cap_bytes(100 * MIB, 0.5) == pytest.approx(MIB / 2)
