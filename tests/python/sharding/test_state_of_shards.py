"""`optimizer.state` of a sharded optimizer, as programs and frameworks walk it."""

import copy
import gc
import io
import pickle
import weakref
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from state_walks import WALKS
from thorough import everyday
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
)
from training import Runner, batch, joined
from twins import TIME_LIMIT, Twins, assert_same, small_model

import pydist

pytestmark = TIME_LIMIT


def train(twins: Twins, number: int) -> None:
    """One step of both; kernels' last bits may differ from torch's."""

    def act(model: Any, optimizer: Any) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(batch(twins.rank, 6, 10, step=number, dtype=torch.float32))
        loss = loss.square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    torch.testing.assert_close(*twins.each(act))


def walk_while_training(fused: bool) -> None:
    """Whatever is done through it means what it means on whole parameters."""
    cases: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
        (torch.optim.AdamW, {"lr": 0.01}),
        (torch.optim.SGD, {"lr": 1e-4, "momentum": 0.9}),
    ]
    for kind, options in cases:
        for stage in (1, 2):
            twins = Twins(small_model(), kind, options={**options, "fused": fused}, stage=stage)
            number = 0
            for walk in WALKS:
                for _ in range(2):
                    train(twins, number)
                    number += 1
                twins.each(lambda _, optimizer, walk=walk: walk(optimizer))
                assert_whole_state(twins, f"{kind.__name__}, {walk.__name__}")
                train(twins, number)
                number += 1
                twins.check(f"{kind.__name__} after {walk.__name__}", exact=False)


def assert_whole_state(twins: Twins, what: str) -> None:
    """The shards of all ranks, one behind the other, are the whole state."""
    layout = twins.ours._layout
    mine = {
        name: (layout.segments[number].begin, dict(twins.ours.state[parameter]))
        for number, (name, parameter) in enumerate(twins.models[0].named_parameters())
        if parameter in twins.ours.state
    }
    everybody: list[Any] = [None] * twins.size
    # Clones, since none of them can be pickled.
    plain = {
        name: (begin, {k: v.clone() if isinstance(v, Tensor) else v for k, v in values.items()})
        for name, (begin, values) in mine.items()
    }
    dist.all_gather_object(everybody, plain)
    for name, parameter in twins.models[1].named_parameters():
        parts = sorted((each[name] for each in everybody if name in each), key=lambda part: part[0])
        for key, whole in twins.theirs.state[parameter].items():
            if isinstance(whole, Tensor) and whole.dim():
                found = torch.cat([values[key] for _, values in parts])
                assert_same(found, whole.reshape(-1), f"{what}: {key} of {name}", exact=False)
            else:
                assert all(values[key] == whole for _, values in parts), (what, key, name)


def log_like_loggers() -> None:
    twins = Twins(small_model(), torch.optim.AdamW, options={"lr": 0.01})
    optimizer = twins.ours
    for kind in (optimizer, twins.theirs):
        assert len(kind.state) == 0
        assert not kind.state
        assert list(kind.state) == list(kind.state.items()) == list(kind.state.values()) == []
        assert isinstance(kind.state, defaultdict)
        first = kind.param_groups[0]["params"][0]
        assert first not in kind.state
        assert kind.state.get(first) is None
        kind.state = defaultdict(dict)
    assert dict(optimizer.state[next(twins.models[0].parameters())]) == {}
    twins.step(0)
    squares = torch.zeros(2)
    for number, each in enumerate((optimizer, twins.theirs)):
        for group in each.param_groups:
            for parameter in group["params"]:
                state = each.state[parameter]
                if "exp_avg" in state:
                    squares[number] += state["exp_avg"].square().sum()
                    assert state["step"] == 1
    pydist.all_reduce(squares[:1])
    torch.testing.assert_close(squares[0], squares[1])
    # It follows the optimizer, and is the same tensor at each look.
    held = dict(optimizer.state.items())
    moments = [s["exp_avg"] for s in held.values()]
    before = [m.clone() for m in moments]
    twins.step(1)
    assert all(s["exp_avg"] is m for s, m in zip(held.values(), moments, strict=True))
    assert not any(torch.equal(m, b) for m, b in zip(moments, before, strict=True))
    assert all(state["step"] == 2 for state in held.values())
    # Parameters that are wholly elsewhere have nothing here, and say why.
    elsewhere = [p for p in twins.models[0].parameters() if p not in optimizer.state]
    for parameter in elsewhere:
        assert len(optimizer.state[parameter]) == 0
        with pytest.raises(KeyError, match="this rank has nothing of it"):
            optimizer.state[parameter]["exp_avg"]
    total: list[Any] = [None] * twins.size
    dist.all_gather_object(total, len(optimizer.state) + len(elsewhere))
    assert set(total) == {len(list(twins.models[0].parameters()))}
    with pytest.raises(KeyError, match="does not have"):
        optimizer.state[torch.ones(1)]
    # torch's profiler looks for it, from C++.
    with torch.profiler.profile(profile_memory=True, with_stack=True, record_shapes=True):
        optimizer.step()
    repr(optimizer.state)
    repr(list(optimizer.state.values()))


def refuse_parts(folder: str) -> None:
    """What would copy, remove or save this rank's part of it for all."""
    twins = Twins(small_model(), torch.optim.AdamW, options={"lr": 0.01})
    twins.step(0)
    model, optimizer = twins.models[0], twins.ours
    state = optimizer.state
    before = copy.deepcopy(optimizer.sharded_state())
    first = next(iter(state))
    shard = state[first]
    stream = io.BytesIO()
    plain = dict(shard)
    acts: list[Callable[[], Any]] = [
        state.clear,
        lambda: state.pop(first),
        state.popitem,
        lambda: state.__delitem__(first),
        lambda: copy.deepcopy(state),
        lambda: pickle.dumps(state),
        lambda: torch.save(state, stream),
        lambda: torch.save(
            {"optimizer": {str(n): v for n, v in enumerate(state.values())}}, stream
        ),
        lambda: torch.save(shard, stream),
        lambda: torch.save(plain, stream),
        lambda: torch.save(shard["exp_avg"], stream),
        lambda: torch.save(copy.deepcopy(shard), stream),
        lambda: state.__setitem__(first, {}),
        lambda: state.__setitem__(first, {"exp_avg": shard["exp_avg"]}),
        lambda: state.__setitem__(first, {**plain, "exp_avg": torch.zeros(3, 5)}),
        lambda: state.update({first: {}}),
        lambda: setattr(optimizer, "state", defaultdict(dict)),
        lambda: setattr(optimizer, "state", {first: plain}),
        lambda: shard.__setitem__("exp_avg", torch.zeros(3, 5)),
        lambda: shard.__setitem__("exp_avg", 0.0),
        lambda: shard.__setitem__("step", torch.ones(2)),
        lambda: shard.__setitem__("other", torch.zeros_like(first)),
        lambda: shard.pop("step"),
        lambda: shard.clear(),
        lambda: shard.popitem(),
        lambda: shard.__delitem__("step"),
        lambda: get_optimizer_state_dict(model, optimizer),
        lambda: pydist.save(f"{folder}/pydist", extra={"moment": shard["exp_avg"]}),
        lambda: pydist.save(f"{folder}/pydist", extra=state),
    ]
    for number, act in enumerate(acts):
        with pytest.raises(pydist.InvalidUsage, match=r"optimizer\.state|pydist\.save"):
            pytest.fail(f"{number}: {act()}")
    writes: list[Any] = [
        {"optimizer": state},
        {"optimizer": {"weight": shard}},
        {"optimizer": {"weight": plain}},
        {"moment": shard["exp_avg"]},
    ]
    for number, written in enumerate(writes):
        with pytest.raises(BaseException, match=r"use pydist\.save"):
            pytest.fail(f"{number}: {dcp.save(written, checkpoint_id=f'{folder}/torch')}")
    # None of it has changed anything; and what is a copy can be kept.
    torch.save({name: value.clone() for name, value in plain.items()}, stream)
    after = optimizer.sharded_state()
    for name, known in before.parameters.items():
        for old, new in zip(known.ranges, after.parameters[name].ranges, strict=True):
            assert all(torch.equal(old.values[key], new.values[key]) for key in old.values)
    twins.step(1)
    twins.check("after that")


def show_what_was_loaded() -> None:
    """Also of parameters that are frozen: those have all of it, on every rank."""
    rank, _ = joined()
    module = small_model()
    plain = torch.optim.AdamW(module.parameters(), lr=0.01)
    module(batch(rank, 4, 10, dtype=torch.float32)).sum().backward()
    plain.step()
    plain.zero_grad()
    other = small_model()
    other[0].weight.requires_grad_(False)
    model = pydist.DataParallel(other)
    optimizer = pydist.ShardedOptimizer(model, torch.optim.AdamW, lr=0.01)
    optimizer.load_state_dict(plain.state_dict())
    frozen = other[0].weight
    assert torch.equal(optimizer.state[frozen]["exp_avg"], plain.state[module[0].weight]["exp_avg"])
    assert frozen in optimizer.state
    for name, value in optimizer.state[other[2].weight].items():
        if name != "step":
            begin = optimizer._layout.segments[2].begin
            whole = plain.state[module[2].weight][name].reshape(-1)
            assert torch.equal(value, whole[begin : begin + value.numel()])
    other[0].weight.requires_grad_(True)
    model(batch(rank, 4, 10, dtype=torch.float32)).sum().backward()
    optimizer.step()
    if frozen in optimizer.state:
        assert optimizer.state[frozen]["exp_avg"].dim() == 1


def forget_optimizers() -> None:
    """Without the collector of cycles: other ranks wait for what an optimizer still brings."""
    rank, _ = joined()
    gc.disable()
    try:
        for shared in (False, True):
            model = pydist.DataParallel(small_model())
            optimizer = pydist.ShardedOptimizer(model, torch.optim.SGD, share_parameters=shared)
            model(batch(rank, 4, 10, dtype=torch.float32)).sum().backward()
            optimizer.step()
            state = optimizer.state
            assert isinstance(list(state.items()), list)
            gone = weakref.ref(optimizer)
            del optimizer
            assert gone() is None
    finally:
        gc.enable()


def test_an_optimizer_goes_with_its_last_reference(run_sharded: Runner) -> None:
    run_sharded(forget_optimizers)


@pytest.mark.parametrize("fused", everyday(True, thorough=(False,)))
def test_what_is_written_through_it_reaches_the_shards(run_sharded: Runner, fused: bool) -> None:
    run_sharded(walk_while_training, fused)


def test_what_loggers_find(run_sharded: Runner) -> None:
    run_sharded(log_like_loggers)


def test_parts_are_not_taken_for_the_whole(run_sharded: Runner, tmp_path: Path) -> None:
    run_sharded(refuse_parts, str(tmp_path))


def test_what_was_loaded_is_shown(run_sharded: Runner) -> None:
    run_sharded(show_what_was_loaded)
