"""The NCCL backend through torch and DataParallel: on a GPU that the ranks share, or on fakes.

What collectives compute is the conformance suite's, failures in every detail the C++ tests'.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from unittest import mock

import fake_cuda
import gpu_ranks
import pytest
import torch
import torch.distributed as dist
from gpu_ranks import needs_gpu_ranks
from launch import rank_outcomes, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from training import (
    TIME_LIMIT,
    Cut,
    assert_near,
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
    run_ranks(crossed_in_a_backward, 2, env={**NCCL, "FAKE_NVSWITCH": "1"}, timeout=35)


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
    in_a_capture = pytest.raises(pydist.TransportError, match="cannot be emptied during a capture")
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


def refused_without_kernels() -> str:
    # As where the GPU of one rank is of a kind that the kernels were not compiled for.
    if os.environ["RANK"] == "1":
        os.environ["FAKE_CUDA_KERNELS"] = "foreign"
    start()
    groups = [None, dist.new_group([0, 1]), dist.new_group([1, 0])]
    for group in groups:
        with pytest.raises(ValueError, match="needs pydist's CUDA kernels") as refusal:
            dist.all_reduce(torch.ones(3, device="cuda"), op=dist.ReduceOp.MAX, group=group)
        assert "error 209" in str(refusal.value)
        assert "PYDIST_BACKEND=native" in str(refusal.value)
    pydist.shutdown()
    return str(refusal.value)


@pytest.mark.skipif(gpu_ranks.IS_REAL, reason="no GPU is unknown to a build for this machine")
def test_what_needs_the_kernels_is_refused_with_the_reason_that_is_told_once() -> None:
    outcomes = rank_outcomes(refused_without_kernels, 2, env=NCCL, timeout=35)
    for outcome in outcomes:
        assert outcome.ok, outcome.describe()
        assert outcome.output.count("does without pydist's CUDA kernels: ") == 1, outcome.output
        assert "error 209" in outcome.output
    assert "rank 1 of group 'group 2' cannot use them" in outcomes[0].value


def trained_without_kernels() -> None:
    rank, size = start()
    assert pydist.backend() == "nccl"
    # At once: in a backward ranks would meet each other's refusals.
    with pytest.raises(pydist.InvalidUsage, match=r"in a wire type needs .*error 209"):
        pydist.DataParallel(nn.Linear(4, 2).to("cuda"), compress="bf16")
    pydist.DataParallel(nn.Linear(4, 2), compress="bf16")(torch.ones(3, 4)).sum().backward()

    # Models after one that was refused train on; each rank's mean counts as its rows do.
    def rows(each: int) -> int:
        return 2 * each + 1

    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        torch.manual_seed(8)
        module = nn.Linear(4, 2, dtype=dtype)
        reference = nn.Linear(4, 2, dtype=torch.float64)
        reference.load_state_dict(module.state_dict())
        model = pydist.DataParallel(module.to("cuda"))
        with model.weighted(rows(rank)):
            model(batch(rank, rows(rank), 4, dtype=dtype).to("cuda")).square().mean().backward()
        everything = torch.cat([batch(r, rows(r), 4, dtype=dtype) for r in range(size)])
        reference(everything.double()).square().mean().backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert ours.grad is not None
            assert_near(ours.grad.cpu().double(), theirs.grad, tolerance)

    # Ranks that run out of batches, and a mean over those that have one.
    module = nn.Linear(4, 2, dtype=torch.float64).to("cuda")
    model = pydist.DataParallel(module)
    with model.join(divide_by_initial_world_size=False):
        for step in range(1 + rank):
            model.zero_grad()
            model(batch(rank, 3, 4, step=step).to("cuda")).sum().backward()
            present = [batch(r, 3, 4, step=step).sum(0) for r in range(step, size)]
            assert module.weight.grad is not None
            mean = torch.stack(present).mean(0).expand(2, 4)
            assert_near(module.weight.grad.cpu(), mean)
    pydist.shutdown()


@pytest.mark.skipif(gpu_ranks.IS_REAL, reason="no GPU is unknown to a build for this machine")
def test_training_without_kernels() -> None:
    run_ranks(trained_without_kernels, 3, env={**NCCL, "FAKE_CUDA_KERNELS": "foreign"}, timeout=35)


def refused_on_the_ring() -> None:
    start()
    with pytest.raises(pydist.InvalidUsage, match=r"on the ring needs .*error 209"):
        pydist.DataParallel(nn.Linear(4, 2).to("cuda"), bucket_cap_mb=1)
    pydist.shutdown()


@pytest.mark.skipif(gpu_ranks.IS_REAL, reason="no GPU is unknown to a build for this machine")
def test_no_model_is_wrapped_whose_gradients_need_kernels_that_are_not_there() -> None:
    env = {**NCCL, "FAKE_CUDA_KERNELS": "foreign", "PYDIST_ALGORITHM": "ring"}
    run_ranks(refused_on_the_ring, 2, env=env, timeout=35)


def death() -> float:
    rank, _ = start()
    tensor = torch.ones(1000, device="cuda")
    pydist.all_reduce(tensor)
    torch.cuda.synchronize() if gpu_ranks.IS_REAL else None
    if rank == 1:
        os._exit(9)
    began = time.monotonic()
    with pytest.raises(pydist.PeerLost, match="rank 1 "):
        pydist.all_reduce(tensor, async_op=True).wait(timeout=20.0)
    with pytest.raises(pydist.PeerLost):
        pydist.all_reduce(tensor)
    return time.monotonic() - began


def death_on_another_host() -> float:
    os.environ["PYDIST_HOST_ID"] = f"host {os.environ['RANK']}"
    return death()


# NCCL's fake notices no death, so it is the group on the host that names the dead: with four ranks
# on gloo, one of them from a rank that is no neighbour.
@pytest.mark.parametrize(("body", "size"), [(death, 2), (death_on_another_host, 4)])
def test_a_rank_that_dies_ends_the_others(body: Callable[[], float], size: int) -> None:
    first, second, *others = rank_outcomes(body, size, env=NCCL, timeout=60)
    assert second.exit_code == 9
    for each in (first, *others):
        assert each.ok, each.describe()
        assert each.value < 10, "seconds until the others knew, beside 20 that the operation had"


def leaving() -> None:
    os.environ["PYDIST_HOST_ID"] = f"host {os.environ['RANK']}"
    rank, _ = start()
    tensor = torch.ones(1000, device="cuda")
    pydist.all_reduce(tensor)
    if rank == 1:
        pydist.shutdown()
        return
    with pytest.raises(pydist.PeerLost, match="rank 1 has left"):
        pydist.all_reduce(tensor, async_op=True).wait(timeout=20.0)


def test_a_rank_of_another_host_that_leaves_is_named() -> None:
    run_ranks(leaving, 2, env=NCCL, timeout=60)


def leaving_with_the_store() -> None:
    os.environ["PYDIST_HOST_ID"] = f"host {os.environ['RANK']}"
    gpu_ranks.install()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = ("127.0.0.1", int(os.environ["MASTER_PORT"]))
    meeting = dist.TCPStore(*address, is_master=False)
    if rank == 1:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        meeting.set("its store", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(meeting.get("its store")), is_master=False)
    dist.init_process_group("pydist", store=store, rank=rank, world_size=size)
    joined()
    tensor = torch.ones(1000, device="cuda")
    pydist.all_reduce(tensor)
    if rank == 1:
        pydist.shutdown()
        dist.destroy_process_group()
        os._exit(0)
    with pytest.raises(pydist.PeerLost, match="rank 1 has left"):
        pydist.all_reduce(tensor, async_op=True).wait(timeout=20.0)


def test_a_rank_that_leaves_with_the_store_has_not_died() -> None:
    first, second, third = rank_outcomes(leaving_with_the_store, 3, env=NCCL, timeout=35)
    assert second.exit_code == 0
    for each in (first, third):
        assert each.ok, each.describe()


def failing_and_leaving() -> None:
    os.environ["PYDIST_HOST_ID"] = f"host {os.environ['RANK']}"
    rank, _ = start()
    tensor = torch.ones(1000, device="cuda")
    pydist.all_reduce(tensor)
    if rank == 1:
        pydist.job.groups.communicator_of().abort("enough")
        pydist.shutdown()
        return
    with pytest.raises(pydist.Error, match="enough"):
        pydist.all_reduce(tensor, async_op=True).wait(timeout=20.0)


def test_a_rank_that_fails_and_leaves_gives_its_reason() -> None:
    run_ranks(failing_and_leaving, 2, env=NCCL, timeout=60)


def ending_first() -> None:
    rank, size = start()
    group = pydist.new_group(range(size))
    mine = torch.ones(1000, device="cuda")
    pydist.all_reduce(mine, group=group)
    groups = [group]
    del group
    if rank == 0:
        groups.clear()  # NCCL waits until the neighbours do the same
    pydist.barrier()
    groups.clear()
    pydist.barrier()
    pydist.all_reduce(mine)
    assert bool((mine == size * size).all())
    pydist.shutdown()


def test_a_rank_ends_a_group_before_its_neighbours() -> None:
    run_ranks(ending_first, 2, env=NCCL)


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
