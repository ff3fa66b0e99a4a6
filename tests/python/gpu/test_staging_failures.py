"""What fails while tensors of a GPU travel through pinned memory."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable

import fake_cuda
import pytest
import staged_gpu
import torch
import torch.distributed as dist
from fake_cuda import needs_fake_cuda
from launch import Outcome, rank_outcomes
from staged_gpu import needs_gpu
from staged_tensors import BACKENDS, filled, on_device, start
from torch import Tensor, nn
from training import LIMIT_S, TIME_LIMIT

import pydist

pytestmark = [needs_gpu, TIME_LIMIT]


def backward_raises() -> None:
    """The exception is here before autograd's thread for the device has let go of the backward."""
    rank, _ = start()
    model = pydist.DataParallel(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)).to("cuda"))
    inputs = torch.ones(3, 4, device="cuda")
    raises = False

    def hook(_: Tensor) -> None:
        if raises:
            raise ValueError("of the user's")

    model.module[0].weight.register_hook(hook)
    expected: tuple[type[Exception], str] = (
        (ValueError, "of the user's") if rank == 0 else (pydist.Error, "backward raised on rank 0")
    )
    for _ in range(8):
        raises = rank == 0
        with pytest.raises(expected[0], match=expected[1]):
            model(inputs).sum().backward()
        model.zero_grad()
        raises = False
        model(inputs).sum().backward()
        assert bool((model.module[-1].bias.grad == 3).all())


@BACKENDS
def test_training_goes_on_after_a_backward_that_raised(backend: str) -> None:
    on_device(backend, backward_raises)


class Exponentials(nn.Module):
    """Whose backward autograd itself refuses, before any gradient, if its output was changed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs).exp()


def program_goes_on(act: str) -> None:
    """The program has the exception, and changes gradients, while the round is given up."""
    start()
    model = pydist.DataParallel(Exponentials().to("cuda"))
    if act == "sharded":
        pydist.ShardedOptimizer(model, torch.optim.SGD, lr=0.0, stage=2)
    inputs = torch.zeros(3, 4, device="cuda")
    # As a gradient that is going away, it has no memory: whoever asks where it lies raises.
    level = torch._C._functorch._vmap_increment_nesting(1, "error")
    without_memory = [
        torch._C._functorch._add_batch_dim(torch.zeros_like(parameter)[None], 0, level)
        for parameter in model.parameters()
    ]
    torch._C._functorch._vmap_decrement_nesting()
    # No other thread gets the interpreter before this one waits, and this is no wait for Python.
    sys.setswitchinterval(LIMIT_S)
    go_on_for_20_ms = functools.partial(ctypes.PyDLL(None).usleep, 20_000)
    for step in range(16):
        if act == "accumulated" and step % 2 == 1:
            with model.no_sync(), model.weighted(2.0):
                model(inputs).sum().backward()
        outputs = model(inputs)
        loss = outputs.sum()
        outputs.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        for parameter, gradient in zip(model.parameters(), without_memory, strict=True):
            parameter.grad = gradient
        go_on_for_20_ms()
        model.zero_grad()
        model(inputs).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        model.zero_grad()


@BACKENDS
@pytest.mark.parametrize("act", ["averaged", "accumulated", "sharded"])
def test_a_program_that_goes_on_while_a_round_is_given_up(backend: str, act: str) -> None:
    on_device(backend, program_goes_on, act)


def device_is_late() -> str:
    rank, _ = start()
    tensor = filled(1.0)
    pydist.all_reduce(tensor)
    stall = staged_gpu.Stall() if rank == 1 else None
    try:
        pydist.all_reduce(tensor.add_(1), timeout=1.0 if rank == 1 else 20.0)
    except pydist.Error as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if stall is not None:
            stall.release()
    return "no error"


def rank_dies() -> None:
    rank, _ = start()
    pydist.all_reduce(filled(1.0))
    if rank == 1:
        works = [pydist.all_reduce(filled(1.0), async_op=True) for _ in range(3)]
        assert works
        os._exit(3)
    for _ in range(5):
        pydist.all_reduce(filled(1.0), timeout=20.0)


def ranks_disagree() -> None:
    rank, _ = start()
    pydist.all_reduce(filled(1.0, 100 + rank))


def is_captured_or_wrong() -> None:
    start()
    with pytest.raises(pydist.InvalidUsage, match="one device"):
        pydist.all_reduce(filled(1.0, 3), out=torch.empty(3))
    with pytest.raises(pydist.InvalidUsage, match="on meta"):
        pydist.all_reduce(torch.empty(3, device="meta"))
    assert pydist.all_reduce(filled(1.0, 3)).tolist() == [2.0] * 3


@BACKENDS
def test_failures(backend: str) -> None:
    env = {"PYDIST_BACKEND": backend, "PYDIST_STAGING_BYTES": "65536"}
    on_device(backend, is_captured_or_wrong)
    late = on_device(backend, device_is_late)
    assert str(late[1]).startswith(
        "Timeout: timed out: all_reduce on rank 1 of 2 of group 'world': "
    )
    assert late[0] != "no error"

    def errors(function: Callable[[], object]) -> list[Outcome]:
        return rank_outcomes(function, 2, env=env, timeout=35)

    survivor = errors(rank_dies)[0]
    assert survivor.error in ("PeerLost", "TransportError", "Timeout"), survivor.describe()
    if backend == "native":
        assert survivor.error == "PeerLost"
        assert "rank 1" in survivor.message
    assert [outcome.error for outcome in errors(ranks_disagree)] == ["Mismatch", "Mismatch"]


def refused_in_a_block() -> None:
    staged_gpu.install(delay_us=300)
    dist.init_process_group("pydist")
    rank = dist.get_rank()
    sent, received, summed = filled(1.0, 5), filled(-1.0, 5), filled(1.0, 5)
    operations = [
        dist.P2POp(dist.isend, sent, 1 - rank),
        dist.P2POp(dist.irecv, received, 1 - rank, tag=0x70000000),
    ]
    with pytest.raises(ValueError, match="tags from 0"):
        dist.batch_isend_irecv(operations)
    assert received.tolist() == [-1.0] * 5
    dist.all_reduce(summed)
    assert summed.tolist() == [2.0] * 5


def test_a_block_of_which_the_host_refuses_one_does_not_start() -> None:
    on_device("gloo", refused_in_a_block)


def memory_is_refused() -> str:
    rank, _ = start()
    message = filled(1.0, 5)

    def exchange() -> None:
        pydist.all_reduce(filled(1.0, 5))  # rank 0 may still be in it when rank 1 is refused
        fake_cuda.refuse_to_pin(rank == 1)
        pydist.send(message, 0) if rank == 1 else pydist.recv(message, 1)

    with pytest.raises((pydist.Error, RuntimeError)) as error:
        exchange()
    return str(error.value)


@needs_fake_cuda
def test_what_torch_refuses_a_rank_is_told_to_the_others() -> None:
    told = str(on_device("native", memory_is_refused)[0])  # gloo's messages tell no reasons
    assert "CUDA error: out of memory" in told
    assert "frame #" not in told
    assert "Exception raised from" not in told
