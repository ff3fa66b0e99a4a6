"""Communication hooks, torch's own beside torch's own wrapper."""

import copy
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from launch import Ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    ddp_zero_hook,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from training import LIMIT_S, TIME_LIMIT, Runner, assert_near, batch, joined

import pydist

pytestmark = TIME_LIMIT


def halve(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The mean, in other memory and in another dtype."""
    mean = bucket.buffer().double()
    work = dist.all_reduce(mean, async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0] / dist.get_world_size())


HOOKS: dict[str, Callable[[], tuple[Any, Callable[..., Any]]]] = {
    "allreduce": lambda: (None, default_hooks.allreduce_hook),
    "fp16": lambda: (None, default_hooks.fp16_compress_hook),
    "bf16": lambda: (None, default_hooks.bf16_compress_hook),
    "wrapped": lambda: (None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    "powersgd": lambda: (
        powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.5
        ),
        powerSGD_hook.powerSGD_hook,
    ),
    "local": lambda: (
        post_localSGD_hook.PostLocalSGDState(
            process_group=None, subgroup=dist.group.WORLD, start_localSGD_iter=2
        ),
        post_localSGD_hook.post_localSGD_hook,
    ),
    "quantized": lambda: (None, quantization_hooks.quantization_pertensor_hook),
    "other memory": lambda: (None, halve),
}


def train_hooked(name: str) -> None:
    rank, _ = joined()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Tanh(), nn.Linear(128, 6))
    module = module.to(memory_format=torch.channels_last)
    nets = {
        "ours": pydist.DataParallel(copy.deepcopy(module), bucket_cap_mb=100),
        "torch's": DistributedDataParallel(copy.deepcopy(module)),
    }
    nets["ours"].register_comm_hook(*HOOKS[name]())
    # Torch's own wrapper refuses bfloat16 on the CPU.
    nets["torch's"].register_comm_hook(*HOOKS["allreduce" if name == "bf16" else name]())
    for step in range(5):
        for net in nets.values():
            net.zero_grad()
            # PowerSGD starts from random numbers.
            torch.manual_seed(step)
            np.random.seed(step)
            net(
                batch(rank, 4, 3 * 6 * 6, step=step).float().view(4, 3, 6, 6)
            ).square().mean().backward()
        tolerance = 2e-2 if name in ("quantized", "bf16") else 1e-5
        for ours, theirs in zip(nets["ours"].parameters(), module_of(nets), strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=tolerance, atol=tolerance)


def module_of(nets: dict[str, nn.Module]) -> list[nn.Parameter]:
    return list(nets["torch's"].parameters())


@pytest.mark.parametrize("name", list(HOOKS))
def test_communication_hooks(run: Runner, name: str) -> None:
    run(train_hooked, name)


def train_hooked_oddly(cap_mb: float) -> None:
    rank, size = joined()
    torch.manual_seed(0)
    seen: list[tuple[int, bool, int]] = []

    def hook(state: str, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        assert state == "state"
        shapes = [p.numel() * (2 if p.is_complex() else 1) for p in bucket.parameters()]
        if bucket.buffer().is_sparse:  # a bucket of its own, which has no parts
            assert bucket.gradients() == []
            assert [p.shape for p in bucket.parameters()] == [bucket.buffer().shape]
        else:
            assert [g.numel() for g in bucket.gradients()] == shapes
        seen.append((bucket.index(), bucket.is_last(), len(shapes)))
        return default_hooks.allreduce_hook(dist.group.WORLD, bucket)

    model = pydist.DataParallel(Odd(), bucket_cap_mb=cap_mb)
    reference = copy.deepcopy(model)
    model.register_comm_hook("state", hook)
    for step in range(3):
        model.zero_grad()
        reference.zero_grad()
        with model.no_sync():
            model(rank, step).backward()
        model(rank, step + 1).backward()
        for r in range(size):
            ((reference(r, step) + reference(r, step + 1)) / size).backward()
        for name, theirs in reference.named_parameters():
            ours = model.get_parameter(name)
            assert (ours.grad is None) == (theirs.grad is None), name
            if ours.grad is not None and theirs.grad is not None:
                assert_near(ours.grad.to_dense(), theirs.grad.to_dense())
        count = len(seen)
        assert [index for index, _, _ in seen] == list(range(count))
        assert all(last == (index == count - 1) for index, last, _ in seen)
        seen.clear()


class Odd(nn.Module):
    """Several dtypes, a sparse gradient, a parameter of some ranks and one of none."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3, sparse=True, dtype=torch.float64)
        self.complex = nn.Parameter(torch.randn(3, dtype=torch.complex128))
        self.transposed = nn.Parameter(torch.randn(3, 5, dtype=torch.float64).t())
        self.sometimes = nn.Parameter(torch.randn(5, dtype=torch.float64))
        self.never = nn.Parameter(torch.randn(2))

    def forward(self, rank: int, step: int) -> Tensor:
        x = self.table(torch.tensor([rank % 4, step % 4])).sum(0)
        y = self.transposed @ (x * self.complex.abs() + self.complex.real)
        if (rank + step) % 2 == 0:
            y = y * self.sometimes
        return y.square().sum()


@pytest.mark.parametrize("cap_mb", [1e-6, 1.0])
def test_communication_hooks_of_odd_models(run: Runner, cap_mb: float) -> None:
    run(train_hooked_oddly, cap_mb)


def look_for_gaps() -> None:
    joined()
    model = pydist.DataParallel(nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 3)))

    def look(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        everything = torch.cat([gradient.flatten() for gradient in bucket.gradients()])
        torch.testing.assert_close(bucket.buffer(), everything, rtol=0, atol=0)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer() + 1)
        return future

    model.register_comm_hook(None, look)
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(1, 3)).sum().backward()


def test_gradients_of_a_bucket_lie_without_gaps(run: Runner) -> None:
    run(look_for_gaps)


def return_no_future() -> None:
    joined()
    model = pydist.DataParallel(nn.Linear(3, 1))
    model.register_comm_hook(None, lambda state, bucket: bucket.buffer())
    with pytest.raises(RuntimeError, match="returned a Tensor; it must return a torch"):
        model(torch.ones(1, 3)).sum().backward()


def test_a_hook_that_returns_no_future(backend: str) -> None:
    with Ranks(2, {"PYDIST_BACKEND": backend}) as ranks:
        ranks.run(return_no_future, timeout=LIMIT_S)


def return_dense_for_sparse() -> str:
    joined()
    model = pydist.DataParallel(nn.Embedding(4, 3, sparse=True))

    def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer().to_dense())
        return future

    model.register_comm_hook(None, hook)
    message = r"a dense tensor of shape \[4, 3\] for the gradient of weight, which is sparse"
    with pytest.raises(pydist.Error, match=message) as raised:
        model(torch.tensor([1])).sum().backward()
    return raised.type.__name__


def test_a_hook_that_returns_a_dense_tensor_for_a_sparse_one(backend: str) -> None:
    with Ranks(2, {"PYDIST_BACKEND": backend}) as ranks:
        errors = set(ranks.run(return_dense_for_sparse, timeout=LIMIT_S))
    # Its values come after the closing: a rank may hear of the other's error before it finds its
    # own.
    assert errors in ({"InvalidUsage"}, {"InvalidUsage", "Aborted"})


def raise_in_hook() -> None:
    rank, _ = joined()

    def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        if rank == 1:
            raise ValueError("a hook that fails")
        return default_hooks.allreduce_hook(dist.group.WORLD, bucket)

    model = pydist.DataParallel(nn.Linear(3, 1))
    model.register_comm_hook(None, hook)
    if rank == 1:
        with pytest.raises(ValueError, match="a hook that fails"):
            model(torch.ones(1, 3)).sum().backward()
    else:
        # Not waiting for what rank 1 has never started.
        with pytest.raises(pydist.Error, match=r"on rank 1, .* hooks of the ranks are out of step"):
            model(torch.ones(1, 3)).sum().backward()
    model.zero_grad()
    # Rank 1 and the others would meet in all-reduces of different steps.
    with pytest.raises(pydist.Error, match="out of step: start again"):
        model(torch.ones(1, 3)).sum().backward()


def test_a_hook_that_raises(backend: str) -> None:
    with Ranks(3, {"PYDIST_BACKEND": backend}) as ranks:
        ranks.run(raise_in_hook, timeout=LIMIT_S)


def register_wrongly() -> None:
    joined()
    model = pydist.DataParallel(nn.Linear(3, 1))
    for hook, message in (
        (3, "must be callable"),
        (lambda bucket: bucket, "two arguments"),
        (lambda state, bucket, more: bucket, "two arguments"),
    ):
        with pytest.raises(pydist.InvalidUsage, match=message):
            model.register_comm_hook(None, hook)  # type: ignore[arg-type]
    zero = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1
    )
    step = ddp_zero_hook.hook_with_zero_step(halve, model, zero)
    for hook in (
        step,
        ddp_zero_hook.hook_with_zero_step_interleaved(halve, model, zero),
        default_hooks.fp16_compress_wrapper(step),
    ):
        with pytest.raises(pydist.InvalidUsage, match=r"use pydist\.ShardedOptimizer"):
            model.register_comm_hook(None, hook)
    with pytest.raises(pydist.InvalidUsage, match=r"call optimizer\.step\(\) after it"):
        model._register_fused_optim(torch.optim.SGD, lr=0.1)
    model.register_comm_hook(None, halve)
    with pytest.raises(pydist.InvalidUsage, match="already"):
        model.register_comm_hook(None, halve)
    late = pydist.DataParallel(nn.Linear(3, 1))
    late(torch.ones(1, 3)).sum().backward()
    with pytest.raises(pydist.InvalidUsage, match="before the first backward"):
        late.register_comm_hook(None, halve)


def test_hooks_that_cannot_be_registered(run: Runner) -> None:
    run(register_wrongly)


def fail_in_the_future() -> list[str]:
    rank, size = joined()
    step = 0

    def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        assert work is not None

        def then(done: torch.futures.Future[list[Tensor]]) -> Tensor:
            if (rank, step) == (1, 1):
                raise ValueError("after the all-reduce")
            return done.value()[0] / size

        return work.get_future().then(then)

    model = pydist.DataParallel(nn.Linear(2, 1, bias=False, dtype=torch.float64))
    model.register_comm_hook(None, hook)
    errors = []
    for step in range(4):
        model.zero_grad()
        try:
            model(torch.full((1, 2), 100.0 * step + rank, dtype=torch.float64)).sum().backward()
        except RuntimeError as error:
            errors.append(f"{type(error).__name__}: {error}")
        else:
            assert not errors, "trained on alone"
            assert model.weight.grad.tolist() == [[100.0 * step + (size - 1) / 2] * 2]
    return errors


def test_a_future_of_a_hook_that_fails_ends_training_on_all_ranks(backend: str) -> None:
    with Ranks(3, {"PYDIST_BACKEND": backend}) as ranks:
        first, culprit, third = ranks.run(fail_in_the_future, timeout=LIMIT_S)
    assert len(culprit) == 3
    assert "ValueError: after the all-reduce" in culprit[0]
    for errors in (first, third):
        # Who has the average of that step already hears of it in the next.
        assert len(errors) in (2, 3)
        if backend == "native":
            assert re.match("Aborted: rank 1 left .*: after the all-reduce", errors[0]), errors[0]
        else:
            # gloo has no word for its peers: it hangs up on them.
            assert re.match("Aborted|PeerLost", errors[0]), errors[0]
