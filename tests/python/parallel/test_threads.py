"""Models that are trained in threads of one process: each as if it were alone."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.eval_frame  # without it there are no graphs to cut
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from training import TIME_LIMIT, Runner, batch, joined
from twins import Pausing

import pydist
from pydist.parallel.compiled_graphs import graphs_cut_at

pytestmark = TIME_LIMIT

STEPS = 6


def in_threads(*functions: Callable[[], None]) -> None:
    """Calls each in a thread of its own; raises what the first raises."""
    errors: list[BaseException] = []

    def call(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=call, args=(function,), daemon=True) for function in functions
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def model_of(number: int) -> nn.Module:
    torch.manual_seed(number)
    return (
        Pausing()
        if number == 0
        else nn.Sequential(
            nn.Linear(10, 20), nn.BatchNorm1d(20), nn.Tanh(), nn.Linear(20, 1)
        ).double()
    )


def make_optimizer(kind: str, model: Any) -> Any:
    if kind == "whole":
        return torch.optim.AdamW(model.parameters(), lr=1e-2)
    return pydist.ShardedOptimizer(model, torch.optim.AdamW, stage=int(kind[-1]), lr=1e-2)


def train(model: Any, optimizer: Any, number: int) -> None:
    rank, _ = pydist.rank(), pydist.world_size()
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(2):
            x = batch(rank, 5, 10, step=100 * number + 10 * step + micro)
            with model.no_sync(enabled=micro == 0):
                # One is slow, so that the other comes to every place beside it.
                loss = model(x, 0.002) if number == 0 else model(x).square().mean()
                loss.backward()
        optimizer.step()


def train_in_threads(kind: str) -> None:
    joined()
    alone, beside = (
        [pydist.DataParallel(copy.deepcopy(model_of(n)), bucket_cap_mb=0.0005) for n in range(2)]
        for _ in range(2)
    )
    optimizers = [[make_optimizer(kind, model) for model in models] for models in (alone, beside)]
    for number in range(2):
        train(alone[number], optimizers[0][number], number)
    in_threads(
        lambda: train(beside[0], optimizers[1][0], 0),
        lambda: train(beside[1], optimizers[1][1], 1),
    )
    for ours, theirs in zip(beside, alone, strict=True):
        for name, value in theirs.state_dict().items():
            torch.testing.assert_close(
                ours.state_dict()[name],
                value,
                rtol=1e-12,
                atol=1e-12,
                msg=lambda text, name=name: f"{name}: {text}",
            )
    assert DistributedDataParallel._active_ddp_module is None


@pytest.mark.parametrize("kind", ["whole", "stage 1", "stage 2"])
def test_two_models_in_two_threads(run: Runner, kind: str) -> None:
    run(train_in_threads, kind)


def step_beside_a_backward(kind: str) -> None:
    """Steps and forwards of one model while another one is in its backward."""
    rank, _ = joined()
    slow = pydist.DataParallel(Pausing())
    quick = pydist.DataParallel(model_of(1))
    optimizer = make_optimizer(kind, quick)
    is_within, goes_on = threading.Event(), threading.Event()

    def wait(gradient: Tensor) -> Tensor:
        is_within.set()
        assert goes_on.wait(30), "steps of the other model wait for this backward"
        return gradient

    def go_backward() -> None:
        x = batch(rank, 5, 10).requires_grad_()
        x.register_hook(wait)
        slow(x, 0.0).backward()

    def step() -> None:
        try:
            assert is_within.wait(30)
            for number in range(12):
                with quick.no_sync(enabled=number % 2 == 0):
                    quick(batch(rank, 5, 10, step=number)).sum().backward()
                if number % 2:
                    optimizer.step()
                elif kind == "whole":
                    with pytest.raises(pydist.InvalidUsage, match="never averaged"):
                        optimizer.step()
        finally:
            goes_on.set()

    in_threads(go_backward, step)


@pytest.mark.parametrize("kind", ["whole", "stage 1"])
def test_a_step_waits_for_no_other_models_backward(run: Runner, kind: str) -> None:
    run(step_beside_a_backward, kind)


def interleave_forwards() -> None:
    """Each begins before the other ends."""
    owner: Any = DistributedDataParallel
    before = owner._active_ddp_module
    steps = [threading.Event() for _ in range(4)]

    def first() -> None:
        with graphs_cut_at(5 << 20):
            steps[0].set()
            assert steps[1].wait(10)
            assert owner._active_ddp_module
            assert owner._active_ddp_module.bucket_bytes_cap == 5 << 20
        assert not owner._active_ddp_module, "nothing of this thread's is active"
        steps[2].set()

    def second() -> None:
        assert steps[0].wait(10)
        assert not owner._active_ddp_module, "the other thread's is not this one's"
        with graphs_cut_at(7 << 20):
            steps[1].set()
            assert steps[2].wait(10)
            assert owner._active_ddp_module.bucket_bytes_cap == 7 << 20
            with graphs_cut_at(9 << 20):
                assert owner._active_ddp_module.bucket_bytes_cap == 9 << 20
            assert owner._active_ddp_module.bucket_bytes_cap == 7 << 20

    in_threads(first, second)
    assert owner._active_ddp_module is before


def test_what_is_active_in_threads() -> None:
    interleave_forwards()


def test_what_is_active_beside_torchs_own() -> None:
    """Which sets it without regard to threads."""
    owner: Any = DistributedDataParallel
    try:
        for leaves_first in (True, False):
            torchs = type("Torchs", (), {"bucket_bytes_cap": 3})()
            owner._active_ddp_module = torchs
            with graphs_cut_at(5 << 20):
                assert owner._active_ddp_module.bucket_bytes_cap == 5 << 20
                if leaves_first:
                    owner._active_ddp_module = None
            assert owner._active_ddp_module is (None if leaves_first else torchs)
            owner._active_ddp_module = None
    finally:
        owner._active_ddp_module = None
