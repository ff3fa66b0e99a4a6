"""A sharded optimizer in a world of one has the state of torch's."""

import copy
import io
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from launch import Ranks
from state_walks import WALKS, move_mappings, move_values, put_back_all, zero_in_place
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from training import batch, joined
from twins import LIMIT_S, TIME_LIMIT, ManyKinds, small_model

import pydist

pytestmark = TIME_LIMIT


@pytest.fixture(scope="module")
def alone() -> Iterator[Ranks]:
    with Ranks(1, {"PYDIST_BACKEND": "native"}) as ranks:
        yield ranks


def like_torch() -> None:
    """Everything that torch's `optimizer.state` can do, in the parameters' own shapes."""
    joined()

    def trained() -> list[tuple[Any, Any]]:
        torch.manual_seed(3)
        modules = [ManyKinds() for _ in range(2)]
        modules[1].load_state_dict(modules[0].state_dict())
        model = pydist.DataParallel(modules[0], bucket_cap_mb=0.001)
        pairs: list[tuple[Any, Any]] = [
            (model, pydist.ShardedOptimizer(model, torch.optim.AdamW, lr=0.01)),
            (modules[1], torch.optim.AdamW(modules[1].parameters(), lr=0.01)),
        ]
        step(pairs, 0)
        return pairs

    def step(pairs: list[tuple[Any, Any]], number: int) -> None:
        for net, optimizer in pairs:
            optimizer.zero_grad()
            net(batch(0, 2, 30, step=number, dtype=torch.float32)).sum().backward()
            optimizer.step()

    def names(pair: tuple[Any, Any]) -> dict[int, str]:
        return {id(p): name for name, p in pair[0].named_parameters()}

    def as_plain(pair: tuple[Any, Any], state: Any = None) -> dict[str, dict[str, Any]]:
        known = names(pair)
        state = pair[1].state if state is None else state
        # What has no elements has no place in a shard. Torch's puts in what is asked for.
        return {
            known[id(p)]: dict(values)
            for p, values in state.items()
            if values and known[id(p)] != "empty"
        }

    def compare(pairs: list[tuple[Any, Any]], what: str) -> None:
        ours, theirs = (as_plain(pair) for pair in pairs)
        assert ours.keys() == theirs.keys(), what
        for name, values in theirs.items():
            assert ours[name].keys() == values.keys(), (what, name)
            for key, value in values.items():
                torch.testing.assert_close(ours[name][key], value, msg=f"{what} {name} {key}")
                assert ours[name][key].shape == value.shape
        for ours_p, theirs_p in zip(
            pairs[0][0].parameters(), pairs[1][0].parameters(), strict=True
        ):
            torch.testing.assert_close(ours_p.detach(), theirs_p.detach())

    def image(pair: tuple[Any, Any]) -> Tensor:
        found: Tensor = pair[0].image.weight
        return found

    def set_whole(pair: tuple[Any, Any]) -> None:
        pair[1].state[image(pair)]["exp_avg"] = torch.full_like(image(pair), 0.125)

    def set_mapping(pair: tuple[Any, Any]) -> None:
        values = {k: v.clone() for k, v in pair[1].state[image(pair)].items()}
        values["exp_avg"].mul_(2)
        pair[1].state[image(pair)] = values

    def scale_rows(pair: tuple[Any, Any]) -> None:
        pair[1].state[image(pair)]["exp_avg"][2, 1:] = 0
        pair[1].state[pair[0].transposed]["exp_avg_sq"][:, 3] *= 2

    def remove(pair: tuple[Any, Any]) -> None:
        del pair[1].state[image(pair)]
        assert image(pair) not in pair[1].state

    def pop(pair: tuple[Any, Any]) -> None:
        popped = pair[1].state.pop(image(pair))
        assert popped["exp_avg"].shape == image(pair).shape
        assert pair[1].state.pop(image(pair), None) is None

    def clear(pair: tuple[Any, Any]) -> None:
        pair[1].state.clear()
        assert len(pair[1].state) == 0

    def reset(pair: tuple[Any, Any]) -> None:
        pair[1].state = defaultdict(dict)
        assert not pair[1].state

    def round_trip(pair: tuple[Any, Any]) -> None:
        stream = io.BytesIO()
        torch.save(list(pair[1].state.values()), stream)
        stream.seek(0)
        kept = torch.load(stream, weights_only=True)
        for parameter, values in zip(list(pair[1].state), kept, strict=True):
            pair[1].state[parameter] = values

    def deep_copy(pair: tuple[Any, Any]) -> None:
        copied = copy.deepcopy(pair[1].state)
        assert len(copied) == len(pair[1].state)
        assert type(copied) is defaultdict

    def through_state_dict(pair: tuple[Any, Any]) -> None:
        pair[1].load_state_dict(copy.deepcopy(pair[1].state_dict()))

    def own_values(pair: tuple[Any, Any]) -> None:
        pair[1].state[image(pair)]["mine"] = torch.ones(())
        assert pair[1].state[image(pair)].pop("mine") == 1

    acts = [
        set_whole,
        set_mapping,
        scale_rows,
        remove,
        pop,
        clear,
        reset,
        round_trip,
        deep_copy,
        through_state_dict,
        own_values,
        move_values,
        move_mappings,
        put_back_all,
        zero_in_place,
    ]
    for act in acts:
        pairs = trained()
        compare(pairs, "trained")
        for pair in pairs:
            act(pair if act not in WALKS else pair[1])  # type: ignore[arg-type]
        compare(pairs, act.__name__)
        step(pairs, 1)
        compare(pairs, f"stepped after {act.__name__}")
    # Either's state_dict() is the other's.
    pairs = trained()
    ours, theirs = (copy.deepcopy(optimizer.state_dict()) for _, optimizer in pairs)
    pairs[0][1].load_state_dict(theirs)
    compare(pairs, "loaded from torch's")
    # Torch's own wants what has no elements as well.
    for group in (ours["state"], theirs["state"]):
        group.pop(4, None)
    pairs[1][1].load_state_dict(ours)
    compare(pairs, "loaded into torch's")


def keep_by_torchs_checkpoint(folder: str) -> None:
    """One process, that has the whole state."""
    joined()
    for dtype in (torch.float32, torch.bfloat16):
        model = pydist.DataParallel(small_model(dtype))
        optimizer = pydist.ShardedOptimizer(model, torch.optim.AdamW, lr=0.01)
        x = batch(0, 4, 10, dtype=dtype)
        for _ in range(2):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        optimizer.zero_grad()
        stream = io.BytesIO()
        torch.save(optimizer.state, stream)
        stream.seek(0)
        pickled = torch.load(stream, weights_only=False)
        for mine, theirs in zip(optimizer.state.values(), pickled.values(), strict=True):
            assert all(torch.equal(mine[name], value) for name, value in theirs.items())
        kept = get_optimizer_state_dict(model, optimizer)
        dcp.save(kept, checkpoint_id=f"{folder}/{dtype}")
        before = copy.deepcopy(optimizer.sharded_state())
        for state in optimizer.state.values():
            state["exp_avg"].zero_()
        if dtype == torch.bfloat16:
            for bucket in optimizer._layout.buckets:
                for segment in bucket.segments:
                    segment.updated.add_(1e-5)
        read = copy.deepcopy(kept)
        dcp.load(read, checkpoint_id=f"{folder}/{dtype}")
        set_optimizer_state_dict(model, optimizer, read)
        after = optimizer.sharded_state()
        for name, known in before.parameters.items():
            for old, new in zip(known.ranges, after.parameters[name].ranges, strict=True):
                assert old.values.keys() == new.values.keys()
                for key, value in old.values.items():
                    assert torch.equal(value, new.values[key]), (dtype, name, key)


def test_a_world_of_one_is_torchs(alone: Ranks) -> None:
    alone.run(like_torch, timeout=LIMIT_S)


def test_torchs_checkpoints_in_a_world_of_one(alone: Ranks, tmp_path: Path) -> None:
    alone.run(keep_by_torchs_checkpoint, str(tmp_path), timeout=LIMIT_S)
