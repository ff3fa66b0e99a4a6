"""Sharded steps on GPUs that are captured, read on other streams, or end in the midst."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import os
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import fake_cuda
import gpu_ranks
import pytest
import torch
from gpu_ranks import Graph, needs_gpu_ranks
from gpu_twins import ENVIRONMENTS, LIMIT_S, STAGES, is_on_nccl, start
from launch import rank_outcomes, run_ranks
from thorough import everyday
from torch import Tensor, nn
from training import Runner, joined
from twins import steps_late

import pydist

pytestmark = [needs_gpu_ranks, pytest.mark.timeout(60)]


def synchronize() -> None:
    torch.cuda.synchronize() if gpu_ranks.IS_REAL else fake_cuda.synchronize()


@contextlib.contextmanager
def other_stream() -> Iterator[None]:
    """Another stream than the default one, which has waited for nothing but the host."""
    if gpu_ranks.IS_REAL:
        with torch.cuda.stream(torch.cuda.Stream()):
            yield
    else:
        with fake_cuda.Stream():
            yield


class NoLayer(nn.Module):
    """Whose parameter is read as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1000))


def stepped() -> tuple[Any, Any]:
    """A model whose weight goes from 1 to 0.5, which may not have arrived."""
    model = pydist.DataParallel(NoLayer().to("cuda"))
    optimizer = pydist.ShardedOptimizer(model, torch.optim.SGD, lr=0.5)
    model.weight.grad = torch.ones(1000, device="cuda")
    model.sync_gradients()
    synchronize()
    dawdle(100_000)
    optimizer.step()
    dawdle(0)
    optimizer.zero_grad()
    return model, optimizer


def dawdle(longest_us: int) -> None:
    """The fake's streams that belong to NCCL are late."""
    if not gpu_ranks.IS_REAL and is_on_nccl():
        ctypes.CDLL("libcuda.so.1").fake_driver_delay_us(longest_us)


def assert_halved(values: Tensor) -> None:
    assert torch.equal(values.detach().cpu().reshape(-1), torch.full((1000,), 0.5))


def read_on_streams() -> None:
    """Each stream that reads waits, whoever has read before."""
    start()
    is_late = is_on_nccl() and not gpu_ranks.IS_REAL
    model, optimizer = stepped()
    first = torch.empty(1000, device="cuda").copy_(model.weight)
    # The host went on at once.
    assert not is_late or type(model.weight) is not nn.Parameter
    with other_stream():
        assert_halved(model.weight + 0)
    assert_halved(first)

    readers: list[Callable[[Any], Tensor]] = [
        lambda model: model.weight.detach(),
        lambda model: model.state_dict()["weight"],
        lambda model: torch._foreach_add([model.weight], 0.0)[0],
        lambda model: copy.deepcopy(model).weight,
        lambda model: copy.deepcopy(model.weight),
    ]
    for read in readers:
        model, optimizer = stepped()
        torch.empty(1000, device="cuda").copy_(model.weight)
        with other_stream():
            assert_halved(read(model))

    # Who takes over the order of all streams makes it ordinary.
    model, optimizer = stepped()
    optimizer.finish()
    assert type(model.weight) is nn.Parameter
    assert_halved(model.weight + 0)

    # So does its arrival, once somebody looks.
    model, optimizer = stepped()
    limit = time.monotonic() + 20
    while type(model.weight) is not nn.Parameter:
        _ = model.weight.data
        time.sleep(0.01)
        assert time.monotonic() < limit
    with other_stream():
        assert_halved(model.weight + 0)

    # What nobody reads any more goes, and what travels keeps its memory.
    model, optimizer = stepped()
    gone = weakref.ref(model.weight)
    del model, optimizer
    gc.collect()
    assert gone() is None
    synchronize()


def test_each_stream_that_reads_waits(run_on_gpus: Runner) -> None:
    run_on_gpus(read_on_streams)


def step_and_leave() -> None:
    """The ranks that go first wait for the others, and for what NCCL's stream has not done yet."""
    rank, size = start()
    for how in ("optimizer", "model and optimizer"):
        module = NoLayer().to("cuda")
        model = pydist.DataParallel(module)
        optimizer = pydist.ShardedOptimizer(model, torch.optim.SGD, lr=0.5)
        model.weight.grad = torch.ones(1000, device="cuda")
        model.sync_gradients()
        synchronize()
        pydist.barrier()
        dawdle(100_000)
        with steps_late(0.3) if rank == size - 1 else contextlib.nullcontext():
            optimizer.step()
        dawdle(0)
        if how == "model and optimizer":
            del model
        del optimizer
        assert type(module.weight) is nn.Parameter
        assert_halved(module.weight + 0)
        pydist.barrier()


def test_who_leaves_waits(run_on_gpus: Runner) -> None:
    run_on_gpus(step_and_leave)


def refuse_capture(who: str) -> None:
    rank, _ = start()
    torch.manual_seed(3)
    model = pydist.DataParallel(nn.Linear(10, 7).to("cuda"))
    optimizer = pydist.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    inputs = torch.ones(2, 10, device="cuda")
    for _ in range(3):
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    if who == "backward":
        with pytest.raises(pydist.InvalidUsage, match="a ShardedOptimizer takes"), Graph():
            model(inputs).sum().backward()
        # All ranks know, and go on.
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()
        assert bool(model.weight.isfinite().all())
        # Lives on: NCCL's part in the end of a model breaks a capture that nobody knows of.
        before = model, optimizer
        # A graph can't wait for what it doesn't hold, so what it reads has arrived.
        model, optimizer = stepped()
        graph = Graph()
        with graph:
            read = model.weight + 0
        assert type(model.weight) is nn.Parameter
        graph.replay()
        assert_halved(read)
        del before
        return
    model(inputs).sum().backward()
    if who == "everybody" or rank == 1:
        with pytest.raises(pydist.InvalidUsage, match="cannot be captured"), Graph():
            optimizer.step()
    else:
        with pytest.raises(pydist.Error, match=r"raised on rank 1.*cannot be captured"):
            optimizer.step()
    optimizer.step()
    assert bool(model.weight.isfinite().all())


@pytest.mark.parametrize("who", ["backward", "everybody", "one rank"])
def test_captures_are_refused_on_all_ranks(who: str) -> None:
    run_ranks(refuse_capture, 2, who, env=ENVIRONMENTS["nccl"], timeout=LIMIT_S)


def refuse_staged_capture(stage: int) -> None:
    """What goes by the host can't be captured; whoever tries tells those that don't."""
    gpu_ranks.install(delay_us=50)
    rank, _ = joined()
    torch.manual_seed(3)
    # More buckets than stage 2 has buffers for.
    layers = [nn.Linear(10, 10).to("cuda") for _ in range(6)]
    model = pydist.DataParallel(nn.Sequential(*layers), bucket_cap_mb=0.0005)
    optimizer = pydist.ShardedOptimizer(model, torch.optim.SGD, lr=0.1, stage=stage)
    inputs = torch.ones(2, 10, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()

    step()
    for captures in ([0, 1], [1]):
        optimizer.zero_grad()
        began = time.monotonic()
        if rank in captures:
            refused = pytest.raises(pydist.InvalidUsage, match="cannot be part of a CUDA graph")
            with refused, Graph():
                model(inputs).sum().backward()
        else:
            with pytest.raises(pydist.Error, match="backward raised on rank 1"):
                model(inputs).sum().backward()
        assert time.monotonic() - began < 10, "of 600 seconds that an operation has"
        step()
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("kind", everyday("native", thorough=("gloo",)))
@STAGES
def test_staged_captures_leave_nobody_waiting(kind: str, stage: int) -> None:
    run_ranks(refuse_staged_capture, 2, stage, env=ENVIRONMENTS[kind], timeout=LIMIT_S)


class Dying(torch.optim.SGD):
    """Ends one rank's process in a step, once it is to."""

    is_armed = False

    def step(self, closure: Any = None) -> Any:
        if self.is_armed and pydist.rank() == 1:
            os._exit(9)
        return super().step(closure)


def die() -> float:
    start()
    model = pydist.DataParallel(nn.Linear(50, 50).to("cuda"))
    optimizer = pydist.ShardedOptimizer(model, Dying, lr=0.1)
    Dying.is_armed = True
    model(torch.ones(2, 50, device="cuda")).sum().backward()
    began = time.monotonic()
    with pytest.raises(pydist.Error, match=r"rank 1|peer|closed"):  # noqa: PT012
        for _ in range(100):
            optimizer.step()
            float(model.weight.sum())
    return time.monotonic() - began


@pytest.mark.parametrize("kind", everyday("nccl", "native", thorough=("gloo",)))
def test_a_rank_that_dies_in_a_step(kind: str) -> None:
    first, second = rank_outcomes(die, 2, env=ENVIRONMENTS[kind], timeout=LIMIT_S)
    assert second.exit_code == 9
    assert first.ok, first.describe()
    assert first.value < 20
