"""What goes together on a bucket's way: weights, sums, joining, a wire type, hooks."""

import contextlib
import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import Ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from training import LIMIT_S, TIME_LIMIT, Runner, assert_near, batch, joined

import pydist

pytestmark = TIME_LIMIT


def summing(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])


class Averaging(pydist.DataParallel):
    """Returns the mean or the sum, in other memory."""

    def average_bucket(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        copied = bucket.buffer().clone()
        work = dist.all_reduce(copied, async_op=True)
        assert work is not None
        divisor = 1 if self.sums else dist.get_world_size()
        return work.get_future().then(lambda done: done.value()[0] / divisor)

    sums = False


class Summing(Averaging):
    sums = True


def wrap(how: str, module: nn.Module, reduction: Any) -> pydist.DataParallel:
    """A model whose buckets go their way by a hook or a method."""
    if how == "method":
        kind = Summing if reduction == "sum" else Averaging
        return kind(module, reduction=reduction, bucket_cap_mb=1e-6)
    model = pydist.DataParallel(module, reduction=reduction, bucket_cap_mb=1e-6)
    hook = summing if reduction == "sum" else default_hooks.allreduce_hook
    model.register_comm_hook(dist.group.WORLD if reduction == "mean" else None, hook)
    return model


class Net(nn.Module):
    """Has a sparse gradient, a complex parameter, and one that not every rank uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(7, 4, sparse=True, dtype=torch.float64)
        self.layer = nn.Linear(4, 3, dtype=torch.float64)
        self.turn = nn.Parameter(torch.randn(3, dtype=torch.complex128))
        self.sometimes = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        hit = self.table(x[:, 0].abs().mul(3).long().clamp(max=6))
        y = (self.layer(x + hit).tanh() * self.turn).abs().square()
        if len(x) % 2:
            y = y * self.sometimes
        return y.sum(-1)


def compare(model: nn.Module, reference: nn.Module) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert ours.grad is not None, name
        assert theirs.grad is not None, name
        assert_near(ours.grad.to_dense(), theirs.grad.to_dense())


def weigh_hooked(how: str, reduction: str, keeps: bool) -> None:
    """Two backwards a step; `keeps`: on top of what the steps before have left."""
    rank, size = joined()
    model, reference = wrap(how, Net(), reduction), Net()

    def rows(r: int, step: int, micro: int) -> int:
        return (2 * r + 3 * micro + step) % 5 + 1

    for step in range(4):
        if not keeps:
            model.zero_grad()
            reference.zero_grad()
        for micro in range(2):
            x = batch(rank, rows(rank, step, micro), 4, step=10 * step + micro)
            with model.no_sync(enabled=micro == 0), model.weighted(len(x)):
                model(x).mean().backward()
        everything = [
            batch(r, rows(r, step, micro), 4, step=10 * step + micro)
            for r in range(size)
            for micro in range(2)
        ]
        weights = sum(map(len, everything)) if reduction == "mean" else 1
        for x in everything:
            (reference(x).mean() * (len(x) / weights)).backward()
        compare(model, reference)


@pytest.mark.parametrize("keeps", [False, True], ids=["zeroed", "kept"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("how", ["hook", "method"])
def test_weights_before_hooks(run: Runner, how: str, reduction: str, keeps: bool) -> None:
    run(weigh_hooked, how, reduction, keeps)


def weigh_some_with_zero() -> None:
    rank, size = joined()
    model = wrap("hook", nn.Linear(2, 1, bias=False, dtype=torch.float64), "mean")
    for _ in range(2):
        model.zero_grad()
        with model.weighted(rank):
            nothing = float("nan") if rank == 0 else 1.0
            (model(torch.full((1, 2), rank + 1.0, dtype=torch.float64)) * nothing).sum().backward()
        mean = sum(r * (r + 1) for r in range(size)) / sum(range(size))
        assert_near(model.weight.grad, torch.full((1, 2), mean, dtype=torch.float64))
        model.zero_grad()
        with model.weighted(0):
            model(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
        assert not model.weight.grad.any()


def test_weights_of_zero_before_hooks(run: Runner) -> None:
    run(weigh_some_with_zero)


def add_up_hooked(how: str) -> None:
    """What was summed already counts once, and what no hook sees is summed as well."""
    rank, size = joined()
    model, reference = wrap(how, Net(), "sum"), Net()
    for step in range(3):
        model(batch(rank, 3, 4, step=step)).sum().backward()
        for r in range(size):
            reference(batch(r, 3, 4, step=step)).sum().backward()
        compare(model, reference)


@pytest.mark.parametrize("how", ["hook", "method"])
def test_sums_by_hooks(run: Runner, how: str) -> None:
    run(add_up_hooked, how)


def run_out_of_batches(by_world_size: bool, reduction: str) -> None:
    rank, size = joined()
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    for parameter in net.parameters():
        dist.broadcast(parameter.detach(), 0)
    reference = copy.deepcopy(net)
    model = wrap("hook", net, reduction)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
    is_told = contextlib.nullcontext()
    if reduction == "mean" and not by_world_size:
        is_told = pytest.warns(UserWarning, match="over the ranks that have a batch")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(UserWarning), model.join(divide_by_initial_world_size=False):
                pass
    with is_told, model.join(divide_by_initial_world_size=by_world_size):
        for step in range(1 + rank):
            optimizer.zero_grad()
            model(batch(rank, 5, 3, step=step)).square().mean().backward()
            optimizer.step()
    for step in range(size):
        theirs.zero_grad()
        present = [r for r in range(size) if step < 1 + r]
        divisor = 1 if reduction == "sum" else size if by_world_size else len(present)
        for r in present:
            (reference(batch(r, 5, 3, step=step)).square().mean() / divisor).backward()
        theirs.step()
    for ours, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert_near(ours.detach(), expected.detach())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("by_world_size", [True, False])
def test_joining_before_hooks(run: Runner, by_world_size: bool, reduction: str) -> None:
    run(run_out_of_batches, by_world_size, reduction)


def weigh_compressed(compress: Any, reduction: Any) -> None:
    rank, size = joined()
    linear = nn.Linear(40, 1, bias=False)
    model = pydist.DataParallel(linear, compress=compress, reduction=reduction)
    inputs = [batch(r, 1, 40, dtype=torch.float32) for r in range(size)]
    weights = [3.0, 0.5, 7.0, 2.0][:size]
    shares = [w / (sum(weights) if reduction == "mean" else 1) for w in weights]
    for _ in range(2):
        model.zero_grad()
        with model.weighted(weights[rank]):
            model(inputs[rank]).sum().backward()
        exact = sum(s * x.double() for s, x in zip(shares, inputs, strict=True))
        most = sum(s * x.abs().double() for s, x in zip(shares, inputs, strict=True))
        gradient = model.weight.grad
        # Each rank's is rounded once, and so is the result.
        bound = most * (2**-7 if compress == "bf16" else 2**-10) + 1e-6
        assert ((gradient.double() - exact).abs() <= bound).all()
        wire = torch.bfloat16 if compress == "bf16" else torch.float16
        assert torch.equal(gradient, gradient.to(wire).float())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("compress", ["bf16", "fp16"])
def test_weights_in_16_bits(run_over_hosts: Runner, compress: str, reduction: str) -> None:
    run_over_hosts(weigh_compressed, compress, reduction)


def shard_compressed() -> None:
    """Shards that travel in 16 bits, weighted."""
    rank, size = joined()
    model = pydist.DataParallel(nn.Linear(40, 1, bias=False), compress="bf16")
    optimizer = pydist.ShardedOptimizer(model, torch.optim.SGD, lr=1.0)
    before = model.weight.detach().clone()
    inputs = [batch(r, 1, 40, dtype=torch.float32) for r in range(size)]
    with model.weighted(rank + 1):
        model(inputs[rank]).sum().backward()
    optimizer.step()
    total = size * (size + 1) / 2
    mean = sum((r + 1) / total * x for r, x in enumerate(inputs))
    torch.testing.assert_close(before - model.weight.detach(), mean, rtol=2e-2, atol=2e-2)


def test_shards_in_16_bits(run_over_hosts: Runner) -> None:
    run_over_hosts(shard_compressed)


NO_SAY = r"a communication hook \(or average_bucket\) gets whole gradients.* so that {} has no say"


def exclude() -> None:
    joined()
    compressed = pydist.DataParallel(nn.Linear(2, 1), compress="bf16")
    with pytest.raises(pydist.InvalidUsage, match=NO_SAY.format("compress=")):
        compressed.register_comm_hook(None, summing)
    with pytest.raises(pydist.InvalidUsage, match=NO_SAY.format("compress=")):
        Averaging(nn.Linear(2, 1), compress="bf16")
    no_shards = NO_SAY.format("pydist.ShardedOptimizer")
    for how in ("hook", "method"):
        hooked = wrap(how, nn.Linear(2, 1), "mean")
        with pytest.raises(pydist.InvalidUsage, match=no_shards):
            pydist.ShardedOptimizer(hooked, torch.optim.SGD, lr=0.1)
        hooked(torch.ones(1, 2)).sum().backward()  # goes on
        with hooked.join():
            pass
    sharded = pydist.DataParallel(nn.Linear(2, 1))
    optimizer = pydist.ShardedOptimizer(sharded, torch.optim.SGD, lr=0.1)
    with pytest.raises(pydist.InvalidUsage, match=no_shards):
        sharded.register_comm_hook(None, summing)
    sharded(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def test_what_a_hook_excludes(run: Runner) -> None:
    run(exclude)


def weigh_and_raise() -> None:
    rank, _ = joined()

    def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        if rank == 1:
            raise ValueError("a hook that fails")
        return summing(None, bucket)

    model = pydist.DataParallel(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)), bucket_cap_mb=1e-6)
    model.register_comm_hook(None, hook)
    error, match = (ValueError, "fails") if rank == 1 else (pydist.Error, "out of step")
    with pytest.raises(error, match=match), model.weighted(rank + 1):
        model(torch.ones(1, 3)).sum().backward()
    model.zero_grad()
    with pytest.raises(pydist.Error, match="out of step: start again"), model.weighted(1):
        model(torch.ones(1, 3)).sum().backward()


def test_a_hook_that_raises_between_weights(backend: str) -> None:
    with Ranks(2, {"PYDIST_BACKEND": backend}) as ranks:
        ranks.run(weigh_and_raise, timeout=LIMIT_S)
