"""Non-contiguous tensors, symmetric memory, numpy arrays."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

import pydist
from conformance.placement import LAYOUTS, Placed, place
from conformance.references import CHUNK_BYTES, COMPLEX, FLOATS, combined, values
from conformance.suite import Suite, check_bits, expect_refusal


def layouts(suite: Suite) -> None:
    """Every kind on non-contiguous tensors and views; the memory around them stays as it is."""
    rank, size = suite.rank, suite.size
    for layout, dtype in itertools.product(
        LAYOUTS, (torch.float32, torch.bfloat16, torch.complex64, torch.int8)
    ):
        count = 1 if layout == "scalar" else 6 * 131
        parts = suite.contributions(dtype, count, 3)
        total = combined("sum", parts)

        def placed(layout: str = layout, parts: Sequence[Tensor] = parts) -> Placed:
            return place(parts[rank], layout)

        with suite.case("all_reduce", layout, dtype, "in place"):
            mine = placed()
            pydist.all_reduce(mine.tensor)
            suite.check_reduced(mine.tensor, "all_reduce", "sum", parts)
            suite.same_everywhere(mine.tensor)
            mine.check_margin()
        with suite.case("all_reduce", layout, dtype, "out of place"):
            mine, out = placed(), place(torch.zeros_like(total), layout)
            pydist.all_reduce(mine.tensor, out=out.tensor)
            suite.check_reduced(out.tensor, "all_reduce", "sum", parts)
            out.check_margin()
            check_bits(mine.tensor, parts[rank], "the input")
        with suite.case("all_reduce", layout, dtype, "on one rank, dense on the others"):
            mine = place(parts[rank], layout if rank == size - 1 else "dense")
            pydist.all_reduce(mine.tensor)
            suite.check_reduced(mine.tensor, "all_reduce", "sum", parts)
            mine.check_margin()
        with suite.case("reduce", layout, dtype):
            mine = placed()
            pydist.reduce(mine.tensor, size - 1)
            if rank == size - 1:
                suite.check_reduced(mine.tensor, "reduce", "sum", parts)
            else:
                check_bits(mine.tensor, parts[rank], "the input")
            mine.check_margin()
        with suite.case("broadcast", layout, dtype):
            mine = placed()
            pydist.broadcast(mine.tensor, size - 1)
            check_bits(mine.tensor, parts[-1])
            mine.check_margin()
        with suite.case("all_gather", layout, dtype, "list"):
            mine = placed()
            targets = [place(torch.zeros_like(part), layout) for part in parts]
            pydist.all_gather(mine.tensor, out=[target.tensor for target in targets])
            for r, target in enumerate(targets):
                check_bits(target.tensor, parts[r], f"block {r}")
                target.check_margin()
        with suite.case("gather", layout, dtype, "list"):
            mine = placed()
            targets = [place(torch.zeros_like(part), layout) for part in parts]
            pydist.gather(mine.tensor, 0, out=[target.tensor for target in targets])
            for r, target in enumerate(targets):
                check_bits(target.tensor, parts[r] if rank == 0 else torch.zeros_like(parts[r]))
                target.check_margin()
        with suite.case("scatter", layout, dtype, "list"):
            blocks = [place(values(dtype, count, r, 11), layout) for r in range(size)]
            mine = place(torch.zeros_like(total), layout)
            pydist.scatter([block.tensor for block in blocks], 0, out=mine.tensor)
            check_bits(mine.tensor, values(dtype, count, rank, 11))
            mine.check_margin()
        with suite.case("all_to_all", layout, dtype, "list"):
            sent = [place(values(dtype, count, rank, 20 + r), layout) for r in range(size)]
            targets = [place(torch.zeros_like(total), layout) for _ in range(size)]
            pydist.all_to_all(
                [block.tensor for block in sent], out=[target.tensor for target in targets]
            )
            for r, target in enumerate(targets):
                check_bits(target.tensor, values(dtype, count, r, 20 + rank), f"block of {r}")
                target.check_margin()
        with suite.case("reduce_scatter", layout, dtype, "list"):
            sent = [place(values(dtype, count, rank, 20 + r), layout) for r in range(size)]
            out = place(torch.zeros_like(total), layout)
            pydist.reduce_scatter([block.tensor for block in sent], out=out.tensor)
            own = [values(dtype, count, r, 20 + rank) for r in range(size)]
            suite.check_reduced(out.tensor, "reduce_scatter", "sum", own)
            out.check_margin()
        if size > 1:
            with suite.case("send, recv", layout, dtype):
                mine, got = placed(), place(torch.zeros_like(total), layout)
                sending = pydist.send(mine.tensor, (rank + 1) % size, async_op=True)
                pydist.recv(got.tensor, (rank - 1) % size)
                sending.wait()
                check_bits(got.tensor, parts[rank - 1])
                got.check_margin()
    expanded_and_lazy_tensors(suite)


def expanded_and_lazy_tensors(suite: Suite) -> None:
    """Tensors whose elements share memory, or that are conjugated or negated lazily."""
    rank, size = suite.rank, suite.size
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        rows = [values(dtype, 37, r, 2) for r in range(size)]
        full = [row.expand(11, 37).flatten() for row in rows]
        with suite.case("all_reduce", "expanded input", dtype):
            out = torch.empty(11, 37, dtype=dtype)
            pydist.all_reduce(rows[rank].expand(11, 37), out=out)
            suite.check_reduced(out, "all_reduce", "sum", full)
        with suite.case("all_gather", "expanded input", dtype):
            out = pydist.all_gather(rows[rank].expand(11, 37).contiguous()).view(size, -1)
            blocks = [torch.empty(11, 37, dtype=dtype) for _ in range(size)]
            pydist.all_gather(rows[rank].expand(11, 37), out=blocks)
            for r in range(size):
                check_bits(blocks[r], full[r], f"block {r}")
                check_bits(out[r], full[r], f"block {r}, flat")
        with suite.case("broadcast", "expanded at the root", dtype):
            tensor = rows[0].expand(11, 37) if rank == 0 else torch.empty(11, 37, dtype=dtype)
            pydist.broadcast(tensor, 0)
            check_bits(tensor, full[0])
    with suite.case("all_reduce", "expanded output is refused"), expect_refusal():
        pydist.all_reduce(torch.zeros(37).expand(11, 37))
    for dtype in COMPLEX:
        parts = suite.contributions(dtype, 90, 6)
        with suite.case("all_reduce", "conjugated", dtype):
            memory = parts[rank].clone()
            lazy = memory.conj()
            assert lazy.is_conj()
            pydist.all_reduce(lazy)
            suite.check_reduced(
                lazy.resolve_conj(), "all_reduce", "sum", [p.conj().resolve_conj() for p in parts]
            )
        with suite.case("broadcast", "negated", dtype):
            pairs = parts[rank].clone()
            negated = pairs.conj().imag
            assert negated.is_neg()
            pydist.broadcast(negated, size - 1)
            check_bits(negated.resolve_neg(), parts[-1].conj().imag.resolve_neg().contiguous())
    with suite.case("all_reduce", "a leaf that requires a gradient"):
        leaf = torch.full((5, 2), float(rank)).t().requires_grad_()
        pydist.all_reduce(leaf)
        assert leaf.tolist() == [[float(sum(range(size)))] * 5] * 2
        assert leaf.grad_fn is None


def symmetric_empty(*shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Where the case's other tensors are."""
    return pydist.symmetric_empty(*shape, dtype=dtype, device=torch.get_default_device())


def symmetric_memory(suite: Suite) -> None:
    """symmetric_empty tensors and views of them, alike and different on the ranks."""
    rank, size = suite.rank, suite.size
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.complex64)
    for dtype, count in itertools.product(
        # gloo's is ordinary memory, which all other cases use.
        dtypes[:1] if suite.backend == "gloo" or suite.on_device else dtypes,
        (0, 1, size - 1, 1023, CHUNK_BYTES // 4 + 3, 3 * CHUNK_BYTES // 16 + 1),
    ):
        parts = suite.contributions(dtype, count, 8)
        block = max(1, count // size)
        wide = suite.contributions(dtype, block * size, 9)
        own = [part[rank * block : (rank + 1) * block] for part in wide]

        def filled(part: Tensor) -> Tensor:
            tensor = symmetric_empty(part.numel(), dtype=part.dtype)
            return tensor.copy_(part)

        for op in ("sum", "mean") if dtype in FLOATS else ("sum",):
            with suite.case("symmetric", "all_reduce", dtype, count, op):
                tensor = filled(parts[rank])
                pydist.all_reduce(tensor, op)
                suite.check_reduced(tensor, "all_reduce", op, parts)
                suite.same_everywhere(tensor)
        with suite.case("symmetric", "all_reduce", dtype, count, "out of place"):
            tensor, out = filled(parts[rank]), filled(parts[0])
            pydist.all_reduce(tensor, "sum", out=out)
            suite.check_reduced(out, "all_reduce", "sum", parts)
            check_bits(tensor, parts[rank], "the input")
        with suite.case("symmetric", "all_reduce", dtype, count, "on some ranks only"):
            memory = filled(parts[rank])
            tensor = memory if rank % 2 else parts[rank].clone()
            pydist.all_reduce(tensor)
            suite.check_reduced(tensor, "all_reduce", "sum", parts)
            suite.same_everywhere(tensor)
        with suite.case("symmetric", "all_reduce", dtype, count, "at other offsets"):
            memory = symmetric_empty(count + size + 1, dtype=dtype)
            view = memory[rank + 1 : rank + 1 + count].copy_(parts[rank])
            pydist.all_reduce(view)
            suite.check_reduced(view, "all_reduce", "sum", parts)
            suite.same_everywhere(view)
        with suite.case("symmetric", "all_reduce", dtype, count, "at one odd offset"):
            memory = symmetric_empty(count + 2, dtype=dtype).zero_()
            view = memory[1 : 1 + count].copy_(parts[rank])
            pydist.all_reduce(view)
            suite.check_reduced(view, "all_reduce", "sum", parts)
            check_bits(memory[:1], torch.zeros(1, dtype=dtype), "memory before")
            check_bits(memory[-1:], torch.zeros(1, dtype=dtype), "memory after")
        with suite.case("symmetric", "all_reduce", dtype, count, "input only"):
            out = torch.empty(count, dtype=dtype)
            pydist.all_reduce(filled(parts[rank]), out=out)
            suite.check_reduced(out, "all_reduce", "sum", parts)
        with suite.case("symmetric", "reduce_scatter", dtype, count):
            tensor = filled(wide[rank])
            result = pydist.reduce_scatter(tensor, out=tensor[rank * block : (rank + 1) * block])
            suite.check_reduced(result, "reduce_scatter", "sum", own)
        with suite.case("symmetric", "reduce_scatter", dtype, count, "out of place"):
            tensor = filled(wide[rank])
            result = pydist.reduce_scatter(tensor)
            suite.check_reduced(result, "reduce_scatter", "sum", own)
            check_bits(tensor, wide[rank], "the input")
        with suite.case("symmetric", "all_gather", dtype, count):
            whole = symmetric_empty(count * size, dtype=dtype)
            mine = whole[rank * count : (rank + 1) * count].copy_(parts[rank])
            pydist.all_gather(mine, out=whole)
            check_bits(whole, torch.cat(parts))
        with suite.case("symmetric", "broadcast", dtype, count):
            tensor = filled(parts[rank])
            pydist.broadcast(tensor, size - 1)
            check_bits(tensor, parts[-1])
        with suite.case("symmetric", "reduce", dtype, count):
            tensor = filled(parts[rank])
            pydist.reduce(tensor, size - 1)
            if rank == size - 1:
                suite.check_reduced(tensor, "reduce", "sum", parts)
            else:
                check_bits(tensor, parts[rank], "the input")
        with suite.case("symmetric", "gather and scatter", dtype, count):
            whole = symmetric_empty(count * size, dtype=dtype)
            mine = filled(parts[rank])
            pydist.gather(mine, 0, out=whole)
            if rank == 0:
                check_bits(whole, torch.cat(parts), "gathered")
            mine.zero_()
            pydist.scatter(whole, 0, out=mine)
            check_bits(mine, parts[rank], "scattered")
        with suite.case("symmetric", "all_to_all", dtype, count):
            tensor = filled(wide[rank])
            pydist.all_to_all(tensor, out=tensor)
            check_bits(tensor, torch.cat(own))
    with suite.case("symmetric", "memory is used again"):
        for _ in range(20):
            tensor = symmetric_empty(1 << 16).fill_(1.0)
            pydist.all_reduce(tensor)
            assert float(tensor.sum()) == size * (1 << 16)
            del tensor
    with suite.case("symmetric", "non-contiguous view"):
        memory = symmetric_empty(40, 30)
        memory.copy_(values(torch.float32, 1200, rank, 1).view(40, 30))
        pydist.all_reduce(memory.t())
        parts = suite.contributions(torch.float32, 1200, 1)
        turned = [part.view(40, 30).t().contiguous().flatten() for part in parts]
        suite.check_reduced(memory.t(), "all_reduce", "sum", turned)


def numpy_arrays(suite: Suite) -> None:
    """numpy arrays, in place and without a copy."""
    rank, size = suite.rank, suite.size
    for dtype in (np.float64, np.float32, np.float16, np.int8, np.uint32, np.bool_, np.complex64):
        with suite.case("numpy", "all_reduce", np.dtype(dtype).name):
            parts = [
                part.view(3, 67)
                for part in suite.contributions(torch.from_numpy(np.zeros(1, dtype)).dtype, 201)
            ]
            array = parts[rank].numpy().copy()
            address = array.ctypes.data
            assert pydist.all_reduce(array) is array
            assert array.ctypes.data == address
            suite.check_reduced(torch.from_numpy(array), "all_reduce", "sum", parts)
            suite.same_everywhere(torch.from_numpy(array))
        with suite.case("numpy", "strided", np.dtype(dtype).name):
            around = np.zeros((67, 6), dtype)
            view = around[:, ::2].T
            view[...] = parts[rank].numpy()
            pydist.all_reduce(view)
            suite.check_reduced(torch.from_numpy(view), "all_reduce", "sum", parts)
            assert not around[:, 1::2].any()
    array = np.arange(6, dtype=np.int32) + 100 * rank
    everything = np.concatenate([np.arange(6, dtype=np.int32) + 100 * r for r in range(size)])
    with suite.case("numpy", "all_gather"):
        made = pydist.all_gather(array)
        assert isinstance(made, np.ndarray)
        assert made.tolist() == everything.tolist()
        out = np.empty_like(everything)
        assert pydist.all_gather(array, out=out) is out
        assert out.tolist() == everything.tolist()
        blocks = [np.empty(6, np.int32) for _ in range(size)]
        pydist.all_gather(array, out=blocks)
        assert np.concatenate(blocks).tolist() == everything.tolist()
    with suite.case("numpy", "reduce_scatter"):
        block = pydist.reduce_scatter(np.arange(3.0 * size))
        assert isinstance(block, np.ndarray)
        assert block.tolist() == [size * (3.0 * rank + i) for i in range(3)]
    with suite.case("numpy", "broadcast, reduce, gather, scatter, all_to_all, send, recv"):
        assert pydist.broadcast(array.copy(), size - 1).tolist() == everything[-6:].tolist()
        reduced = pydist.reduce(array.copy(), size - 1, "max")
        assert (reduced is None) == (rank != size - 1)
        if reduced is not None:
            assert reduced.tolist() == everything[-6:].tolist()
        gathered = pydist.gather(array, 0)
        if gathered is not None:
            assert gathered.tolist() == everything.tolist()
        own = pydist.scatter(everything if rank == 0 else None, 0, out=np.empty(6, np.int32))
        assert own.tolist() == array.tolist()
        turned = pydist.all_to_all(np.arange(size) + 10 * rank)
        assert turned.tolist() == [10 * r + rank for r in range(size)]
        if size > 1:
            got = np.empty_like(array)
            sending = pydist.send(array, (rank + 1) % size, async_op=True)
            assert pydist.recv(got, (rank - 1) % size) == (rank - 1) % size
            sending.wait()
            assert got.tolist() == (np.arange(6) + 100 * ((rank - 1) % size)).tolist()
