"""The NCCL backend through torch and DataParallel: on a GPU that the ranks share, or on fakes.

What collectives compute is the conformance suite's, failures in every detail the C++ tests'.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import time
from collections.abc import Iterator
from datetime import timedelta
from unittest import mock

import fake_cuda
import gpu_ranks
import pytest
import torch
import torch.distributed as dist
from gpu_ranks import needs_gpu_ranks
from launch import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from training import (
    TIME_LIMIT,
    Cut,
    batch,
    joined,
    loss_of_cut,
    train_like_reference,
)

import pydist

pytestmark = [needs_gpu_ranks, TIME_LIMIT]

NCCL: dict[str, str | None] = {"PYDIST_BACKEND": "nccl"}


def start() -> tuple[int, int]:
    gpu_ranks.install(delay_us=300)
    return joined()


def everyday_use() -> None:
    rank, size = start()
    assert pydist.backend() == "nccl"
    assert str(pydist.device()) == "cuda:0"

    # The host does not wait; what follows on the stream does.
    mine = torch.zeros(100_000, device="cuda").add_(rank + 1)
    pydist.all_reduce(mine)
    assert bool((mine == 3.0).all())
    work = pydist.all_reduce(mine, async_op=True)
    work.wait()
    mine.mul_(2)
    assert bool((mine == 12.0).all())
    work.wait(timeout=20.0)
    assert work.is_completed()

    # Results that are not contiguous, by whoever waits: a stream, the host, nobody.
    grid = torch.zeros(6, 50, device="cuda").add_(rank + 1).t()
    pydist.all_reduce(grid, async_op=True).wait()
    assert bool((grid == 3.0).all())
    late = torch.zeros(6, 50, device="cuda").add_(rank + 1).t()
    handle = pydist.all_reduce(late, async_op=True)
    while not handle.is_completed():
        time.sleep(0.001)
    assert bool((late == 3.0).all())

    # torch.distributed: futures, coalescing, messages (by the host), barriers, CPU tensors.
    tensor = torch.ones(1000, device="cuda")
    future = dist.all_reduce(tensor, async_op=True).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2)
    assert bool((doubled.wait() == 4.0).all())
    with dist._coalescing_manager(device=torch.device("cuda:0"), async_ops=True) as manager:
        parts = [torch.full((10,), float(i), device="cuda") for i in range(3)]
        for part in parts:
            dist.all_reduce(part)
    manager.wait()
    assert [float(part[0]) for part in parts] == [0.0, 2.0, 4.0]
    sent = dist.isend(torch.full((5,), rank + 7.0, device="cuda"), 1 - rank, tag=3)
    got = torch.empty(5, device="cuda")
    dist.recv(got, 1 - rank, tag=3)
    sent.wait()
    assert bool((got == 8.0 - rank).all())
    dist.barrier()
    on_host = torch.tensor([rank])
    dist.all_reduce(on_host)
    assert on_host.item() == 1
    rows = [torch.empty(3, device="cuda") for _ in range(size)]
    dist.all_gather(rows, torch.full((3,), float(rank), device="cuda"))
    assert [float(row[0]) for row in rows] == [0.0, 1.0]

    # A group of its own, and memory that NCCL has registered.
    pair = dist.new_group([1, 0], backend="pydist", timeout=timedelta(seconds=20))
    whole = torch.ones(4, device="cuda", dtype=torch.bfloat16)
    dist.all_reduce(whole, op=dist.ReduceOp.AVG, group=pair)
    assert bool((whole == 1).all())
    memory = pydist.symmetric_empty(1000, device="cuda").fill_(rank + 1.0)
    pydist.all_reduce(memory)
    assert bool((memory == 3.0).all())
    del memory
    pydist.shutdown()


def test_everyday_use() -> None:
    run_ranks(everyday_use, 2, env=NCCL, timeout=35)


def integer_averages() -> None:
    """As NCCL divides: the fraction is dropped, also below zero."""
    rank, _ = start()
    values = [[-1, -2, 7, 10], [-2, -3, 8, 13]]
    for dtype in (torch.int8, torch.int32, torch.int64):
        counts = torch.tensor(values[rank], device="cuda", dtype=dtype)
        dist.all_reduce(counts, dist.ReduceOp.AVG)
        assert counts.tolist() == [-1, -2, 7, 11]
        counts = torch.tensor(values[rank], device="cuda", dtype=dtype)
        work = dist.all_reduce(counts, dist.ReduceOp.AVG, async_op=True)
        work.wait()
        assert (counts * 2).tolist() == [-2, -4, 14, 22]
        # Finished by nobody who waits, and not contiguous.
        grid = torch.zeros(4, 2, device="cuda", dtype=dtype)
        grid[:, 0] = torch.tensor(values[rank], device="cuda", dtype=dtype)
        handle = dist.all_reduce(grid[:, 0], dist.ReduceOp.AVG, async_op=True)
        while not handle.is_completed():
            time.sleep(0.001)
        assert grid[:, 0].tolist() == [-1, -2, 7, 11]
    future = dist.all_reduce(
        torch.tensor([5 + rank], device="cuda"), dist.ReduceOp.AVG, async_op=True
    ).get_future()
    assert future.then(lambda done: done.value()[0] + 1).wait().item() == 6
    with pytest.raises(pydist.InvalidUsage, match="cannot divide it there"):
        dist.all_reduce(torch.ones(2, device="cuda", dtype=torch.uint32), dist.ReduceOp.AVG)
    pydist.shutdown()


@pytest.mark.parametrize("backend", ["nccl", "native", "gloo"])
def test_averages_of_integers(backend: str) -> None:
    env = {**NCCL, "PYDIST_BACKEND": backend}
    run_ranks(integer_averages, 2, env=env, timeout=35)


def crossed() -> None:
    rank, _ = start()
    tensor = torch.ones(4, device="cuda")
    word = torch.full((3,), 7.0 if rank == 0 else 0.0, device="cuda")
    if rank == 0:
        work = pydist.all_reduce(tensor, async_op=True)
        pydist.send(word, 1)
        work.wait()
    else:
        pydist.recv(word, 0)
        pydist.all_reduce(tensor)
    assert tensor.tolist() == [2.0] * 4
    assert word.tolist() == [7.0] * 3


def test_the_first_collective_keeps_nobody_waiting() -> None:
    run_ranks(crossed, 2, env=NCCL, timeout=35)


class Normalised(nn.Module):
    """Averages in its backward, behind the gradients of a layer that it does not always use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = pydist.SyncBatchNorm(8)
        self.last = nn.Linear(8, 8)

    def forward(self, inputs: Tensor, uses_last: bool) -> Tensor:
        normal = self.norm(self.first(inputs))
        return self.last(normal) if uses_last else 2 * normal


def crossed_in_a_backward() -> None:
    rank, _ = start()
    model = pydist.DataParallel(Normalised().to("cuda"), bucket_cap_mb=1e-5)
    for _ in range(2):
        # Rank 0 has a bucket to average before that; rank 1 does not.
        model(torch.randn(4, 8, device="cuda"), rank == 0).square().sum().backward()


def test_launches_wait_for_no_rank_on_an_nvswitch() -> None:
    # What CUDA would load behind NCCL's kernel: see "First uses behind NCCL" in docs/gpu.md.
    env = {**NCCL, "FAKE_NVSWITCH": "1", "CUDA_MODULE_LOADING": "EAGER"}
    run_ranks(crossed_in_a_backward, 2, env=env, timeout=35)


def late_for_the_first_call() -> None:
    rank, _ = start()
    tensor = torch.ones(4, device="cuda")
    time.sleep(0.3 * rank)
    pydist.all_reduce(tensor)
    assert tensor.tolist() == [2.0] * 4


def test_connections_may_be_made_at_first_use() -> None:
    env = {**NCCL, "NCCL_RUNTIME_CONNECT": "1"}
    run_ranks(late_for_the_first_call, 2, env=env, timeout=35)


def no_room() -> None:
    rank, _ = start()
    pydist.all_reduce(torch.ones(3, device="cuda"))  # joins
    driver = ctypes.CDLL("libcuda.so.1")
    fake_cuda.keep_in_cache(1 << 30)
    driver.fake_driver_limit_memory(ctypes.c_size_t(1 << 30))
    memory = pydist.symmetric_empty(1000, device="cuda").fill_(rank + 1.0)
    pydist.all_reduce(memory)
    assert bool((memory == 3.0).all())
    driver.fake_driver_limit_memory(ctypes.c_size_t(1000))
    with pytest.raises(pydist.TransportError, match=r"no room for 4000 bytes.*torch's cache was"):
        pydist.symmetric_empty(1000, device="cuda")
    in_a_capture = pytest.raises(pydist.InvalidUsage, match="while a CUDA graph is being captured")
    with gpu_ranks.Graph(), in_a_capture:
        pydist.symmetric_empty(1000, device="cuda")
    pydist.all_reduce(memory)
    pydist.shutdown()


@pytest.mark.skipif(gpu_ranks.IS_REAL, reason="a real GPU would have to be filled")
def test_where_there_is_no_room_torchs_cache_is_emptied() -> None:
    run_ranks(no_room, 2, env=NCCL, timeout=35)


def training() -> None:
    rank, size = start()
    module, reference = Cut.with_reference("cuda", "cuda")
    model = pydist.DataParallel(module, bucket_cap_mb=0.0005)
    train_like_reference(model, reference, loss_of_cut, steps=range(4))

    for compress in ("bf16", "fp16"):
        torch.manual_seed(6)
        model = pydist.DataParallel(torch.nn.Linear(40, 30).to("cuda"), compress=compress)
        inputs = [batch(r, 4, 40, step=3, dtype=torch.float32) for r in range(size)]
        model(inputs[rank].to("cuda")).square().mean().backward()
        copy = torch.nn.Linear(40, 30)
        copy.load_state_dict(model.state_dict())
        copy(torch.cat(inputs)).square().mean().backward()
        torch.testing.assert_close(model.weight.grad.cpu(), copy.weight.grad, rtol=0.02, atol=0.02)

    torch.manual_seed(7)
    module = torch.nn.Linear(4, 2, dtype=torch.float64).to("cuda")
    wrapped = torch.nn.parallel.DistributedDataParallel(module)
    wrapped(batch(rank, 3, 4).to("cuda")).sum().backward()
    mean = torch.stack([batch(r, 3, 4).sum(0) for r in range(size)]).mean(0)
    torch.testing.assert_close(module.weight.grad.cpu(), mean.expand(2, 4))
    pydist.shutdown()


def test_training() -> None:
    run_ranks(training, 2, env=NCCL, timeout=35)


@contextlib.contextmanager
def seen_by_torch() -> Iterator[None]:
    """What torch says of a machine with a GPU, where there is a fake one."""
    if gpu_ranks.IS_REAL:
        yield
        return
    with (
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch.multiple(
            torch.accelerator,
            is_available=lambda: True,
            current_accelerator=lambda *_: torch.device("cuda"),
            device_count=lambda: 1,
            current_device_index=lambda: 0,
        ),
    ):
        yield


def parts_of_a_bound_group() -> None:
    gpu_ranks.install()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with seen_by_torch():
        dist.init_process_group("pydist", device_id=torch.device("cuda", 0))

        def total(group: dist.ProcessGroup | None) -> float:
            mine = torch.tensor([float(rank)], device="cuda")
            dist.all_reduce(mine, group=group)
            return mine.item()

        assert total(None) == sum(range(size))
        first = dist.new_group([0])
        assert rank != 0 or total(first) == 0.0
        halves, _ = dist.new_subgroups(2)
        assert total(halves) == rank // 2 * 4 + 1
        mesh = init_device_mesh("cuda", (2, size // 2), mesh_dim_names=("outer", "inner"))
        assert total(mesh.get_group("inner")) == rank // 2 * 4 + 1
        assert total(mesh.get_group("outer")) == rank % 2 * 2 + 2
        assert pydist.job.groups.communicator_of(mesh.get_group("outer")).timeout == 20.0
        some = dist.split_group(split_ranks=[[0, 2]])
        assert (some is None) == (rank in (1, 3))
        assert some is None or total(some) == 2.0
        crossed = dist.split_group(split_ranks=[[0, 3], [1, 2]])
        assert crossed is not None
        assert total(crossed) == 3.0
        dist.destroy_process_group()


def test_groups_bound_to_a_device_can_be_split() -> None:
    run_ranks(parts_of_a_bound_group, 4, env={**NCCL, "PYDIST_TIMEOUT": "20"}, timeout=35)


def late_rank() -> str:
    rank, _ = start()
    tensor = torch.ones(4, device="cuda")
    pydist.all_reduce(tensor)
    if rank == 1:
        time.sleep(2.0)
    work = pydist.all_reduce(tensor, async_op=True)
    message = ""
    if rank == 0:
        with pytest.raises(pydist.Timeout) as error:
            work.wait(timeout=0.5)
        message = str(error.value)
    work.wait()
    return message


def too_late_to_be_compared() -> tuple[str, float]:
    rank, _ = start()
    tensor = torch.ones(4, device="cuda")
    pydist.all_reduce(tensor)
    began = time.monotonic()
    if rank == 1:
        time.sleep(4.0)
        return "", 0.0
    with pytest.raises(pydist.Timeout) as error:
        pydist.all_reduce(tensor, timeout=1.0)
    return str(error.value), time.monotonic() - began


@pytest.mark.parametrize("backend", ["nccl", "native"])
def test_waiting_in_vain_says_where_the_ranks_are(backend: str) -> None:
    message, _ = run_ranks(late_rank, 2, env={"PYDIST_BACKEND": backend}, timeout=35)
    assert re.search(r"rank 1 \(pid .*\) left all_reduce #\d+", message)


def test_a_rank_that_is_late_for_the_comparison() -> None:
    env = {**NCCL, "PYDIST_DEBUG": "1"}
    (message, seconds), _ = run_ranks(too_late_to_be_compared, 2, env=env, timeout=35)
    assert "what each rank called" in message
    assert "rank 1" in message
    assert seconds < 3.5


def choice() -> str:
    start()
    on_gpu = torch.ones(3, device="cuda")
    pydist.all_reduce(on_gpu)
    assert bool((on_gpu == pydist.world_size()).all())
    return pydist.backend()


def test_auto_takes_nccl_where_every_rank_has_a_gpu() -> None:
    assert run_ranks(choice, 2, env={"PYDIST_BACKEND": "auto"}, timeout=35) == ["nccl", "nccl"]
    # One rank alone has nobody to talk to.
    assert run_ranks(choice, 1, env={"PYDIST_BACKEND": "auto"}, timeout=35) == ["native"]


def on_four_ranks() -> None:
    rank, size = start()
    assert pydist.backend() == "nccl"
    mine = torch.zeros(100_000, device="cuda").add_(rank + 1)
    pydist.all_reduce(mine)
    assert bool((mine == size * (size + 1) / 2).all())
    gathered = torch.empty(size, 5, device="cuda")
    dist.all_gather_into_tensor(gathered, torch.full((5,), float(rank), device="cuda"))
    assert gathered[:, 0].tolist() == list(range(size))
    largest = torch.full((3,), float(rank), device="cuda")
    pydist.all_reduce(largest, "max")  # by the ring
    assert largest.tolist() == [size - 1.0] * 3
    module, reference = Cut.with_reference("cuda", "cuda")
    model = pydist.DataParallel(module, bucket_cap_mb=0.0005)
    train_like_reference(model, reference, loss_of_cut, steps=range(2))


def test_four_ranks() -> None:
    run_ranks(on_four_ranks, 4, env=NCCL, timeout=60)
