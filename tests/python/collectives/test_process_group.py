"""torch.distributed and what is built on it, running on backend "pydist"."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch_groups import bridge, join

import pydist

pytestmark = pytest.mark.timeout(60)

Runner = Callable[..., list[Any]]


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
    ones = torch.ones(2, 3).to_sparse()
    dist.all_reduce(ones, dist._make_nccl_premul_sum(rank + 0.5))
    assert torch.equal(ones.to_dense(), torch.full((2, 3), sum(r + 0.5 for r in range(size))))
    with pytest.raises(pydist.InvalidUsage, match="has sum, mean and premul_sum, not 'max'"):
        dist.all_reduce(ones, dist.ReduceOp.MAX)


def test_sparse_all_reduce(run: Runner) -> None:
    run(sparse_sum)


def sparse_tensors_of_any_kind() -> None:
    """Beside the sum of dense tensors, in the order of the ranks."""
    rank, size = join()
    for seed in range(60):
        kind = torch.Generator().manual_seed(seed)  # alike on all ranks
        dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64)
        dtype = dtypes[seed % len(dtypes)]
        sparse_dim = int(torch.randint(1, 4, (), generator=kind))
        dense_dim = int(torch.randint(0, 3, (), generator=kind))
        shape = torch.randint(1, 6, (sparse_dim + dense_dim,), generator=kind).tolist()
        if seed % 7 == 6 and dense_dim:
            shape[-1] = 0
        dense = []
        for peer in range(size):
            own = torch.Generator().manual_seed(1000 * seed + peer)
            rows = int(torch.randint(0, 12, (), generator=own))  # with repetitions
            indices = torch.stack(
                [torch.randint(0, extent, (rows,), generator=own) for extent in shape[:sparse_dim]]
            )
            values = torch.randint(-8, 9, (rows, *shape[sparse_dim:]), generator=own).to(dtype)
            tensor = torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)
            dense.append(tensor.to_dense())
            if peer == rank:
                mine = tensor
        is_mean = dtype.is_floating_point and seed % 3 == 0
        if seed % 4 == 1:  # unsorted, and said to be coalesced
            mine = mine.coalesce()
            turned = mine.indices().flip(1), mine.values().flip(0)
            mine = torch.sparse_coo_tensor(
                *turned, shape, is_coalesced=True, check_invariants=False
            )
        dist.all_reduce(mine, dist.ReduceOp.AVG if is_mean else dist.ReduceOp.SUM)
        assert mine.is_coalesced()
        found = mine.indices()
        if found.shape[1] > 1:  # in the order of a dense tensor's elements
            weights = torch.tensor([7 ** (sparse_dim - 1 - d) for d in range(sparse_dim)])
            assert (found * weights[:, None]).sum(0).diff().gt(0).all()
        exact = torch.double if dtype.is_floating_point else dtype
        expected = torch.stack(dense).to(exact).sum(0)
        if is_mean:
            expected /= size
        torch.testing.assert_close(mine.to_dense(), expected.to(dtype), msg=f"{seed} {shape}")


def test_sparse_tensors_of_any_kind(run: Runner) -> None:
    run(sparse_tensors_of_any_kind)


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


def refused_in_a_block() -> None:
    rank, size = join()
    if size == 1:
        return
    right, left = (rank + 1) % size, (rank - 1) % size
    group = bridge()
    refused = torch.full((3,), -1.0)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.BAND
    group._start_coalescing()
    works = [group.recv([refused], left, 3), group.allreduce([torch.ones(2)], options)]
    with pytest.raises(pydist.InvalidUsage, match="'band' is not defined for float32"):
        group._end_coalescing()
    for work in works:
        with pytest.raises(pydist.InvalidUsage, match="'band' is not defined for float32"):
            work.wait()
    # The receive of the block did not start, so the message is for this one.
    received = torch.empty(3)
    for work in [
        dist.isend(torch.full((3,), float(rank)), right, tag=3),
        dist.irecv(received, left, tag=3),
    ]:
        work.wait()
    assert received.tolist() == [left] * 3
    dist.barrier()
    assert refused.tolist() == [-1.0] * 3


def test_where_one_operation_of_a_block_is_refused_none_starts(run: Runner) -> None:
    run(refused_in_a_block)


def sources_in_a_block() -> None:
    rank, size = join()
    if size == 1:
        return
    right, left = (rank + 1) % size, (rank - 1) % size
    group = bridge()
    received, total = torch.empty(2), torch.ones(2)
    group._start_coalescing()
    receive = group.recv_anysource([received], 4)
    works = [
        group.send([torch.full((2,), float(rank))], right, 4),
        receive,
        group.allreduce([total], dist.AllreduceOptions()),
    ]
    works.append(group._end_coalescing())
    for work in works:
        work.wait()
    assert receive._source_rank() == left
    assert received.tolist() == [left] * 2
    assert total.tolist() == [size] * 2


def test_a_block_of_messages_and_collectives(run: Runner) -> None:
    run(sources_in_a_block)


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
