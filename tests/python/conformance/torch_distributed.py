"""The same engine through torch.distributed on backend "pydist"."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import pydist
from conformance.collectives import split_evenly
from conformance.placement import LAYOUTS, place
from conformance.references import (
    CHUNK_BYTES,
    COMPLEX,
    DTYPES,
    FLOAT8,
    INTEGERS,
    OPS,
    factor_of,
    is_defined,
    values,
)
from conformance.suite import Suite, check_bits, expect_refusal

_TORCH_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.AVG,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "prod": dist.ReduceOp.PRODUCT,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}


UNDIVIDED = (torch.uint16, torch.uint32, torch.uint64)


def torch_op(suite: Suite, op: str) -> Any:
    if op == "premul_sum":
        return dist._make_nccl_premul_sum(factor_of(suite.rank))
    return _TORCH_OPS[op]


def nccls_mean(parts: list[torch.Tensor]) -> torch.Tensor:
    """The sum in the dtype, with its overflow, divided by the number of ranks towards zero."""
    arrays = [part.cpu().numpy() for part in parts]
    total = np.add.reduce(arrays, dtype=arrays[0].dtype)
    quotients = [math.trunc(Fraction(int(value), len(parts))) for value in total.flat]
    mean = torch.from_numpy(np.array(quotients, dtype=total.dtype).reshape(total.shape))
    return mean.to(parts[0].device)


def torch_collectives(suite: Suite) -> None:
    """The same engine through torch.distributed on backend "pydist"."""
    rank, size = suite.rank, suite.size
    assert dist.get_backend() == "pydist"
    for dtype, op in itertools.product(DTYPES, OPS):
        if dtype in COMPLEX and op not in ("sum", "mean", "premul_sum"):
            continue  # torch itself refuses these, whatever the backend
        with suite.case("torch", "all_reduce", dtype, op):
            parts = suite.contributions(dtype, 65, 5, op=op)
            tensor = parts[rank].clone()
            # torch can't divide the other unsigned integers on a device.
            is_divided = tensor.device.type == "cpu" or dtype not in UNDIVIDED
            if op == "mean" and dtype in INTEGERS and is_divided:
                dist.all_reduce(tensor, torch_op(suite, op))
                check_bits(tensor, nccls_mean(parts))
            elif is_defined(op, dtype):
                dist.all_reduce(tensor, torch_op(suite, op))
                suite.check_reduced(tensor, "all_reduce", op, parts)
                suite.same_everywhere(tensor)
            else:
                with expect_refusal():
                    dist.all_reduce(tensor, torch_op(suite, op))
    for dtype, count in itertools.product(
        (torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn),
        (0, 1, 1023, CHUNK_BYTES // 8 + 1),
    ):
        parts = suite.contributions(dtype, count, 6)
        wide = suite.contributions(dtype, count * size, 7) if count < 5000 else []
        own = [part[rank * count : (rank + 1) * count] for part in wide]
        blank = torch.empty(count, dtype=dtype)
        with suite.case("torch", "all_gather_into_tensor", dtype, count):
            flat = torch.empty(count * size, dtype=dtype)
            dist.all_gather_into_tensor(flat, parts[rank])
            check_bits(flat, torch.cat(parts))
        with suite.case("torch", "all_gather", dtype, count):
            blocks = [torch.empty_like(blank) for _ in range(size)]
            dist.all_gather(blocks, parts[rank])
            check_bits(torch.cat(blocks), torch.cat(parts))
        with suite.case("torch", "broadcast", dtype, count):
            tensor = parts[rank].clone()
            dist.broadcast(tensor, size - 1)
            check_bits(tensor, parts[-1])
        with suite.case("torch", "gather", dtype, count):
            blocks = [torch.empty_like(blank) for _ in range(size)]
            dist.gather(parts[rank], blocks if rank == size - 1 else None, dst=size - 1)
            if rank == size - 1:
                check_bits(torch.cat(blocks), torch.cat(parts))
        with suite.case("torch", "scatter", dtype, count):
            tensor = torch.empty_like(blank)
            dist.scatter(tensor, parts if rank == size - 1 else None, src=size - 1)
            check_bits(tensor, parts[rank])
        if not wide:
            continue
        with suite.case("torch", "all_to_all_single", dtype, count):
            flat = torch.empty(count * size, dtype=dtype)
            dist.all_to_all_single(flat, wide[rank])
            check_bits(flat, torch.cat(own))
        with suite.case("torch", "all_to_all", dtype, count):
            blocks = [torch.empty_like(blank) for _ in range(size)]
            dist.all_to_all(blocks, [b.clone() for b in split_evenly(wide[rank], size)])
            check_bits(torch.cat(blocks), torch.cat(own))
        if dtype in FLOAT8:
            continue
        with suite.case("torch", "reduce_scatter_tensor", dtype, count):
            tensor = torch.empty_like(blank)
            dist.reduce_scatter_tensor(tensor, wide[rank])
            suite.check_reduced(tensor, "reduce_scatter", "sum", own)
        with suite.case("torch", "reduce_scatter", dtype, count):
            tensor = torch.empty_like(blank)
            dist.reduce_scatter(tensor, split_evenly(wide[rank], size))
            suite.check_reduced(tensor, "reduce_scatter", "sum", own)
        with suite.case("torch", "reduce", dtype, count):
            tensor = parts[rank].clone()
            dist.reduce(tensor, size - 1)
            if rank == size - 1:
                suite.check_reduced(tensor, "reduce", "sum", parts)
            else:
                check_bits(tensor, parts[rank], "the input")
    torch_layouts(suite)
    torch_coalesced(suite)
    torch_groups(suite)


def torch_layouts(suite: Suite) -> None:
    """Non-contiguous tensors and uneven splits through torch.distributed."""
    rank, size = suite.rank, suite.size
    for layout in LAYOUTS:
        count = 1 if layout == "scalar" else 60
        parts = suite.contributions(torch.float32, count, 12)
        with suite.case("torch", "layouts", layout):
            mine = place(parts[rank], layout)
            dist.all_reduce(mine.tensor)
            suite.check_reduced(mine.tensor, "all_reduce", "sum", parts)
            mine.check_margin()
        with suite.case("torch", "layouts", layout, "asynchronous"):
            mine = place(parts[rank], layout)
            work = dist.all_reduce(mine.tensor, async_op=True)
            assert work is not None
            work.wait()
            suite.check_reduced(mine.tensor, "all_reduce", "sum", parts)
            mine.check_margin()
    with suite.case("torch", "all_to_all_single", "uneven"):
        sizes = list(range(size))
        whole = values(torch.float32, 2 * sum(sizes), rank, 13).view(-1, 2)
        target = torch.empty(size * rank, 2)
        dist.all_to_all_single(target, whole, [rank] * size, sizes)
        start = sum(range(rank))
        expected = [
            values(torch.float32, 2 * sum(sizes), r, 13).view(-1, 2)[start : start + rank]
            for r in range(size)
        ]
        check_bits(target, torch.cat(expected))


def torch_coalesced(suite: Suite) -> None:
    """Coalesced forms: several collectives, or several messages, in one."""
    rank, size = suite.rank, suite.size
    parts = [suite.contributions(torch.float32, n, n) for n in (1, 0, 70, 4001)]
    with suite.case("torch", "all_reduce_coalesced"):
        tensors = [some[rank].clone() for some in parts]
        dist.all_reduce_coalesced(tensors)
        for tensor, some in zip(tensors, parts, strict=True):
            suite.check_reduced(tensor, "all_reduce", "sum", some)
    with suite.case("torch", "all_reduce_coalesced", "asynchronous"):
        tensors = [some[rank].clone() for some in parts]
        work = dist.all_reduce_coalesced(tensors, async_op=True)
        work.wait()
        for tensor, some in zip(tensors, parts, strict=True):
            suite.check_reduced(tensor, "all_reduce", "sum", some)
    with suite.case("torch", "all_gather_coalesced"):
        lists = [[torch.empty_like(some[0]) for some in parts] for _ in range(size)]
        dist.all_gather_coalesced(lists, [some[rank] for some in parts])
        for r in range(size):
            for got, some in zip(lists[r], parts, strict=True):
                check_bits(got, some[r])
    with suite.case("torch", "a coalescing block"):
        device = torch.device("cpu")
        a, b = parts[2][rank].clone(), parts[3][rank].clone()
        with dist._coalescing_manager(device=device, async_ops=True) as manager:
            dist.all_reduce(a)
            dist.all_reduce(b)
        manager.wait()
        suite.check_reduced(a, "all_reduce", "sum", parts[2])
        suite.check_reduced(b, "all_reduce", "sum", parts[3])
        with dist._coalescing_manager(device=device):
            flats = [torch.empty(some[0].numel() * size) for some in parts[2:]]
            for flat, some in zip(flats, parts[2:], strict=True):
                dist.all_gather_into_tensor(flat, some[rank])
        for flat, some in zip(flats, parts[2:], strict=True):
            check_bits(flat, torch.cat(some))
    if size == 1:
        return
    following, previous = (rank + 1) % size, (rank - 1) % size
    with suite.case("torch", "batch_isend_irecv"):
        got = [torch.empty_like(some[0]) for some in parts]
        operations = [
            *(dist.P2POp(dist.isend, some[rank], following, tag=i) for i, some in enumerate(parts)),
            *(dist.P2POp(dist.irecv, tensor, previous, tag=i) for i, tensor in enumerate(got)),
        ]
        for request in dist.batch_isend_irecv(operations):
            request.wait()
        for tensor, some in zip(got, parts, strict=True):
            check_bits(tensor, some[previous])
    with suite.case("torch", "send, recv, any source"):
        one = torch.empty(2)
        request = dist.isend(torch.full((2,), float(rank)), following, tag=4)
        assert request is not None
        assert dist.recv(one, previous, tag=4) == previous
        request.wait()
        assert one.tolist() == [float(previous)] * 2
        if rank == 0:
            sources = {dist.recv(one, tag=5) for _ in range(size - 1)}
            assert sources == set(range(1, size))
        else:
            dist.send(torch.ones(2), 0, tag=5)


def torch_groups(suite: Suite) -> None:
    """Groups of torch.distributed, made in one order and used in another."""
    rank, size = suite.rank, suite.size
    if size < 2:
        return
    lists = [[0, size - 1], list(range(1, size)), list(range(0, size, 2))]
    made = [(sorted(set(ranks)), dist.new_group(ranks)) for ranks in lists]
    for members, group in reversed(made):
        if rank not in members:
            continue
        with suite.case("torch", "new_group", members):
            tensor = torch.full((77,), float(rank))
            dist.all_reduce(tensor, group=group)
            assert tensor.tolist() == [float(sum(members))] * 77
            dist.broadcast(tensor.fill_(rank), src=members[-1], group=group)
            assert tensor.tolist() == [float(members[-1])] * 77
            # A group of torch's is a group of ours.
            ours = pydist.all_reduce(torch.ones(3), group=group)
            assert ours.tolist() == [float(len(members))] * 3
    for members, group in made:
        if rank in members:
            dist.destroy_process_group(group)
    pydist.barrier()
