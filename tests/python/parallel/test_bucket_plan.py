"""Which gradients travel together: the plan, how it follows what backward does, and one's own."""

import copy
import re
from collections.abc import Sequence
from typing import ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from training import TIME_LIMIT, Branches, Runner, assert_near, batch, joined

import pydist
from pydist.parallel.bucket_planner import (
    _HANDOVER_S,
    PlannedParameter,
    best_cap_bytes,
    plan_buckets,
)
from pydist.parallel.wrapper_parts import buckets

pytestmark = TIME_LIMIT

TINY_MB = 1e-6  # a bucket for each parameter


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 2), st.booleans()), max_size=30),
    st.integers(1, 120),
)
def test_plan_holds_every_parameter_once(
    facts: list[tuple[int, int, bool]], cap_bytes: int
) -> None:
    parameters = [
        PlannedParameter(index, f"p{index}", size, block, is_regular)
        for index, (size, block, is_regular) in enumerate(facts)
    ]
    plan = plan_buckets(parameters, cap_bytes)
    assert sorted(index for members in plan for index in members) == list(range(len(facts)))
    # A bucket is complete before those launched after it.
    assert [members[-1] for members in plan] == sorted(members[-1] for members in plan)
    for members in plan:
        assert len({facts[index][1:] for index in members}) == 1
        assert members == sorted(members)
        # All but the last member leave room.
        assert sum(facts[index][0] for index in members[:-1]) < cap_bytes


def exposed_s(cap: float, total: float, latency_s: float, seconds_per_byte: float) -> float:
    return cap * seconds_per_byte + total / cap * (latency_s + _HANDOVER_S)


@given(st.floats(1e5, 1e11), st.floats(1e-6, 1e-2), st.floats(1e-11, 1e-8))
def test_best_cap_leaves_little_exposed(
    total: float, latency_s: float, seconds_per_byte: float
) -> None:
    cap = best_cap_bytes(int(total), latency_s, seconds_per_byte)
    assert cap & (cap - 1) == 0
    choices = [2**n for n in range(18, 27)]
    costs = {c: exposed_s(c, total, latency_s, seconds_per_byte) for c in choices}
    # Rounded in the logarithm, which costs little: (sqrt(2) + 1 / sqrt(2)) / 2.
    assert costs[cap] <= 1.07 * min(costs.values())


def test_without_a_measurement_the_cap_is_the_default() -> None:
    assert best_cap_bytes(10**9, 0.0, 0.0) == 8 << 20


class Backwards(nn.Module):
    """Uses its layers in the order opposite to that of registration."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = layer(x).tanh()
        return x.square().mean()


def names(model: pydist.DataParallel) -> list[list[str]]:
    return [list(bucket.parameters) for bucket in model.plan.buckets]


def step(model: pydist.DataParallel, *args: object) -> None:
    model.zero_grad()
    model(
        batch(pydist.rank(), 2, args[0] if args else 3, dtype=torch.float32), *args[1:]
    ).backward()


def learn_the_order(set_to_none: bool) -> None:
    joined()
    model = pydist.DataParallel(Backwards(4), bucket_cap_mb=TINY_MB)
    registered = [f"layers.{i}.weight" for i in range(4)]
    assert names(model) == [[name] for name in reversed(registered)]
    step(model)
    model.zero_grad(set_to_none=set_to_none)
    step(model)
    assert names(model) == [[name] for name in registered]
    # Ranks agree on the gradients in their new places, and on those that moved there.
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    reference = gradients.clone()
    pydist.broadcast(reference, root=0)
    assert torch.equal(gradients, reference)
    # In order: none is ready before the one in front of it.
    model.reset_stats()
    step(model)
    ready_s = [bucket.ready_s for bucket in model.stats().buckets]
    assert ready_s == sorted(ready_s)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_plan_follows_the_order_of_backward(run_on_each: Runner, set_to_none: bool) -> None:
    run_on_each(learn_the_order, set_to_none)


def shard_what_is_measured(measured_bytes: int) -> list[list[str]]:
    joined()
    with mock.patch.object(buckets, "best_cap_bytes", return_value=measured_bytes):
        model = pydist.DataParallel(
            nn.Sequential(*(nn.Linear(300, 300, bias=False) for _ in range(8)))
        )
        assert (len(model.plan.buckets) == 8) == (measured_bytes == 1)
        pydist.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
        return names(model)


def test_shards_are_cut_alike_whatever_was_measured(run: Runner) -> None:
    """Sums and norms depend on it, and training goes on to the bit in another job."""
    plans = [plan for cap_bytes in (1, 64 << 20) for plan in run(shard_what_is_measured, cap_bytes)]
    assert all(plan == plans[0] for plan in plans)
    assert 1 < len(plans[0]) < 8


def keep_gradients_across_plans() -> None:
    rank, size = joined()
    torch.manual_seed(0)
    model = pydist.DataParallel(Backwards(3), bucket_cap_mb=TINY_MB)
    torch.manual_seed(0)
    reference = Backwards(3)
    # Gradients are added up while the plan changes under them.
    for number in range(3):
        model(batch(rank, 2, 3, step=number, dtype=torch.float32)).backward()
        for r in range(size):
            (reference(batch(r, 2, 3, step=number, dtype=torch.float32)) / size).backward()
    assert names(model)[0] == ["layers.0.weight"]
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_gradients_move_with_the_plan(run: Runner) -> None:
    run(keep_gradients_across_plans)


def use_some_rarely() -> list[list[str]]:
    rank, size = joined()
    model = pydist.DataParallel(Branches(size), bucket_cap_mb=8)
    for number in range(3):
        model.zero_grad()
        model(batch(rank, 2, 4), rank if number else 0).backward()
    step_names = names(model)
    assert all(name.startswith(("branches.", "never.")) for name in step_names[-1])
    assert any("trunk.weight" in bucket for bucket in step_names[:-1])
    return step_names


def test_what_some_rank_does_without_goes_last(run: Runner) -> None:
    plans = run(use_some_rarely)
    assert all(plan == plans[0] for plan in plans)


class Own(pydist.DataParallel):
    """One bucket, whatever its size; and remembers what it was asked."""

    asked: ClassVar[list[Sequence[PlannedParameter]]] = []

    def plan_buckets(
        self, parameters: Sequence[PlannedParameter], bucket_cap_bytes: int
    ) -> list[list[int]]:
        self.asked.append(parameters)
        return [[parameter.index for parameter in parameters]]


def plan_oneself() -> int:
    joined()
    Own.asked = []
    model = Own(Backwards(4), bucket_cap_mb=TINY_MB)
    assert [len(bucket) for bucket in names(model)] == [4]
    if pydist.rank() == 0:
        first = Own.asked[0]
        assert [p.name for p in first] == [f"layers.{i}.weight" for i in (3, 2, 1, 0)]
        assert [p.size_bytes for p in first] == [36] * 4
        assert all(p.is_regular for p in first)
    step(model)
    return len(Own.asked)


def test_a_subclass_plans(run: Runner) -> None:
    asked = run(plan_oneself)
    assert asked[0] >= 1
    assert not any(asked[1:]), "rank 0 alone plans"


class Broken(pydist.DataParallel):
    def plan_buckets(
        self, parameters: Sequence[PlannedParameter], bucket_cap_bytes: int
    ) -> list[list[int]]:
        if len(parameters) == 1:
            raise ZeroDivisionError("no plan")
        return [[parameters[0].index, parameters[0].index]]


def plan_wrongly() -> None:
    rank, _ = joined()
    with pytest.raises(pydist.Error, match="twice" if rank == 0 else "raised on rank 0"):
        Broken(Backwards(2))
    error = ZeroDivisionError if rank == 0 else pydist.Error
    with pytest.raises(error, match="no plan" if rank == 0 else "raised on rank 0"):
        Broken(Backwards(1))
    step(pydist.DataParallel(Backwards(2)))


def test_a_plan_that_does_not_fit_is_refused_on_all_ranks(run: Runner) -> None:
    run(plan_wrongly)


class Mine(pydist.DataParallel):
    """The example of docs/training.md."""

    def plan_buckets(
        self, parameters: Sequence[PlannedParameter], bucket_cap_bytes: int
    ) -> list[list[int]]:
        layers: dict[tuple[str, int, bool], list[int]] = {}
        for parameter in parameters:
            key = (parameter.name.rpartition(".")[0], parameter.block, parameter.is_regular)
            layers.setdefault(key, []).append(parameter.index)
        return list(layers.values())

    def average_bucket(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        gradients = bucket.buffer()
        gradients.div_(gradients.norm().clamp(min=1.0))
        work = dist.all_reduce(gradients, op=dist.ReduceOp.AVG, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])


def average_oneself() -> None:
    rank, size = joined()
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    model = Mine(copy.deepcopy(reference))
    assert names(model) == [["2.bias", "2.weight"], ["0.bias", "0.weight"]]
    for number in range(3):
        model.zero_grad()
        model(10 * batch(rank, 5, 4, step=number)).square().mean().backward()
        total = [torch.zeros_like(p) for p in reference.parameters()]
        for r in range(size):
            loss = reference(10 * batch(r, 5, 4, step=number)).square().mean()
            gradients = torch.autograd.grad(loss, list(reference.parameters()))
            for first in (0, 2):
                layer = gradients[first : first + 2]
                norm = torch.cat([g.flatten() for g in layer]).norm().clamp(min=1.0)
                for sum_, gradient in zip(total[first : first + 2], layer, strict=True):
                    sum_ += gradient / norm / size
        for parameter, theirs in zip(model.parameters(), total, strict=True):
            assert_near(parameter.grad, theirs)
    with pytest.raises(pydist.InvalidUsage, match="registered already"):
        model.register_comm_hook(None, lambda state, bucket: bucket)


def test_a_subclass_averages(run: Runner) -> None:
    run(average_oneself)


def print_the_plan() -> str:
    joined()
    model = pydist.DataParallel(Backwards(3), bucket_cap_mb=60 / 2**20)
    before = str(model.plan)
    assert "not seen yet" in before
    step(model)
    return str(model.plan)


def test_the_plan_prints_as_a_table(run: Runner) -> None:
    table = run(print_the_plan)[0]
    assert re.search(r"bucket .* bytes .* parameters .* ready after", table)
    assert "layers.2.weight ... layers.1.weight (2)" in table
    assert len(re.findall(r"\d\.\d\d ms", table)) == 2


class Unsteady(pydist.DataParallel):
    """Raises when it is asked for the second time."""

    asked = 0

    def plan_buckets(
        self, parameters: Sequence[PlannedParameter], bucket_cap_bytes: int
    ) -> list[list[int]]:
        type(self).asked += 1
        if type(self).asked == 2:
            raise KeyError("no second plan")
        return [[index] for index in sorted(parameter.index for parameter in parameters)]


def fail_to_plan_anew() -> None:
    rank, size = joined()
    Unsteady.asked = 0
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)).double()
    model = Unsteady(copy.deepcopy(reference))
    before = names(model)
    for number in range(3):
        model.zero_grad()
        reference.zero_grad()
        loss = model(batch(rank, 3, 2, step=number)).square().mean()
        if number == 0:
            error = KeyError if rank == 0 else pydist.Error
            message = "no second plan" if rank == 0 else "planning .* raised on rank 0"
            with pytest.raises(error, match=message):
                loss.backward()
            assert names(model) == before
            continue
        loss.backward()
        for r in range(size):
            (reference(batch(r, 3, 2, step=number)).square().mean() / size).backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert_near(ours.grad, theirs.grad)


def test_a_new_plan_that_raises_leaves_the_old_one(run: Runner) -> None:
    run(fail_to_plan_anew)


def hold_gradients() -> None:
    rank, _ = joined()
    model = pydist.DataParallel(Backwards(3), bucket_cap_mb=TINY_MB)
    before = names(model)
    x = batch(rank, 2, 3, dtype=torch.float32)
    model(x).backward()
    held = [parameter.grad for parameter in model.parameters()]
    for _ in range(3):
        model.zero_grad(set_to_none=False)
        assert not any(gradient.any() for gradient in held)
        model(x).backward()
        for gradient, parameter in zip(held, model.parameters(), strict=True):
            assert gradient is parameter.grad
            assert gradient.any()
    assert names(model) == before[::-1]


def test_a_gradient_that_the_user_holds_stays_the_parameters(run: Runner) -> None:
    run(hold_gradients)
