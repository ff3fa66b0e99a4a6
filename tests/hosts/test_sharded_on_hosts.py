"""A sharded optimizer over hosts steps as the unsharded one, and each rank has a part of the state.

Ranks 0 and 1 are on one host, rank 2 is on another.
"""

from collections.abc import Iterator

import pytest
import torch
from launch import Ranks
from namespaces import Hosts
from ranks_on import RanksOn
from saved_training import STAGE_1, STAGE_2, WHOLE, Training, assert_same
from thorough import everyday
from torch import nn
from training import joined
from twins import LIMIT_S, Twins, small_model

import pydist

pytestmark = pytest.mark.timeout(60)

RANKS_PER_HOST = [2, 1]


@pytest.fixture(scope="module")
def ranks(hosts: Hosts) -> Iterator[Ranks]:
    with RanksOn(hosts, RANKS_PER_HOST) as ranks:
        yield ranks


def train_twins(stage: int) -> str:
    twins = Twins(small_model(), torch.optim.AdamW, stage=stage, options={"lr": 1e-2})
    for step in range(5):
        twins.step(step)
    twins.check("after 5 steps")
    return pydist.backend()


@pytest.mark.parametrize("stage", [STAGE_1, STAGE_2])
def test_small_buckets_step_as_unsharded_to_the_bit(ranks: Ranks, stage: int) -> None:
    """Their gradients are added up in rank order, averaged into shards or not."""
    assert set(ranks.run(train_twins, stage, timeout=LIMIT_S)) == {"native"}


def train_wide_twins(stage: int) -> str:
    joined()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(10, 4096), nn.Tanh(), nn.Linear(4096, 1)).double()
    twins = Twins(module, torch.optim.AdamW, cap_mb=0.5, stage=stage, options={"lr": 1e-2})
    for step in range(5):
        twins.step(step, exact=False)
    twins.check("after 5 steps", exact=False)
    return pydist.backend()


@pytest.mark.parametrize("stage", everyday(STAGE_2, thorough=(STAGE_1,)))
def test_large_buckets_step_as_unsharded(ranks: Ranks, stage: int) -> None:
    """Up to rounding: an all_reduce of theirs adds up by hosts, a reduce_scatter in rank order."""
    assert set(ranks.run(train_wide_twins, stage, timeout=LIMIT_S)) == {"native"}


def train_beside_one_process(stage: int) -> None:
    rank, size = joined()
    alone = [pydist.new_group([each]) for each in range(size)][rank]
    everybody = pydist.new_group(range(size))
    ours = Training(everybody, stage).run(range(10))
    theirs = Training(alone, WHOLE).run(range(10))
    assert_same(ours, theirs, "beside one process on the whole batch", exact=False)


@pytest.mark.parametrize("stage", everyday(STAGE_1, thorough=(STAGE_2,)))
def test_steps_as_one_process(ranks: Ranks, stage: int) -> None:
    ranks.run(train_beside_one_process, stage, timeout=LIMIT_S)


Ranges = dict[str, list[tuple[int, int]]]


def state_of(stage: int) -> tuple[dict[str, int], Ranges]:
    """The number of elements of each parameter, and those whose moments this rank has."""
    joined()
    model = pydist.DataParallel(small_model(), bucket_cap_mb=0.004)
    optimizer = pydist.ShardedOptimizer(model, torch.optim.AdamW, stage=stage)
    model(torch.ones(2, 10)).sum().backward()
    optimizer.step()
    optimizer.finish()
    ranges: Ranges = {}
    for name, known in optimizer.sharded_state().parameters.items():
        ranges[name] = [(each.begin, each.end) for each in known.ranges]
        for each in known.ranges:
            assert each.values["exp_avg"].numel() == each.end - each.begin
    return {name: p.numel() for name, p in model.named_parameters()}, ranges


@pytest.mark.parametrize("stage", [STAGE_1, STAGE_2])
def test_each_rank_keeps_a_part_of_the_state(ranks: Ranks, stage: int) -> None:
    counts, ranges = zip(*ranks.run(state_of, stage, timeout=LIMIT_S), strict=True)
    total = sum(counts[0].values())
    for name, count in counts[0].items():
        parts = sorted(part for each in ranges for part in each.get(name, []))
        starts, stops = zip(*parts, strict=True)
        assert starts == (0, *stops[:-1]), f"{name}: gaps, or parts that two ranks have"
        assert stops[-1] == count
    for each in ranges:
        kept = sum(stop - start for parts in each.values() for start, stop in parts)
        # Each bucket is cut evenly, up to how its shards are aligned.
        assert kept == pytest.approx(total / len(ranges), rel=0.2)
