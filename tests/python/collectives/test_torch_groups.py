"""Groups of torch on the engine: how they are made, used again, destroyed, and fail."""

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import Ranks
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch_groups import bridge, join, loss_of, model

import pydist
from pydist import _native

pytestmark = pytest.mark.timeout(60)

LIMIT_S = 45.0

Runner = Callable[..., list[Any]]


def groups() -> None:
    rank, size = join()
    for members in [[0], list(range(size)), list(range(size))[::-1], [size - 1]]:
        group = dist.new_group(members)
        if rank in members:
            tensor = torch.ones(3)
            dist.all_reduce(tensor, group=group)
            assert tensor.tolist() == [len(members)] * 3
    many = [dist.new_group(list(range(size))) for _ in range(4)]
    works = []
    tensors = [torch.full((2,), float(i)) for i in range(4)]
    order = range(4) if rank % 2 == 0 else reversed(range(4))
    for i in order:
        works.append(dist.all_reduce(tensors[i], group=many[i], async_op=True))
    for work in works:
        work.wait()
    assert [tensor[0].item() for tensor in tensors] == [float(i * size) for i in range(4)]
    for group in many:
        dist.destroy_process_group(group)
    dist.destroy_process_group()
    assert not dist.is_initialized()


def test_groups_in_any_order(run: Runner) -> None:
    run(groups)


def late_for_one_barrier() -> list[str]:
    rank, _ = join(timeout_s=3.0)
    seen = []
    if rank == 1:
        time.sleep(0.8)
    for _ in range(2):
        try:
            bridge().monitored_barrier(0.3)
            seen.append("met")
        except pydist.Timeout:
            seen.append("late")
        dist.barrier()
    # Nothing of the first one is left that could fail the group later.
    time.sleep(4.0)
    dist.barrier()
    return seen


def test_monitored_barrier_goes_on_after_a_late_rank(run_two: Runner) -> None:
    assert run_two(late_for_one_barrier) == [["late", "met"]] * 2


def again_on_one_store() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
    )
    for turn in range(3):
        dist.init_process_group("pydist", store=store, rank=rank, world_size=size)
        tensor = torch.full((3,), float(turn))
        dist.all_reduce(tensor)
        assert tensor.tolist() == [turn * size] * 3
        group = dist.new_group(list(range(size)))
        dist.barrier(group)
        dist.destroy_process_group()


def test_joining_again_on_one_store(run: Runner) -> None:
    run(again_on_one_store)


def detail() -> None:
    _, size = join()
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [size] * 2
    dist.barrier()


def test_debug_detail(backend: str) -> None:
    env = {"PYDIST_BACKEND": backend, "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    with Ranks(2, env) as ranks:
        ranks.run(detail, timeout=LIMIT_S)


def works() -> None:
    rank, size = join()
    tensor = torch.ones(4)
    work = bridge().allreduce([tensor], dist.AllreduceOptions())
    assert work.wait()
    assert work.is_completed()
    assert work.is_success()
    assert work.result()[0] is tensor
    assert work.get_future().wait()[0] is tensor
    blocks = [torch.empty(2) for _ in range(size)]
    gathered = dist.all_gather(blocks, torch.full((2,), float(rank)), async_op=True)
    # A list of outputs for each input, as with torch's gloo.
    assert [block[0].item() for block in gathered.get_future().wait()[0]] == list(range(size))
    tensor = torch.ones(4)
    doubled = (
        dist.all_reduce(tensor, async_op=True)
        .get_future()
        .then(lambda future: future.value()[0] * 2)
        .wait()
    )
    assert doubled.tolist() == [2.0 * size] * 4

    # A callback that itself waits for a collective.
    def again(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        inner = future.value()[0].clone()
        dist.all_reduce(inner, async_op=True).get_future().wait()
        return inner

    first = dist.all_reduce(torch.ones(2), async_op=True).get_future().then(again).wait()
    assert first.tolist() == [float(size * size)] * 2
    # Handles that nobody keeps.
    tensors = [torch.ones(100) for _ in range(20)]
    for tensor in tensors:
        dist.all_reduce(tensor, async_op=True)
    dist.barrier()
    assert all(tensor[0].item() == size for tensor in tensors)
    bridge()._set_sequence_number_for_group()
    before = bridge()._get_sequence_number_for_group()
    dist.barrier()
    assert bridge()._get_sequence_number_for_group() == before + 1


def test_works_and_futures(run: Runner) -> None:
    run(works)


def late_peer() -> list[str]:
    rank, _ = join()
    options = dist.AllreduceOptions()
    options.timeout = timedelta(seconds=0.5)
    seen = []
    if rank == 0:
        for act in (
            lambda: bridge().allreduce([torch.ones(2)], options).wait(),
            lambda: dist.all_reduce(torch.ones(2)),
            lambda: dist.all_reduce(torch.ones(2), async_op=True).get_future().wait(),
        ):
            try:
                act()
            except pydist.Error as error:
                seen.append(type(error).__name__)
        assert bridge().communicator.failure is not None
    else:
        with pytest.raises(pydist.Error):
            dist.recv(torch.empty(1), 0)
    return seen


def test_errors_are_typed_in_torch(run_two: Runner) -> None:
    assert run_two(late_peer)[0] == ["Timeout"] * 3


def failing_backward(moment: str) -> str:
    rank, _ = join()
    net = DistributedDataParallel(model())
    loss = loss_of(net, torch.ones(2, 8))
    if rank == 1:
        if moment == "under way":
            time.sleep(0.3)
        bridge().abort()
        return "aborted"
    if moment == "before":
        time.sleep(0.3)
    try:
        loss.backward()
    except RuntimeError as error:
        return type(error).__name__
    return "nothing"


@pytest.mark.parametrize("moment", ["before", "under way"])
def test_errors_are_typed_in_backward(run_two: Runner, moment: str) -> None:
    assert run_two(failing_backward, moment) == ["Aborted", "aborted"]


def monitored() -> str:
    rank, size = join()
    bridge().monitored_barrier(10.0)
    if rank == size - 1:
        dist.recv(torch.empty(1), 0)
        return ""
    try:
        bridge().monitored_barrier(0.5, wait_all_ranks=True)
    except pydist.Timeout as error:
        return str(error)
    finally:
        if rank == 0:
            dist.send(torch.ones(1), size - 1)
    return "nothing"


def test_monitored_barrier_names_the_late_rank(run_two: Runner) -> None:
    message = run_two(monitored)[0]
    assert "rank 1 did not come" in message


def crossing() -> None:
    join()
    store = dist.HashStore()
    communicator = _native.create_gloo(
        store, 0, 1, "alone", 5.0, lambda s, r, n, t: dist.ProcessGroupGloo(s, r, n, t)
    )
    group = _native.ProcessGroup(communicator, timedelta(seconds=3))
    assert isinstance(group, torch._C._distributed_c10d.Backend)
    assert group.communicator is communicator
    assert communicator.timeout == 3.0
    assert (group.rank(), group.size(), group.name()) == (0, 1, "pydist")
    outer = dist.ProcessGroup(store, 0, 1)
    outer._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    outer._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, group)
    del group
    tensor = torch.ones(3)
    outer.allreduce([tensor]).wait()
    assert tensor.tolist() == [1.0] * 3
    assert outer._get_backend(torch.device("cpu")).communicator is communicator


def test_c10d_objects_cross_the_modules() -> None:
    with Ranks(1) as ranks:
        ranks.run(crossing, timeout=LIMIT_S)
