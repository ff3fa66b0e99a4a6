"""Gradients return to the arena as soon as nobody holds them, and cost nothing there."""

import itertools
from typing import Any

import torch
from beside_torch import STEPS, Moody, gradients, order_of, places
from torch import Tensor, nn
from training import TIME_LIMIT, Runner, Tied, batch, joined

import pydist

pytestmark = TIME_LIMIT


def come_home() -> None:
    rank, _ = joined()
    model = pydist.DataParallel(Tied(torch.float64))
    step = 0

    def backward() -> list[Tensor]:
        nonlocal step
        step += 1
        model.zero_grad()
        model(batch(rank, 6, 8, step=step)).mean().backward()
        return [g for g in gradients(model) if g is not None]

    for _ in range(4):  # until the plan stays
        backward()
    home = places(model)
    plan = [bucket.parameters for bucket in model.plan.buckets]
    assert model.stats().copied_bytes == 0
    held = backward()
    assert places(model) == home
    copies = [kept.clone() for kept in held]
    new = backward()
    assert not set(places(model)) & set(home)
    assert all(torch.equal(*pair) for pair in zip(held, copies, strict=True))
    assert model.stats().copied_bytes > 0
    # What is held no more is home again with the next gradient, also where that one is held.
    del held
    assert backward()[0].data_ptr() == home[0]
    assert places(model) == home
    del new
    model.reset_stats()
    backward()
    assert places(model) == home
    assert model.stats().copied_bytes == 0
    # A gradient that the program has put moves in once nobody else has it.
    buffer = torch.zeros_like(model.module.inside.weight)
    model.zero_grad()
    model.module.inside.weight.grad = buffer
    model(batch(rank, 6, 8)).mean().backward()
    assert model.module.inside.weight.grad.data_ptr() == buffer.data_ptr()
    del buffer
    model.zero_grad(set_to_none=False)
    model(batch(rank, 6, 8)).mean().backward()
    assert sorted(places(model)) == sorted(home)
    assert [bucket.parameters for bucket in model.plan.buckets] == plan


def test_gradients_come_home(run_on_some: Runner) -> None:
    run_on_some(come_home)


def come_home_across_plans() -> None:
    """What was held when the plan changed lies in other gradients' homes."""
    rank, _ = joined()
    for cap_mb in (1e-6, 1.0):
        model = pydist.DataParallel(Moody(), bucket_cap_mb=cap_mb)
        held: list[tuple[Tensor, Any, Tensor]] = []
        plans: list[Any] = []
        for step in range(2 * STEPS):
            model.zero_grad(set_to_none=step % 3 == 0)
            model(batch(rank, 5, 4, step=step), order_of(step)).backward()
            held += [(g, g.numpy(), g.clone()) for g in gradients(model) if g is not None]
            for kept, array, value in held:
                if kept.data_ptr() not in places(model):
                    assert torch.equal(kept, value)
                assert torch.equal(kept, torch.as_tensor(array))
            held = [entry for entry in held if entry[0].data_ptr() not in places(model)]
            held = held[-30:]
            plans.append([bucket.parameters for bucket in model.plan.buckets])
        if cap_mb < 1:
            assert any(a != b for a, b in itertools.pairwise(plans)), "no plan changed"
        held.clear()
        del kept, array, value
        for step in range(3):
            model.zero_grad(set_to_none=False)
            model(batch(rank, 5, 4, step=step), order_of(8)).backward()
        model.reset_stats()
        before = places(model)
        for _ in range(2):
            model.zero_grad()
            model(batch(rank, 5, 4), order_of(8)).backward()
            assert places(model) == before
        assert model.stats().copied_bytes == 0


def test_gradients_come_home_across_plans(run_on_some: Runner) -> None:
    run_on_some(come_home_across_plans)


def take_no_memory() -> None:
    """Where nobody holds anything: no more is allocated than for views."""
    rank, _ = joined()
    counts = []
    for is_view in (True, False):
        torch.manual_seed(1)
        model = pydist.DataParallel(
            Tied(torch.float64), gradient_as_bucket_view=is_view, bucket_cap_mb=1e-6
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(6):
            model(batch(rank, 6, 8, step=step)).mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profile:
            for step in range(6):
                model(batch(rank, 6, 8, step=step)).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        events = profile.events() or []
        counts.append(sum(event.name == "[memory]" for event in events))
        assert model.stats().copied_bytes == 0
    allocated_for_views, allocated = counts
    assert 0 < allocated <= allocated_for_views


def test_no_more_is_allocated_than_for_views(run_on_some: Runner) -> None:
    run_on_some(take_no_memory)


def write_into_views() -> None:
    """What `gradient_as_bucket_view=True` means, in torch's documentation as well."""
    rank, size = joined()
    model = pydist.DataParallel(
        nn.Linear(4, 2, bias=False, dtype=torch.float64), gradient_as_bucket_view=True
    )
    model(batch(rank, 5, 4)).sum().backward()
    first = model.weight.grad
    model.zero_grad()
    model(batch(rank, 5, 4, step=1)).sum().backward()
    expected = torch.stack([batch(r, 5, 4, step=1).sum(0) for r in range(size)]).mean(0)
    for found in (first, model.weight.grad):
        torch.testing.assert_close(found, expected.expand(2, 4))
    assert first.data_ptr() == model.weight.grad.data_ptr()
    assert model.stats().copied_bytes == 0


def test_gradients_may_be_views(run_on_some: Runner) -> None:
    run_on_some(write_into_views)
