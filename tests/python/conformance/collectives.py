"""The collectives over kinds, dtypes, ops, sizes and forms."""

from __future__ import annotations

import itertools
import random
from typing import Any

import torch
from torch import Tensor

import pydist
from conformance.references import (
    CHUNK_BYTES,
    DTYPES,
    OPS,
    REDUCED_DTYPES,
    factor_of,
    is_defined,
    values,
)
from conformance.suite import KINDS, REDUCING_KINDS, Suite, check_bits, expect_refusal


def options_of(suite: Suite, op: str) -> dict[str, Any]:
    return {"factor": factor_of(suite.rank)} if op == "premul_sum" else {}


def split_evenly(whole: Tensor, size: int) -> list[Tensor]:
    return list(whole.view(size, -1).unbind()) if whole.numel() else [whole] * size


def reducing_case(
    suite: Suite,
    kind: str,
    op: str,
    dtype: torch.dtype,
    count: int,
    *,
    in_place: bool,
    as_list: bool = False,
    salt: int = 0,
    root: int = 0,
) -> None:
    """One reduction of `count` elements (for reduce_scatter: to each rank), checked."""
    rank, size = suite.rank, suite.size
    more = options_of(suite, op)
    if kind == "reduce_scatter":
        parts = suite.contributions(dtype, count * size, salt, op=op)
        mine = parts[rank].clone()
        blocks = split_evenly(mine, size)
        own = [part[rank * count : (rank + 1) * count] for part in parts]
        given = [block.clone() for block in blocks] if as_list else mine
        if in_place:
            out = given[rank] if as_list else mine[rank * count : (rank + 1) * count]
            result = pydist.reduce_scatter(given, op, out=out, **more)
            assert result is out
        elif count % 2:
            result = pydist.reduce_scatter(given, op, **more)
        else:
            result = pydist.reduce_scatter(given, op, out=torch.empty(count, dtype=dtype), **more)
        suite.check_reduced(result, kind, op, own)
        if not in_place:
            left = torch.cat(given) if as_list else mine
            check_bits(left, parts[rank], "the input")
        return
    parts = suite.contributions(dtype, count, salt, op=op)
    mine = parts[rank].clone()
    if kind == "all_reduce":
        out = mine if in_place else torch.empty(count, dtype=dtype)
        result = pydist.all_reduce(mine, op, out=None if in_place else out, **more)
        assert result is out
        suite.check_reduced(result, kind, op, parts)
        suite.same_everywhere(result)
    else:
        out = mine if in_place else torch.empty(count, dtype=dtype)
        reduced = pydist.reduce(mine, root, op, out=None if in_place else out, **more)
        assert (reduced is None) == (rank != root)
        if reduced is not None:
            suite.check_reduced(reduced, kind, op, parts)
    if not in_place or (kind == "reduce" and rank != root):
        check_bits(mine, parts[rank], "the input")


def moving_case(
    suite: Suite,
    kind: str,
    dtype: torch.dtype,
    count: int,
    *,
    in_place: bool,
    as_list: bool = False,
    salt: int = 0,
    root: int = 0,
) -> None:
    """One collective that moves blocks of `count` elements, checked."""
    rank, size = suite.rank, suite.size
    empty = lambda n: torch.empty(n, dtype=dtype)  # noqa: E731
    if kind == "broadcast":
        parts = suite.contributions(dtype, count, salt)
        tensor = parts[rank].clone()
        assert pydist.broadcast(tensor, root) is tensor
        check_bits(tensor, parts[root])
    elif kind in ("all_gather", "gather"):
        parts = suite.contributions(dtype, count, salt)
        mine = parts[rank].clone()
        whole = empty(count * size)
        out: Any = whole
        if as_list:
            out = [empty(count) for _ in range(size)]
        if in_place:
            own = out[rank] if as_list else whole[rank * count : (rank + 1) * count]
            own.copy_(mine)
            mine = own
        if kind == "all_gather":
            made: Any = pydist.all_gather(mine, out=out)
            assert made is out
        else:
            made = pydist.gather(mine, root, out=out)
            assert made is (out if rank == root else None)
        if kind == "all_gather" or rank == root:
            check_bits(torch.cat(list(out)) if as_list else out, torch.cat(parts))
        else:
            check_bits(mine, parts[rank], "the input")
    elif kind == "scatter":
        all_blocks = values(dtype, count * size, root, salt)
        source = all_blocks.clone()
        blocks = split_evenly(source, size)
        given: Any = [block.clone() for block in blocks] if as_list else source
        target = empty(count)
        if in_place and rank == root:
            target = given[rank] if as_list else source[rank * count : (rank + 1) * count]
        if rank != root:
            given = None
        assert pydist.scatter(given, root, out=target) is target
        check_bits(target, all_blocks[rank * count : (rank + 1) * count])
        if rank == root:
            check_bits(torch.cat(given) if as_list else source, all_blocks, "the input")
    else:
        parts = suite.contributions(dtype, count * size, salt)
        mine = parts[rank].clone()
        expected = torch.cat([part[rank * count : (rank + 1) * count] for part in parts])
        source = mine
        given = [block.clone() for block in split_evenly(source, size)] if as_list else source
        if in_place:
            out = given
        else:
            out = [empty(count) for _ in range(size)] if as_list else empty(count * size)
        assert pydist.all_to_all(given, out=out) is out
        check_bits(torch.cat(out) if as_list else out, expected)
        if not in_place:
            check_bits(torch.cat(given) if as_list else source, parts[rank], "the input")


def every_op_on_every_dtype(suite: Suite) -> None:
    """Kinds that reduce, on every dtype with every op; what is not defined is refused, by name."""
    communicator = pydist.job.groups.communicator_of()
    salts = itertools.count()
    for kind, dtype, op in itertools.product(REDUCING_KINDS, DTYPES, OPS):
        if not is_defined(op, dtype):
            with suite.case(kind, dtype, op, "refused"):
                assert communicator.why_unsupported(kind, op, dtype)
                with expect_refusal(mentioning=op):
                    reducing_case(suite, kind, op, dtype, 3, in_place=kind == "all_reduce")
            continue
        counts = (3, 341 if kind == "reduce_scatter" else 1023)
        for index, count in enumerate(counts):
            salt = next(salts)
            if suite.is_slow and salt // 4 % 2 != index:
                continue
            with suite.case(kind, dtype, op, count):
                assert communicator.why_unsupported(kind, op, dtype) == ""
                reducing_case(
                    suite,
                    kind,
                    op,
                    dtype,
                    count,
                    # Neither goes with the count or the op.
                    in_place=(salt + salt // 2) % 2 == 0,
                    as_list=salt % 3 == 0,
                    salt=salt,
                    root=salt % suite.size,
                )


def every_size(suite: Suite) -> None:
    """Every kind on counts from none to several chunks, in place and not, flat and as lists."""
    size = suite.size
    small = sorted({0, 1, size - 1, size, size + 1, 1023})
    for kind in KINDS:
        has_blocks = kind not in ("all_reduce", "reduce", "broadcast")
        for dtype in (torch.float32, torch.bfloat16, torch.int64)[: 1 if suite.is_slow else None]:
            large = [CHUNK_BYTES // dtype.itemsize + 1, 6 * CHUNK_BYTES // dtype.itemsize + 5]
            if has_blocks:
                # Blocks: their sum is about as long.
                large = [n // size + 1 for n in large]
            for count in [*small, *large]:
                for in_place, as_list in itertools.product((True, False), (False, True)):
                    if as_list and not has_blocks:
                        continue
                    salt = count % 97
                    root = (count + in_place) % size
                    with suite.case(
                        kind,
                        dtype,
                        count,
                        "in place" if in_place else "out of place",
                        "list" if as_list else "flat",
                    ):
                        arguments: dict[str, Any] = {
                            "in_place": in_place,
                            "as_list": as_list,
                            "salt": salt,
                            "root": root,
                        }
                        if kind in REDUCING_KINDS:
                            op = "mean" if dtype.is_floating_point and count % 2 else "sum"
                            reducing_case(suite, kind, op, dtype, count, **arguments)
                        else:
                            moving_case(suite, kind, dtype, count, **arguments)


def every_dtype_is_moved(suite: Suite) -> None:
    """Kinds that move, on every dtype, float8 as bytes."""
    salts = itertools.count(40)
    kinds = [kind for kind in KINDS if kind not in REDUCING_KINDS]
    for kind, dtype, count in itertools.product(kinds, DTYPES, (1, 257)):
        salt = next(salts)
        with suite.case(kind, dtype, count):
            moving_case(
                suite,
                kind,
                dtype,
                count,
                in_place=salt % 3 == 0,
                as_list=salt % 2 == 0,
                salt=salt,
                root=salt % suite.size,
            )
    with suite.case("broadcast", "complex32"):
        halves = torch.view_as_complex(values(torch.float16, 20, 0, 3).view(10, 2))
        tensor = halves.clone() if suite.rank == 0 else torch.zeros(10, dtype=torch.complex32)
        pydist.broadcast(tensor, 0)
        check_bits(torch.view_as_real(tensor), torch.view_as_real(halves))


def random_sequences(suite: Suite) -> None:
    """Kinds, dtypes, counts, blocking or not, in a random order that is the same on all ranks."""
    choose = random.Random(20)
    under_way: list[tuple[str, Any, Tensor, str, list[Tensor]]] = []
    rank, size = suite.rank, suite.size
    for step in range(120):
        kind = choose.choice(KINDS)
        dtype = choose.choice(REDUCED_DTYPES)
        count = int(2 ** choose.uniform(0, 13)) - 1
        salt = choose.randrange(300)
        is_async = choose.random() < 0.5
        with suite.case("random", step, kind, dtype, count, "async" if is_async else "blocking"):
            if is_async and kind == "all_reduce":
                parts = suite.contributions(dtype, count, salt)
                tensor = parts[rank].clone()
                work = pydist.all_reduce(tensor, async_op=True)
                under_way.append((suite.name, work, tensor, "sum", parts))
            elif kind in REDUCING_KINDS:
                count = count // size if kind == "reduce_scatter" else count
                ops = [op for op in OPS if is_defined(op, dtype)]
                reducing_case(
                    suite,
                    kind,
                    choose.choice(ops),
                    dtype,
                    count,
                    in_place=choose.random() < 0.5,
                    salt=salt,
                    root=choose.randrange(size),
                )
            else:
                moving_case(
                    suite,
                    kind,
                    dtype,
                    count // size,
                    in_place=choose.random() < 0.5,
                    as_list=choose.random() < 0.5,
                    salt=salt,
                    root=choose.randrange(size),
                )
    choose.shuffle(under_way)
    for name, work, tensor, op, parts in under_way:
        with suite.case(name, "waited for"):
            work.wait(timeout=25)
            suite.check_reduced(tensor, "all_reduce", op, parts)
            suite.same_everywhere(tensor)
