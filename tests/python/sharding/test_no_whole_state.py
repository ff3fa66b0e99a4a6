"""A rank's part of a sharded optimizer's state is never taken for the whole state."""

import copy
import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from launch import Ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
)
from training import LIMIT_S, TIME_LIMIT, batch, joined

import pydist
from pydist.sharding.state.ranges import cut_out

pytestmark = TIME_LIMIT


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2, {"PYDIST_BACKEND": "native"}) as ranks:
        yield ranks


def trained(seed: int = 0, steps: int = 2) -> tuple[Any, pydist.ShardedOptimizer]:
    """With parameters that are one rank's alone, and one that has no state yet."""
    rank, _ = joined()
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(10, 33), nn.Tanh(), nn.Linear(33, 3), nn.Linear(3, 1))
    module[0].weight.requires_grad_(False)
    model = pydist.DataParallel(module, bucket_cap_mb=1.0)
    optimizer = pydist.ShardedOptimizer(model, torch.optim.AdamW, lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(rank, 4, 10, step=step, dtype=torch.float32)).sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def save_with_torch(folder: str) -> None:
    model, optimizer = trained()
    before = copy.deepcopy(optimizer.sharded_state())
    state = optimizer.state_dict()
    readers: list[Callable[[], Any]] = [
        lambda: get_optimizer_state_dict(model, optimizer),
        lambda: get_state_dict(model, optimizer),
        lambda: set_optimizer_state_dict(model, optimizer, {"state": {}, "param_groups": []}),
    ]
    for read in readers:
        with pytest.raises(pydist.InvalidUsage, match=r"one rank's part.*use pydist\.save"):
            read()
    for keeper in ({"optimizer": optimizer}, {"optimizer": state}, copy.deepcopy(state)):
        with pytest.raises(BaseException, match=r"one rank's part.*use pydist\.save"):
            dcp.save(keeper, checkpoint_id=f"{folder}/torch")
    with pytest.raises(pydist.InvalidUsage, match=r"extra can't be saved.*use pydist\.save"):
        pydist.save(f"{folder}/pydist", extra=state)
    # Nothing of it has changed anything.
    after = optimizer.sharded_state()
    for name, known in before.parameters.items():
        pairs = zip(known.ranges, after.parameters[name].ranges, strict=True)
        for old, new in pairs:
            assert all(torch.equal(old.values[key], new.values[key]) for key in old.values)


def test_torchs_distributed_checkpoint(two: Ranks, tmp_path: Any) -> None:
    two.run(save_with_torch, str(tmp_path), timeout=LIMIT_S)


def save_one_ranks(of_rank: int) -> None:
    """As scripts do that save on rank 0 and load on all."""
    rank, _ = joined()
    _, optimizer = trained()
    stream = io.BytesIO()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        copy.deepcopy(optimizer.state_dict())
        assert not caught
        torch.save(optimizer.state_dict(), stream)
    # The others, too, save only where every rank does.
    said = [str(warning.message) for warning in caught]
    assert len(said) == (rank == 0)
    assert all("rank 0's part of 2" in text and "pydist.save" in text for text in said)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=True)
    everybody: list[Any] = [None, None]
    torch.distributed.all_gather_object(everybody, (loaded, optimizer.sharded_state()))
    one, one_state = everybody[of_rank]
    _, other = trained(seed=1, steps=0)
    # Also of parameters that are wholly another rank's, so that there is nothing here.
    names = [name for name, known in one_state.parameters.items() if known.is_part]
    assert any(not one_state.parameters[name].ranges for name in names)
    loads: list[Callable[[], Any]] = [
        lambda: other.load_state_dict(one),
        lambda: other.load_sharded_state(one_state),
    ]
    for loaded_group in (one["param_groups"][0], one_state.groups[0]):
        loaded_group["lr"] = 7.0
    for load in loads:
        if rank == of_rank:
            load()
        else:
            with pytest.raises(pydist.InvalidUsage, match="lacks elements"):
                load()
            # Nothing has changed.
            assert other.param_groups[0]["lr"] == 0.1
            parts = other.sharded_state().parameters.values()
            assert not any(part.values for known in parts for part in known.ranges)
    merged = pydist.ShardedState.merged(state for _, state in everybody)
    other.load_sharded_state(merged)
    # What lacks only such parameters is refused as well.
    partial = copy.deepcopy(everybody[rank][1])
    for name in names:
        if name != "3.bias":
            partial.parameters[name] = merged.parameters[name]
    with_it = [r for r, (_, state) in enumerate(everybody) if state.parameters["3.bias"].ranges]
    assert len(with_it) == 1
    partial.parameters["3.bias"] = everybody[1 - with_it[0]][1].parameters["3.bias"]
    if rank == with_it[0]:
        with pytest.raises(pydist.InvalidUsage, match=r"3\.bias lacks elements 0 to 1"):
            other.load_sharded_state(partial)
    else:
        other.load_sharded_state(partial)


@pytest.mark.parametrize("of_rank", [0, 1])
def test_one_ranks_part_for_all(two: Ranks, of_rank: int) -> None:
    two.run(save_one_ranks, of_rank, timeout=LIMIT_S)


def test_parts_of_different_steps() -> None:
    """Memory that nothing was written into is no state."""
    ones = torch.ones(3)
    kinds: list[dict[str, Any]] = [{"a": ones, "b": ones}, {"a": ones}, {}]
    for first in kinds:
        for second in kinds:
            ranges = [pydist.StateRange(0, 3, first), pydist.StateRange(3, 6, second)]
            state = pydist.ParameterState((2, 3), (1, 0), ranges)
            for dims in ((1, 0), (0, 1)):
                if first.keys() == second.keys():
                    found = cut_out("weight", state, dims, 1, 6) or {}
                    assert found.keys() == first.keys()
                    assert all(torch.equal(value, torch.ones(5)) for value in found.values())
                else:
                    with pytest.raises(pydist.InvalidUsage, match=r"weight has .*a.* and .* for"):
                        cut_out("weight", state, dims, 1, 6)
