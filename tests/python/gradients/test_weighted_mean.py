"""Sums and weighted means: batches of different sizes, token masks, accumulation, 16 bits."""

import contextlib
import copy
import math
from collections.abc import Sequence

import pytest
import torch
from launch import Ranks
from torch import Tensor, nn
from training import LIMIT_S, TIME_LIMIT, Parts, Runner, assert_near, batch, joined

import pydist
from pydist.parallel.bucket_planner import PlannedParameter

pytestmark = TIME_LIMIT


class Net(nn.Module):
    """Has a sparse gradient and a complex parameter beside ordinary ones."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4, sparse=True, dtype=dtype)
        self.layer = nn.Linear(4, 3, dtype=dtype)
        self.turn = nn.Parameter(torch.randn(3, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        hit = self.table(x[:, 0].abs().mul(3).long().clamp(max=6))
        return (self.layer(x + hit).tanh() * self.turn).abs().square().sum(-1)


def rows(rank: int, micro: int) -> int:
    return (2 * rank + 3 * micro) % 5 + 1


def make(reduction: str = "mean") -> tuple[pydist.DataParallel, Net]:
    torch.manual_seed(0)
    module = Net()
    torch.manual_seed(0)
    return pydist.DataParallel(module, reduction=reduction, bucket_cap_mb=1e-6), Net()


def compare(model: nn.Module, reference: nn.Module) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert ours.grad is not None, name
        assert theirs.grad is not None, name
        assert_near(ours.grad.to_dense(), theirs.grad.to_dense())


def weigh_batches(micro_batches: int) -> None:
    rank, size = joined()
    model, reference = make()
    for step in range(3):
        model.zero_grad(set_to_none=step != 1)
        for micro in range(micro_batches):
            x = batch(rank, rows(rank, micro), 4, step=10 * step + micro)
            with model.no_sync(enabled=micro + 1 < micro_batches), model.weighted(len(x)):
                model(x).mean().backward()
        everything = [
            batch(r, rows(r, micro), 4, step=10 * step + micro)
            for r in range(size)
            for micro in range(micro_batches)
        ]
        reference.zero_grad()
        reference(torch.cat(everything)).mean().backward()
        compare(model, reference)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_mean_over_all_samples(ranks: Ranks, micro_batches: int) -> None:
    ranks.run(weigh_batches, micro_batches, timeout=LIMIT_S)


def weigh_with_zero() -> None:
    rank, size = joined()
    model, reference = make()
    # Rank 0's batch holds nothing that counts: the mean over it is NaN.
    mask = torch.arange(4) < rank
    for first in (True, False):
        with model.no_sync(enabled=first), model.weighted(mask.sum()):
            losses = model(batch(rank, 4, 4))
            (losses[mask].mean() if rank or first else losses.mean() * math.nan).backward()
    taken = [batch(r, 4, 4)[:r] for r in range(size)]
    reference(torch.cat(taken)).mean().backward()
    compare(model, reference)
    # No rank has anything.
    model.zero_grad()
    with model.weighted(0):
        (model(batch(rank, 4, 4)).sum() * math.nan).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.to_dense().any()


def test_a_batch_that_counts_for_nothing(run: Runner) -> None:
    run(weigh_with_zero)


def add_to_averages(kind: str) -> None:
    rank, size = joined()
    model, reference = make("sum" if kind == "sum" else "mean")
    for step in range(3):
        # Without zero_grad() in between: what was averaged or summed already counts once.
        x = batch(rank, rows(rank, step), 4, step=step)
        if kind == "weights":
            with model.weighted(len(x)):
                model(x).mean().backward()
        elif kind == "sum":
            model(x).sum().backward()
        else:
            model(x).mean().backward()
        xs = [batch(r, rows(r, step), 4, step=step) for r in range(size)]
        if kind == "weights":
            reference(torch.cat(xs)).mean().backward()
        elif kind == "sum":
            reference(torch.cat(xs)).sum().backward()
        else:
            torch.stack([reference(x).mean() for x in xs]).mean().backward()
        compare(model, reference)


@pytest.mark.parametrize("kind", ["mean", "sum", "weights"])
def test_what_was_averaged_counts_once(run: Runner, kind: str) -> None:
    run(add_to_averages, kind)


def add_up_what_some_use(micro_batches: int) -> None:
    rank, size = joined()
    torch.manual_seed(0)
    module = Parts({str(n): nn.Linear(2, 1, dtype=torch.float64) for n in range(size + 1)})
    model = pydist.DataParallel(module, reduction="sum", bucket_cap_mb=1e-6)
    x = torch.ones(1, 2, dtype=torch.float64)
    for step in range(1, 4):
        for micro in range(micro_batches):
            with model.no_sync(enabled=micro + 1 < micro_batches):
                model("0" if micro else str(rank), x).sum().backward()
        for number in range(size):
            expected = float(step * (1 + (size * (micro_batches - 1) if number == 0 else 0)))
            gradient = module[str(number)].weight.grad
            assert gradient is not None
            assert gradient.tolist() == [[expected] * 2], (step, number)
        assert module[str(size)].weight.grad is None


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_sums_of_what_not_every_rank_uses(run: Runner, micro_batches: int) -> None:
    run(add_up_what_some_use, micro_batches)


def change_between(in_place: bool) -> None:
    joined()
    model = pydist.DataParallel(nn.Linear(2, 1), reduction="sum")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    size = pydist.world_size()
    x = torch.ones(1, 2)
    model(x).sum().backward()
    with model.no_sync():
        model(x).sum().backward()
    model.zero_grad(set_to_none=False)
    model(x).sum().backward()
    # Neither the sum of the first step nor what came before zero_grad() is left.
    assert model.weight.grad.tolist() == [[float(size)] * 2]
    with model.no_sync():
        model(x).sum().backward()
    if in_place:
        model.weight.grad.mul_(0.5)
    else:
        model.weight.grad = model.weight.grad * 0.5
        with pytest.raises(pydist.InvalidUsage, match="never averaged"):
            optimizer.step()
    with pytest.raises(pydist.InvalidUsage, match="weight was changed between backward passes"):
        model(x).sum().backward()
    model.zero_grad()
    model(x).sum().backward()
    assert model.weight.grad.tolist() == [[float(size)] * 2]
    # Averaged, and changed then: it is what the next is added to.
    if in_place:
        model.weight.grad.mul_(0.5)
        model(x).sum().backward()
        assert model.weight.grad.tolist() == [[size * 1.5] * 2]


@pytest.mark.parametrize("in_place", [True, False])
def test_gradients_that_were_changed_in_between(run: Runner, in_place: bool) -> None:
    run(change_between, in_place)


def throw_away_weights() -> None:
    rank, size = joined()
    for set_to_none in (True, False):
        model, reference = make()
        with model.no_sync(), model.weighted(1000.0 * (rank + 1)):
            model(batch(rank, 3, 4)).mean().backward()
        model.zero_grad(set_to_none=set_to_none)
        with model.weighted(rank + 1):
            model(batch(rank, rank + 1, 4)).mean().backward()
        reference(torch.cat([batch(r, r + 1, 4) for r in range(size)])).mean().backward()
        compare(model, reference)


def test_weights_go_with_the_gradients(run: Runner) -> None:
    run(throw_away_weights)


def weigh_in_bfloat16() -> None:
    rank, size = joined()
    model = pydist.DataParallel(nn.Linear(64, 1, bias=False, dtype=torch.bfloat16))
    weights = [3.0, 1000.0, 7.0, 0.1][:size]
    x = [batch(r, 1, 64, dtype=torch.bfloat16) for r in range(size)]
    with model.weighted(weights[rank]):
        model(x[rank]).sum().backward()
    exact = sum(w * g.double() for w, g in zip(weights, x, strict=True)) / sum(weights)
    assert isinstance(exact, Tensor)
    # Rounded once: the error is half a unit in the last place of bfloat16, but for float32's.
    error = (model.weight.grad.double() - exact).abs()
    assert (error <= exact.abs() * 2**-8 * 1.01 + 1e-6).all()


def test_weights_in_bfloat16_round_once(run: Runner) -> None:
    run(weigh_in_bfloat16)


def weigh_on_some_ranks() -> None:
    rank, size = joined()
    model = pydist.DataParallel(nn.Linear(2, 1))
    x = torch.ones(1, 2)
    loss = model(x).sum()
    with (
        pytest.raises(pydist.Error, match="gave this backward a weight and rank 0"),
        model.weighted(2.0) if rank else contextlib.nullcontext(),
    ):
        loss.backward()
    model.zero_grad()
    with model.no_sync():
        model(x).sum().backward()
    with pytest.raises(pydist.Error, match="some had a weight"), model.weighted(2.0):
        model(x).sum().backward()
    model.zero_grad()
    with model.weighted(rank + 1):
        model(x * (rank + 1)).sum().backward()
    mean = sum(r * r for r in range(1, size + 1)) / sum(range(1, size + 1))
    torch.testing.assert_close(model.weight.grad, torch.full((1, 2), mean))
    for wrong in (-1.0, math.inf, math.nan):
        with (
            pytest.raises(pydist.InvalidUsage, match="finite and not negative"),
            model.weighted(wrong),
        ):
            pass
    with pytest.raises(pydist.InvalidUsage, match="'mean' or 'sum'"):
        pydist.DataParallel(nn.Linear(2, 1), reduction="average")


def test_weights_that_make_no_mean(run: Runner) -> None:
    run(weigh_on_some_ranks)


def leave_autograd_grad_alone() -> None:
    rank, size = joined()
    model, reference = make()
    for r, net in [(rank, model), *((r, reference) for r in range(size))]:
        x = batch(r, r + 1, 4).requires_grad_()
        context = model.weighted(r + 1) if net is model else model.no_sync()
        with context:
            loss = net(x).mean()
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            weight = 1.0 if net is model else (r + 1) * 2 / (size * (size + 1))
            ((loss + slope.square().sum()) * weight).backward()
    compare(model, reference)


def test_a_penalty_on_gradients_has_no_weight_of_its_own(run: Runner) -> None:
    run(leave_autograd_grad_alone)


class BackAndForth(pydist.DataParallel):
    """Turns the plan around whenever it is asked."""

    asked = 0

    def plan_buckets(
        self, parameters: Sequence[PlannedParameter], bucket_cap_bytes: int
    ) -> list[list[int]]:
        type(self).asked += 1
        order = sorted(parameter.index for parameter in parameters)
        return [[index] for index in (order if type(self).asked % 2 else reversed(order))]


def throw_away_weights_under_a_new_plan(set_to_none: bool) -> None:
    rank, size = joined()
    BackAndForth.asked = 0
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Tanh()).double()
    model = BackAndForth(copy.deepcopy(reference))
    first_plan = model.plan.buckets[0].parameters
    model(batch(rank, 3, 2)).mean().backward()
    model.zero_grad(set_to_none=set_to_none)
    with model.no_sync(), model.weighted(1000 * (rank + 1)):
        model(batch(rank, 3, 2)).mean().backward()
    model.zero_grad(set_to_none=set_to_none)
    with model.weighted(rank + 1):
        model(batch(rank, rank + 1, 2, step=1)).mean().backward()
    reference(torch.cat([batch(r, r + 1, 2, step=1) for r in range(size)])).mean().backward()
    compare(model, reference)
    assert model.plan.buckets[0].parameters != first_plan


@pytest.mark.parametrize("set_to_none", [True, False])
def test_weights_go_with_the_gradients_that_have_moved(run: Runner, set_to_none: bool) -> None:
    run(throw_away_weights_under_a_new_plan, set_to_none)


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 1, sparse=True, dtype=torch.float64)
        self.layer = nn.Linear(1, 1, bias=False, dtype=torch.float64)

    def forward(self, row: int | None) -> Tensor:
        out: Tensor = self.layer(torch.ones(1, dtype=torch.float64)).sum()
        return out if row is None else out + self.table(torch.tensor([row])).sum()


def sum_rows(set_to_none: bool) -> None:
    rank, size = joined()
    model = pydist.DataParallel(Rows(), reduction="sum")
    model(0).backward()
    with model.no_sync():
        model(1).backward()
    model.zero_grad(set_to_none=set_to_none)
    model(2 if rank else None).backward()
    gradient = model.module.table.weight.grad.to_dense()
    assert gradient.flatten().tolist() == [0.0, 0.0, size - 1.0]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_sums_of_rows_begin_anew_after_zero_grad(run: Runner, set_to_none: bool) -> None:
    run(sum_rows, set_to_none)


class Bypass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor, uses_layer: bool) -> Tensor:
        return (self.layer(x) if uses_layer else x).sum()


def weigh_what_reaches_no_parameter() -> None:
    rank, size = joined()
    model = pydist.DataParallel(Bypass())
    x = torch.full((1, 2), rank + 1.0, dtype=torch.float64, requires_grad=True)
    with model.no_sync(), model.weighted(10):
        model(x, False).backward()
    with model.weighted(1):
        model(x, True).backward()
    mean = size * (size + 1) / 2 / (11 * size)
    assert_near(model.layer.weight.grad, torch.full((1, 2), mean, dtype=torch.float64))


def test_a_backward_without_gradients_has_its_weight(run: Runner) -> None:
    run(weigh_what_reaches_no_parameter)


def weigh_after_plain_backwards(what: str) -> None:
    rank, size = joined()
    model = pydist.DataParallel(nn.Linear(2, 1, bias=False, dtype=torch.float64))
    x = torch.full((1, 2), rank + 1.0, dtype=torch.float64)
    if what == "frozen":
        # For the gradient of its inputs alone.
        model.requires_grad_(False)
        model(x.clone().requires_grad_()).sum().backward()
        model.requires_grad_(True)
    else:
        with model.no_sync():
            model(x).sum().backward()
        model.zero_grad(set_to_none=what == "set to None")
    with model.weighted(rank + 1):
        model(x).sum().backward()
    mean = sum(r * r for r in range(1, size + 1)) / sum(range(1, size + 1))
    assert_near(model.weight.grad, torch.full((1, 2), mean, dtype=torch.float64))


@pytest.mark.parametrize("what", ["set to None", "set to zero", "frozen"])
def test_plain_backwards_that_left_nothing_may_precede_weights(run: Runner, what: str) -> None:
    run(weigh_after_plain_backwards, what)
