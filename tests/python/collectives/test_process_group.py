"""torch.distributed and what is built on it, running on backend "pydist"."""

import copy
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import Ranks, run_command
from thorough import everyday
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import pydist
from pydist import _native

pytestmark = pytest.mark.timeout(60)

LIMIT_S = 45.0
Runner = Callable[..., list[Any]]


@pytest.fixture(scope="module", params=everyday("native", thorough=("gloo",)))
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=everyday(3, thorough=(1, 2)))
def ranks(request: pytest.FixtureRequest, backend: str) -> Iterator[Ranks]:
    with Ranks(request.param, {"PYDIST_BACKEND": backend}) as ranks:
        yield ranks


@pytest.fixture
def run(ranks: Ranks) -> Runner:
    return lambda function, *args: ranks.run(function, *args, timeout=LIMIT_S)


@pytest.fixture
def run_two(backend: str) -> Iterator[Runner]:
    """For tests that leave the group broken."""
    with Ranks(2, {"PYDIST_BACKEND": backend}) as ranks:
        yield lambda function, *args: ranks.run(function, *args, timeout=LIMIT_S)


def join(timeout_s: float = 20.0) -> tuple[int, int]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if not dist.is_initialized():
        dist.init_process_group("pydist", timeout=timedelta(seconds=timeout_s))
    return dist.get_rank(), dist.get_world_size()


def bridge() -> _native.ProcessGroup:
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert isinstance(backend, _native.ProcessGroup)
    return backend


# --- every collective of torch.distributed -----------------------------------------------------


def collectives() -> None:
    rank, size = join()
    ranks = range(size)
    total = sum(r + 1.0 for r in ranks)

    tensor = torch.full((5,), rank + 1.0)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [total] * 5
    tensor.fill_(rank + 1.0)
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    assert tensor.tolist() == [total / size] * 5
    for op, expected in [
        (dist.ReduceOp.MAX, float(size)),
        (dist.ReduceOp.MIN, 1.0),
        (dist.ReduceOp.PRODUCT, float(torch.tensor([r + 1.0 for r in ranks]).prod())),
    ]:
        tensor.fill_(rank + 1.0)
        dist.all_reduce(tensor, op)
        assert tensor.tolist() == [expected] * 5
    bits = torch.tensor([1 << rank])
    dist.all_reduce(bits, dist.ReduceOp.BOR)
    assert bits.item() == (1 << size) - 1
    for factor in (0.5, torch.tensor([0.5])):
        tensor.fill_(rank + 1.0)
        dist.all_reduce(tensor, dist._make_nccl_premul_sum(factor))
        assert tensor.tolist() == [total / 2] * 5

    tensor.fill_(rank)
    dist.broadcast(tensor, src=size - 1)
    assert tensor.tolist() == [size - 1] * 5
    tensor.fill_(rank + 1.0)
    dist.reduce(tensor, dst=0)
    assert tensor.tolist() == [total if rank == 0 else rank + 1.0] * 5

    blocks = [torch.empty(2) for _ in ranks]
    dist.all_gather(blocks, torch.full((2,), float(rank)))
    assert [block.tolist() for block in blocks] == [[r, r] for r in ranks]
    ragged = [torch.empty(r) for r in ranks]
    dist.all_gather(ragged, torch.full((rank,), float(rank)))
    assert [block.tolist() for block in ragged] == [[float(r)] * r for r in ranks]
    flat = torch.empty(2 * size)
    dist.all_gather_into_tensor(flat, torch.full((2,), float(rank)))
    assert flat.tolist() == [float(r) for r in ranks for _ in range(2)]

    gathered = [torch.empty(3) for _ in ranks] if rank == 0 else None
    dist.gather(torch.full((3,), float(rank)), gathered, dst=0)
    if gathered is not None:
        assert [block.tolist() for block in gathered] == [[r] * 3 for r in ranks]
    block = torch.empty(2)
    dist.scatter(block, [torch.full((2,), 10.0 + r) for r in ranks] if rank == 0 else None, src=0)
    assert block.tolist() == [10.0 + rank] * 2

    block = torch.empty(2)
    dist.reduce_scatter(block, [torch.full((2,), r + float(rank)) for r in ranks])
    assert block.tolist() == [rank * size + sum(ranks)] * 2
    dist.reduce_scatter_tensor(block, torch.arange(2.0 * size))
    assert block.tolist() == [size * 2.0 * rank, size * (2.0 * rank + 1)]

    flat = torch.empty(size)
    dist.all_to_all_single(flat, torch.arange(size) + 10.0 * rank)
    assert flat.tolist() == [10.0 * r + rank for r in ranks]
    splits = [r + 1 for r in ranks]
    received = torch.empty(size * (rank + 1), 2)
    dist.all_to_all_single(
        received, torch.full((sum(splits), 2), float(rank)), [rank + 1] * size, splits
    )
    assert received[:, 0].tolist() == [float(r) for r in ranks for _ in range(rank + 1)]
    blocks = [torch.empty(r + 1) for r in ranks]
    dist.all_to_all(blocks, [torch.full((rank + 1,), float(rank)) for _ in ranks])
    assert [block.tolist() for block in blocks] == [[float(r)] * (r + 1) for r in ranks]
    dist.barrier()


def test_collectives(run: Runner) -> None:
    run(collectives)


INTEGERS = [
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]


def average_as_nccl(values: list[int], dtype: torch.dtype) -> int:
    """The sum, with the overflow of the type, divided by the count; the fraction is dropped."""
    bits = 8 * dtype.itemsize
    total = sum(values) % 2**bits
    if dtype.is_signed and total >= 2 ** (bits - 1):
        total -= 2**bits
    quotient = abs(total) // len(values)
    return quotient if total >= 0 else -quotient


def integer_averages() -> None:
    rank, size = join()
    for dtype in INTEGERS:
        low = -5 if dtype.is_signed else 0
        limits = torch.iinfo(dtype)
        columns = [
            [low - 2 * r if dtype.is_signed else 3 * r for r in range(size)],
            [r + 1 for r in range(size)],
            [limits.max - r for r in range(size)],  # overflows with two ranks and more
            [limits.min + r for r in range(size)],
        ]
        expected = [average_as_nccl(column, dtype) for column in columns]
        mine = torch.tensor([column[rank] for column in columns], dtype=dtype)

        tensor = mine.clone()
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        assert tensor.tolist() == expected, dtype
        tensor = mine.clone()
        work = dist.all_reduce(tensor, dist.ReduceOp.AVG, async_op=True)
        work.wait()
        assert tensor.tolist() == expected
        strided = torch.zeros(8, dtype=dtype)
        strided[::2] = mine
        dist.all_reduce(strided[::2], dist.ReduceOp.AVG)
        assert strided[::2].tolist() == expected
        assert strided[1::2].tolist() == [0] * 4
        tensor = mine.clone()
        dist.reduce(tensor, dst=size - 1, op=dist.ReduceOp.AVG)
        assert tensor.tolist() == (expected if rank == size - 1 else mine.tolist())
        block = torch.empty(4, dtype=dtype)
        whole = torch.cat([mine] * size)
        dist.reduce_scatter_tensor(block, whole, dist.ReduceOp.AVG)
        assert block.tolist() == expected
        dist.reduce_scatter(block, [mine] * size, dist.ReduceOp.AVG)
        assert block.tolist() == expected
    count = torch.tensor(7 + rank)
    mean = torch.tensor(7.0 + rank)
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in (count, mean):
            dist.all_reduce(tensor, dist.ReduceOp.AVG)
    manager.wait()
    assert count.item() == (7 * size + sum(range(size))) // size
    assert mean.item() == pytest.approx(7 + (size - 1) / 2)
    empty = torch.empty(0, dtype=torch.int64)
    dist.all_reduce(empty, dist.ReduceOp.AVG)

    with pytest.raises(pydist.InvalidUsage, match="'mean' is not defined for bool"):
        dist.all_reduce(torch.tensor([True]), dist.ReduceOp.AVG)
    # Our own function names its operator: no fraction is lost by accident.
    with pytest.raises(pydist.InvalidUsage, match="'mean' is not defined for int64"):
        pydist.all_reduce(torch.tensor([7]), "mean", group=dist.group.WORLD)


def test_averages_of_integers_are_those_of_nccl(run: Runner) -> None:
    run(integer_averages)


def moved_types() -> None:
    rank, size = join()
    for dtype in [
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.bfloat16,
        torch.int16,
        torch.uint16,
        torch.uint64,
        torch.bool,
        torch.complex32,
        torch.complex128,
    ]:
        block = torch.tensor([rank % 2, 1]).to(dtype)
        blocks = [torch.empty_like(block) for _ in range(size)]
        dist.all_gather(blocks, block)
        for source, got in enumerate(blocks):
            expected = torch.tensor([source % 2, 1]).to(dtype)
            assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8)), dtype
    with pytest.raises(pydist.InvalidUsage, match="Float8_e4m3fn"):
        dist.all_reduce(torch.zeros(2, dtype=torch.float8_e4m3fn))
    with pytest.raises(pydist.InvalidUsage, match="meta"):
        dist.group.WORLD._get_backend(torch.device("cpu")).allreduce(
            [torch.empty(1, device="meta")]
        )


def test_types_without_arithmetic_are_moved(run: Runner) -> None:
    run(moved_types)


def awkward_tensors() -> None:
    rank, size = join()
    matrix = torch.arange(12.0).reshape(3, 4)
    expected = matrix.t() * size
    tensor = matrix.clone().t()
    dist.all_reduce(tensor)
    assert torch.equal(tensor, expected)
    tensor = matrix.clone().t()
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    assert torch.equal(tensor, expected)
    strided = torch.zeros(10)
    dist.broadcast(strided[::2] if rank else torch.ones(5), src=0)
    assert strided.tolist() == ([1.0, 0.0] * 5 if rank else [0.0] * 10)
    conjugate = torch.tensor([1 + 2j, 3 - 1j]).conj()
    bridge().allreduce([conjugate], dist.AllreduceOptions()).wait()
    assert torch.equal(conjugate, torch.tensor([1 - 2j, 3 + 1j]) * size)
    leaf = torch.zeros(4, requires_grad=True)
    dist.all_reduce(leaf)
    channels_last = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
    dist.all_reduce(channels_last)
    assert torch.equal(channels_last, torch.full((2, 3, 4, 5), float(size)))
    empty = torch.empty(0, 3)
    dist.all_reduce(empty)
    scalar = torch.tensor(2.0)
    dist.all_reduce(scalar)
    assert scalar.item() == 2.0 * size
    parameter = nn.Parameter(torch.ones(3))
    dist.broadcast(parameter.data, src=0)
    assert dist.get_backend() == "pydist"


def test_awkward_tensors(run: Runner) -> None:
    run(awkward_tensors)


def sparse_sum() -> None:
    rank, size = join()
    indices = torch.tensor([[0, rank + 1, rank + 1]])
    values = torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])
    tensor = torch.sparse_coo_tensor(indices, values, (size + 1, 2), check_invariants=True)
    dist.all_reduce(tensor)
    expected = torch.full((size + 1, 2), 5.0)
    expected[0] = size
    assert torch.equal(tensor.to_dense(), expected)
    nothing = torch.sparse_coo_tensor(
        torch.empty(1, 0, dtype=torch.long), torch.empty(0), (4,), check_invariants=True
    )
    dist.all_reduce(nothing)
    assert torch.equal(nothing.to_dense(), torch.zeros(4))


def test_sparse_all_reduce(run: Runner) -> None:
    run(sparse_sum)


def disagreeing_sparse() -> str:
    rank, _ = join()
    tensor = torch.zeros(4 + rank).to_sparse()
    with pytest.raises(pydist.Mismatch) as caught:
        dist.all_reduce(tensor)
    return str(caught.value)


def test_sparse_shapes_must_agree(run_two: Runner) -> None:
    assert all("different shapes" in message for message in run_two(disagreeing_sparse))


def coalesced() -> None:
    rank, size = join()
    group = bridge()
    total = sum(range(size))
    mixed = [
        torch.full((3,), float(rank)),
        torch.full((2, 2), rank),
        torch.full((4,), float(rank)).bfloat16(),
        torch.empty(0),
    ]
    options = dist.AllreduceCoalescedOptions()
    group.allreduce_coalesced(mixed, options).wait()
    assert mixed[0].tolist() == [float(total)] * 3
    assert mixed[1].flatten().tolist() == [total] * 4
    assert mixed[2].tolist() == [float(total)] * 4

    with dist._coalescing_manager(async_ops=True) as manager:
        tensors = [torch.full((n,), float(rank)) for n in (1, 7)]
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    assert [tensor[0].item() for tensor in tensors] == [total, total]

    outputs = [torch.empty(size), torch.empty(2 * size)]
    with dist._coalescing_manager():
        dist.all_gather_into_tensor(outputs[0], torch.full((1,), float(rank)))
        dist.all_gather_into_tensor(outputs[1], torch.full((2,), float(rank)))
    assert outputs[0].tolist() == list(range(size))
    assert outputs[1].tolist() == [r for r in range(size) for _ in range(2)]


def test_coalesced(run: Runner) -> None:
    run(coalesced)


def point_to_point() -> None:
    rank, size = join()
    if size == 1:
        return
    right, left = (rank + 1) % size, (rank - 1) % size
    # Crossed: every rank sends first.
    received = torch.empty(4)
    works = [
        dist.isend(torch.full((4,), float(rank)), right, tag=7),
        dist.irecv(received, left, tag=7),
    ]
    for work in works:
        work.wait()
    assert received.tolist() == [left] * 4

    received = torch.empty(3, 2).t()
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.irecv, received, left),
            dist.P2POp(dist.isend, torch.full((2, 3), float(rank)), right),
        ]
    )
    for work in works:
        work.wait()
    assert torch.equal(received, torch.full((2, 3), float(left)))

    if rank == 0:
        sources = set()
        for _ in range(size - 1):
            message = torch.empty(1)
            source = dist.recv(message)
            assert message.item() == source
            sources.add(source)
        assert sources == set(range(1, size))
    else:
        dist.send(torch.tensor([float(rank)]), 0)


def test_point_to_point(run: Runner) -> None:
    run(point_to_point)


def objects() -> None:
    rank, size = join()
    mine = {"rank": rank, "payload": "x" * (10 ** (rank + 1))}
    everybody: list[Any] = [None] * size
    dist.all_gather_object(everybody, mine)
    assert [entry["rank"] for entry in everybody] == list(range(size))
    assert len(everybody[-1]["payload"]) == 10**size
    box = [mine if rank == 0 else None]
    dist.broadcast_object_list(box, src=0)
    assert box[0] == {"rank": 0, "payload": "x" * 10}
    gathered: list[Any] | None = [None] * size if rank == size - 1 else None
    dist.gather_object(rank, gathered, dst=size - 1)
    assert gathered is None or gathered == list(range(size))
    parcel: list[Any] = [None]
    dist.scatter_object_list(parcel, [f"for {r}" for r in range(size)] if rank == 0 else None)
    assert parcel == [f"for {rank}"]


def test_object_collectives(run: Runner) -> None:
    run(objects)


# --- groups ------------------------------------------------------------------------------------


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


EXIT_SCRIPT = """
import ctypes, sys, time
import numpy as np
import torch
import torch.distributed as dist
import pydist

dist.init_process_group("pydist")
rank = dist.get_rank()
if sys.argv[2] == "held to the end":
    # As torch 2.14 does: no destructor of the group ever runs.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(dist.group.WORLD._get_backend(torch.device("cpu"))))
if sys.argv[1] == "broadcast":
    tensor = torch.full((4,), float(rank))
    if rank == 2:
        time.sleep(1.5)
    dist.broadcast(tensor, 0)
    assert tensor.tolist() == [0.0] * 4
elif rank == 0:
    dist.all_reduce(torch.from_numpy(np.ones(200_000, np.float32)), async_op=True)
else:
    time.sleep(1.5)
# In one piece: the launcher's ranks do not buffer, and print() writes word by word.
sys.stdout.write(f"ended {rank}\\n")
"""


@pytest.mark.parametrize("life", everyday("ends with the script", thorough=("held to the end",)))
@pytest.mark.parametrize("what", ["broadcast", "work under way"])
def test_a_script_may_end_without_destroying_its_group(
    tmp_path: Path, what: str, life: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(EXIT_SCRIPT)
    command = [sys.executable, "-m", "pydist", "run", "-n", "3", str(script), what, life]
    done = run_command(command, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["ended 0", "ended 1", "ended 2"]


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


# --- what is built on it -----------------------------------------------------------------------


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def loss_of(net: nn.Module, batch: Tensor) -> Tensor:
    out: Tensor = net(batch)
    return out.square().mean()


def train(net: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    """Parameters after a few steps."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        loss_of(net, batch).backward()
        optimizer.step()
    return [parameter.detach() for parameter in net.parameters()]


def batches_of(rank: int, steps: int = 3) -> list[Tensor]:
    return [
        torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))
        for step in range(steps)
    ]


def whole_batches(size: int) -> list[Tensor]:
    return [torch.cat(parts) for parts in zip(*map(batches_of, range(size)), strict=True)]


def stock_ddp(kind: str) -> None:
    rank, size = join()
    reference = train(model(), whole_batches(size))
    net = DistributedDataParallel(model(), bucket_cap_mb=1)
    tolerance = 1e-5
    if kind == "allreduce_hook":
        net.register_comm_hook(None, default_hooks.allreduce_hook)
    elif kind == "fp16_hook":
        net.register_comm_hook(None, default_hooks.fp16_compress_hook)
        tolerance = 1e-2
    elif kind == "powersgd_hook":
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.1)
        net.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        tolerance = 1.0
    got = train(net, batches_of(rank))
    for ours, theirs in zip(got, reference, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", ["default", "allreduce_hook", "fp16_hook", "powersgd_hook"])
def test_stock_ddp(run: Runner, kind: str) -> None:
    run(stock_ddp, kind)


def ddp_sparse() -> None:
    _, size = join()
    torch.manual_seed(0)
    table = nn.Embedding(10, 3, sparse=True)
    reference = copy.deepcopy(table)
    net = DistributedDataParallel(table)
    net(torch.tensor([dist.get_rank(), 5])).sum().backward()
    for rank in range(size):
        (reference(torch.tensor([rank, 5])).sum() / size).backward()
    assert table.weight.grad is not None
    assert reference.weight.grad is not None
    torch.testing.assert_close(table.weight.grad.to_dense(), reference.weight.grad.to_dense())


def test_stock_ddp_with_sparse_gradients(run: Runner) -> None:
    run(ddp_sparse)


def fsdp() -> None:
    rank, size = join()
    reference = train(model(), whole_batches(size))
    net = model()
    mesh = init_device_mesh("cpu", (size,))
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    train(net, batches_of(rank))
    for parameter, theirs in zip(net.parameters(), reference, strict=True):
        assert isinstance(parameter, DTensor)
        torch.testing.assert_close(parameter.full_tensor(), theirs, rtol=1e-5, atol=1e-5)


def test_fsdp2(run: Runner) -> None:
    run(fsdp)


def dtensor() -> None:
    _, size = join()
    mesh = init_device_mesh("cpu", (size,))
    torch.manual_seed(3)
    left, right = torch.randn(7, 5), torch.randn(5, 6)
    sharded = distribute_tensor(left, mesh, [Shard(0)])
    product = sharded @ distribute_tensor(right, mesh, [Replicate()])
    torch.testing.assert_close(product.full_tensor(), left @ right)
    inner = distribute_tensor(left, mesh, [Shard(1)]) @ distribute_tensor(right, mesh, [Shard(0)])
    torch.testing.assert_close(inner.full_tensor(), left @ right)
    moved = product.redistribute(mesh, [Shard(1)])
    torch.testing.assert_close(moved.full_tensor(), left @ right)


def test_dtensor(run: Runner) -> None:
    run(dtensor)


def checkpointed(folder: str) -> None:
    _, size = join()
    mesh = init_device_mesh("cpu", (size,))
    torch.manual_seed(5)
    weight = torch.randn(9, 2)
    state = {"weight": distribute_tensor(weight, mesh, [Shard(0)]), "step": 3}
    dcp.save(state, checkpoint_id=folder)
    loaded = {"weight": distribute_tensor(torch.zeros(9, 2), mesh, [Shard(0)]), "step": 0}
    dcp.load(loaded, checkpoint_id=folder)
    assert torch.equal(loaded["weight"].full_tensor(), weight)
    assert loaded["step"] == 3


def test_distributed_checkpoint(run: Runner) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run(checkpointed, folder)


# --- works, futures and failures ---------------------------------------------------------------


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
def test_errors_are_typed_in_backward(run_two: Runner, backend: str, moment: str) -> None:
    # gloo has no word for the peers: it hangs up on them.
    error = "Aborted" if backend == "native" else "PeerLost"
    assert run_two(failing_backward, moment) == [error, "aborted"]


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
