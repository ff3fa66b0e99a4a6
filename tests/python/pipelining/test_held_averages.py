"""An average that is held is concluded, or its loss is told on every rank."""

import gc
import time
import weakref
from typing import Any

import pytest
import torch
from launch import Ranks
from torch import Tensor, nn

import pydist

RANKS = 4


def model() -> pydist.DataParallel:
    pydist.init()
    torch.manual_seed(0)
    return pydist.DataParallel(nn.Linear(3, 2).double())


def sgd(wrapped: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(wrapped.parameters(), lr=0.5)


def go_backward(wrapped: pydist.DataParallel) -> None:
    """Each rank's gradient of the weight is its number, counted from 1."""
    wrapped(torch.full((1, 3), pydist.rank() + 1.0, dtype=torch.float64)).sum().backward()


def hold(wrapped: pydist.DataParallel) -> None:
    with wrapped.holding_average():
        go_backward(wrapped)


def gradient(wrapped: pydist.DataParallel) -> Tensor:
    found = wrapped.module.get_parameter("weight").grad
    assert found is not None
    return found


def require_mean(wrapped: pydist.DataParallel) -> None:
    mean = sum(range(1, RANKS + 1)) / RANKS
    assert torch.equal(gradient(wrapped), torch.full((2, 3), mean, dtype=torch.float64))


def require_next_step(wrapped: pydist.DataParallel) -> None:
    wrapped.zero_grad()
    hold(wrapped)
    wrapped.conclude_average()
    require_mean(wrapped)
    sgd(wrapped).step()


def what_concludes_it() -> None:
    wrapped = model()
    hold(wrapped)
    wrapped.sync_gradients()
    require_mean(wrapped)

    wrapped.zero_grad()
    hold(wrapped)
    with torch.no_grad():
        wrapped(torch.ones(1, 3, dtype=torch.float64))
    wrapped.conclude_average()
    require_mean(wrapped)

    wrapped.zero_grad()
    hold(wrapped)
    if pydist.rank() == 0:
        wrapped.eval()
        with torch.inference_mode():
            wrapped(torch.ones(1, 3, dtype=torch.float64))
        wrapped.train()
    wrapped.conclude_average()
    require_mean(wrapped)

    wrapped.zero_grad()
    with wrapped.join():
        hold(wrapped)
    require_mean(wrapped)


def test_an_evaluation_leaves_it_and_averages_of_the_wrapper_conclude_it(four: Ranks) -> None:
    four.run(what_concludes_it)


def contexts_nest() -> None:
    wrapped = model()
    with wrapped.holding_average():
        with wrapped.holding_average():
            pass
        go_backward(wrapped)
    assert wrapped._reducer.is_held
    wrapped.conclude_average()
    go_backward(wrapped)
    assert not wrapped._reducer.is_held


def test_contexts_nest(four: Ranks) -> None:
    four.run(contexts_nest)


def a_forward_comes_first(everywhere: bool) -> str:
    wrapped = model()
    optimizer = sgd(wrapped)
    hold(wrapped)
    if everywhere or pydist.rank() == 0:
        wrapped(torch.ones(1, 3, dtype=torch.float64))
    told = ""
    try:
        wrapped.conclude_average()
    except pydist.Error as error:
        told = f"{type(error).__name__}: {error}"
    if everywhere or pydist.rank() == 0:
        with pytest.raises(pydist.InvalidUsage, match=r"step\(\) has no gradients: the average"):
            optimizer.step()
    require_next_step(wrapped)
    return told


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_forward_that_comes_first_is_told(four: Ranks, everywhere: bool) -> None:
    first, *others = four.run(a_forward_comes_first, everywhere)
    assert "InvalidUsage: the average of the last backward's gradients was given up" in first
    assert "because a forward with gradients enabled came before conclude_average()" in first
    for other in others:
        assert (
            "InvalidUsage: the average" if everywhere else "Error: rank 0 went backward"
        ) in other


def a_backward_comes_first() -> str:
    wrapped = model()
    ones = torch.ones(1, 3, dtype=torch.float64)
    losses = [wrapped(ones).sum() for _ in range(2)]
    with wrapped.holding_average():
        losses[0].backward()
        with pytest.raises(pydist.InvalidUsage, match="because another backward came before"):
            losses[1].backward()
    with pytest.raises(pydist.InvalidUsage, match="because another backward came before"):
        wrapped.conclude_average()
    require_next_step(wrapped)
    return "told"


def test_a_backward_that_comes_first_raises(four: Ranks) -> None:
    assert four.run(a_backward_comes_first) == ["told"] * RANKS


def a_sharded_step_comes_first(stage: int) -> None:
    """On one rank, whose step raises before it votes: the others hear it from the round alone."""
    wrapped = model()
    optimizer: Any = pydist.ShardedOptimizer(wrapped, torch.optim.SGD, lr=0.5, stage=stage)
    for step in range(3):
        optimizer.zero_grad()
        hold(wrapped)
        if step == 1 and pydist.rank() == 1:
            with pytest.raises(pydist.InvalidUsage, match="before gradients are averaged"):
                optimizer.step()
            wrapped.give_up_average()
            continue
        if step == 1:
            with pytest.raises(pydist.Error, match="rank 1 went backward and did not wait"):
                wrapped.conclude_average()
            continue
        wrapped.conclude_average()
        optimizer.step()


@pytest.mark.parametrize("stage", [1, 2])
def test_a_sharded_step_leaves_the_ranks_in_step(four: Ranks, stage: int) -> None:
    four.run(a_sharded_step_comes_first, stage)


def is_dropped() -> str:
    """By one rank, which lives on."""
    wrapped = model()
    hold(wrapped)
    pydist.barrier()
    if pydist.rank() == 1:
        del wrapped
        gc.collect()
        pydist.barrier()
        return "dropped"
    with pytest.raises(pydist.Error, match="rank 1 went backward and did not wait"):
        wrapped.conclude_average()
    pydist.barrier()
    return "told"


def test_a_model_that_is_dropped_gives_it_up(four: Ranks) -> None:
    assert four.run(is_dropped) == ["told", "dropped", "told", "told"]


def leaves_its_memory() -> list[bool]:
    """Whether parameters and the reducer live, on the rank that drops the model.

    The others come later, so buckets are under way as it does.
    """
    wrapped = model()
    if pydist.rank() != 1:
        time.sleep(0.2)
        hold(wrapped)
        with pytest.raises(pydist.Error, match="rank 1 went backward and did not wait"):
            wrapped.conclude_average()
        pydist.barrier()
        return []
    hold(wrapped)
    dropped = [weakref.ref(each) for each in (*wrapped.parameters(), wrapped._reducer)]
    del wrapped
    gc.collect()
    lives = [each() is not None for each in dropped]
    pydist.barrier()
    return lives


def test_a_model_that_is_dropped_leaves_no_memory_behind(four: Ranks) -> None:
    assert four.run(leaves_its_memory)[1] == [False, False, False]


class OneOf(nn.Module):
    """Uses the last of several layers alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers[-1](x)
        return y


BUCKET_S = 0.05


def slow_hook(state: object, bucket: Any) -> torch.futures.Future[Tensor]:
    """What a bucket's departure costs the training thread."""
    time.sleep(BUCKET_S)
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def departures_after_the_last_gradient() -> list[tuple[int, float]]:
    found = []
    for holds in (False, True):
        pydist.init()
        wrapped = pydist.DataParallel(OneOf(), bucket_cap_mb=1e-4)
        wrapped.register_comm_hook(None, slow_hook)
        wrapped.reset_stats()
        loss = wrapped(torch.ones(2, 8)).sum()
        if holds:
            with wrapped.holding_average():
                loss.backward()
            wrapped.conclude_average()
        else:
            loss.backward()
        found.append((len(wrapped.plan.buckets), wrapped.stats().exposed_s))
    return found


def test_departures_at_the_end_of_a_held_backward_count_as_exposed(four: Ranks) -> None:
    for buckets, exposed_s in four.run(departures_after_the_last_gradient)[0]:
        assert buckets > 0
        assert exposed_s >= buckets * BUCKET_S
