"""The state of a `pydist.ShardedOptimizer` in its own forms and in torch's, without files."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from launch import run_ranks
from training import Runner, batch, joined
from twins import LIMIT_S, TIME_LIMIT, ManyKinds, Twins, assert_same, is_exact, small_model

import pydist

pytestmark = TIME_LIMIT


def gathered(optimizer: pydist.ShardedOptimizer) -> pydist.ShardedState:
    """The whole state on every rank, by a detour through pickles."""
    everybody: list[Any] = [None] * pydist.world_size()
    torch.distributed.all_gather_object(everybody, optimizer.sharded_state())
    return pydist.ShardedState.merged(everybody)


def save_and_load(stage: int) -> None:
    """Goes on from any form of the state, at another stage, with other buckets and layouts."""
    torch.manual_seed(1)
    twins = Twins(ManyKinds(), torch.optim.Adam, cap_mb=0.002, stage=stage)
    for step in range(2):
        twins.step(step)
    values = copy.deepcopy(twins.models[0].state_dict())
    local = copy.deepcopy(twins.ours.state_dict())
    whole = gathered(twins.ours)
    torch_state = copy.deepcopy(twins.theirs.state_dict())
    twins.step(2)
    expected = [p.detach().clone() for p in twins.models[0].parameters()]

    def go_on(load: Callable[[pydist.ShardedOptimizer], None], cap_mb: float, stage: Any) -> None:
        torch.manual_seed(2)
        module = ManyKinds()
        if cap_mb == 1:
            module.image.to(memory_format=torch.contiguous_format)
        again = Twins(module, torch.optim.Adam, cap_mb=cap_mb, stage=stage, options={"lr": 5.0})
        again.models[0].load_state_dict(values)
        load(again.ours)
        again.ours.zero_grad()
        loss = (
            again.models[0](batch(twins.rank, 6, 10, step=2, dtype=torch.float32)).square().mean()
        )
        loss.backward()
        again.ours.step()
        for ours, theirs in zip(again.models[0].parameters(), expected, strict=True):
            # A convolution rounds differently in another layout.
            assert_same(ours.detach(), theirs, "resumed", exact=is_exact() and cap_mb != 1)

    go_on(lambda optimizer: optimizer.load_state_dict(local), 0.002, stage)
    go_on(lambda optimizer: optimizer.load_sharded_state(whole), 1e-6, 3 - stage)
    go_on(lambda optimizer: optimizer.load_sharded_state(whole), 1, 3 - stage)
    if is_exact():
        go_on(lambda optimizer: optimizer.load_state_dict(torch_state), 0.002, stage)

    again = Twins(ManyKinds(), torch.optim.Adam, cap_mb=1e-6)
    part = pydist.StateRange(0, 1, {"exp_avg": torch.zeros(1, dtype=torch.float64)})
    whole.parameters["twofold"].ranges = [part]
    with pytest.raises(pydist.InvalidUsage, match="twofold lacks elements"):
        again.ours.load_sharded_state(whole)
    with pytest.raises(pydist.InvalidUsage, match="unknown to"):
        again.ours.load_sharded_state(pydist.ShardedState({}, []))


def load_refused_options(folder: str) -> None:
    """What the constructor refuses, loading refuses as well, before anything has changed."""
    joined()
    twins = Twins(small_model(), torch.optim.AdamW)
    twins.step(0)
    model, optimizer = twins.models[0], twins.ours
    plain = copy.deepcopy(twins.theirs.state_dict())
    before = copy.deepcopy(optimizer.sharded_state())
    for key in ("capturable", "differentiable"):
        theirs, ours = copy.deepcopy((plain, optimizer.state_dict()))
        named = copy.deepcopy(before)
        for group in (theirs["param_groups"][0], ours["param_groups"][0], named.groups[0]):
            group.update({key: True, "lr": 7.0})
        values = {name: torch.zeros_like(v) for name, v in model.module.state_dict().items()}
        other = small_model()
        other.load_state_dict(values)
        path = f"{folder}/{key}"
        pydist.save(
            path, model=other, optimizer=torch.optim.AdamW(other.parameters(), **{key: True})
        )
        loads: list[Callable[[], Any]] = [
            functools.partial(optimizer.load_state_dict, theirs),
            functools.partial(optimizer.load_state_dict, ours),
            functools.partial(optimizer.load_sharded_state, named),
            functools.partial(
                pydist.checkpoint.from_torch,
                {"model": values, "optimizer": theirs},
                model=model,
                optimizer=optimizer,
            ),
            functools.partial(pydist.load, path, model=model, optimizer=optimizer),
        ]
        for load in loads:
            with pytest.raises(pydist.InvalidUsage, match=f"{key}=True .*{key}=False"):
                load()
            assert optimizer.param_groups[0]["lr"] != 7.0
    after = optimizer.sharded_state()
    assert after.groups == before.groups
    twins.check("nothing has changed")
    twins.step(1)
    twins.check("nothing has changed")


def test_options_that_are_refused(run_sharded: Runner, tmp_path: Any) -> None:
    run_sharded(load_refused_options, str(tmp_path))


def load_of_another_class() -> None:
    """Named before anything has changed, whether whole or sharded."""
    joined()
    twins = Twins(small_model(), torch.optim.Adam)
    twins.step(0)
    before = copy.deepcopy(twins.ours.sharded_state())
    for other, match in (
        (torch.optim.SGD, "another class than Adam: it lacks amsgrad.*it has dampening"),
        (torch.optim.AdamW, "another class than Adam: its decoupled_weight_decay is True"),
        (torch.optim.RMSprop, "another class than Adam: it lacks"),
    ):
        others = Twins(small_model(), other, options={"lr": 7.0})
        others.step(0)
        for optimizer in others.optimizers:
            with pytest.raises(pydist.InvalidUsage, match=match):
                twins.ours.load_state_dict(optimizer.state_dict())
    with pytest.raises(pydist.InvalidUsage, match="has no 'state'"):
        twins.ours.load_state_dict({"param_groups": []})
    after = twins.ours.sharded_state()
    assert after.groups == before.groups
    for name, known in before.parameters.items():
        for old, new in zip(known.ranges, after.parameters[name].ranges, strict=True):
            assert all(torch.equal(old.values[key], new.values[key]) for key in old.values)
    # What torch has added to its classes since may be missing.
    earlier = copy.deepcopy(twins.theirs.state_dict())
    for group in earlier["param_groups"]:
        for key in ("fused", "foreach", "decoupled_weight_decay"):
            del group[key]
    twins.ours.load_state_dict(earlier)
    twins.step(1)
    twins.check("of an earlier torch")


def test_state_of_another_class(run_native: Runner) -> None:
    run_native(load_of_another_class)


def load_what_hooks_have_changed() -> None:
    """Hooks may add any key but those of a rank's part, in which case they are blamed."""
    _, ranks = joined()
    twins = Twins(small_model(), torch.optim.Adam)
    twins.step(0)
    whole = {**twins.theirs.state_dict(), "parameters": 7}
    twins.ours.load_state_dict(whole)
    twins.ours.register_state_dict_post_hook(lambda _, state: {**state, "parameters": 7})
    if ranks == 1:
        twins.ours.load_state_dict(twins.ours.state_dict())
    else:
        with pytest.raises(pydist.InvalidUsage, match="an int there: a state-dict hook"):
            twins.ours.load_state_dict(twins.ours.state_dict())
    twins.step(1)
    twins.check("of hooks")


def test_a_hook_may_add_to_a_state(run_native: Runner) -> None:
    run_native(load_what_hooks_have_changed)


def test_a_hook_may_add_to_the_state_of_one_rank() -> None:
    run_ranks(load_what_hooks_have_changed, 1, timeout=LIMIT_S)


@pytest.mark.parametrize("stage", [1, 2])
def test_state(run_sharded: Runner, stage: int) -> None:
    run_sharded(save_and_load, stage)
