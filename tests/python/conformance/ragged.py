"""Blocks that differ in size."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

import pydist
from conformance.references import CHUNK_BYTES, values
from conformance.suite import Suite, check_bits, expect_refusal


def ragged_blocks(suite: Suite) -> None:
    """Lists whose tensors differ in size, some of them empty."""
    rank, size = suite.rank, suite.size
    shapes: dict[str, Callable[[int], int]] = {
        "growing": lambda r: 3 * r,
        "one rank has all": lambda r: 1000 if r == size - 1 else 0,
        "first is long": lambda r: CHUNK_BYTES // 4 + 9 if r == 0 else r + 1,
    }
    for (name, count_of), dtype in itertools.product(
        shapes.items(), (torch.float32, torch.int16, torch.float8_e5m2)
    ):
        parts = [values(dtype, count_of(r), r, 5) for r in range(size)]
        with suite.case("all_gather", "ragged", name, dtype):
            out = [torch.empty_like(part) for part in parts]
            assert pydist.all_gather(parts[rank].clone(), out=out) is out
            for r in range(size):
                check_bits(out[r], parts[r], f"block {r}")
        for root in {0, size - 1}:
            with suite.case("gather", "ragged", name, dtype, f"root {root}"):
                out = [torch.empty_like(part) for part in parts]
                got = pydist.gather(parts[rank].clone(), root, out=out)
                assert (got is None) == (rank != root)
                if got is not None:
                    for r in range(size):
                        check_bits(out[r], parts[r], f"block {r}")
        with suite.case("all_to_all", "ragged", name, dtype):
            # Rank a sends count_of(a) + b elements to rank b.
            blocks = [
                [values(dtype, count_of(a) + b, a, 7 + b) for b in range(size)] for a in range(size)
            ]
            out = [torch.empty_like(blocks[a][rank]) for a in range(size)]
            pydist.all_to_all(blocks[rank], out=out)
            for a in range(size):
                check_bits(out[a], blocks[a][rank], f"block of {a}")
        with suite.case("all_to_all", "ragged pieces of one tensor", name, dtype):
            sizes = [[count_of(b) for b in range(size)] for _ in range(size)]
            whole = values(dtype, sum(sizes[rank]), rank, 9)
            target = torch.empty(size * count_of(rank), dtype=dtype)
            pydist.all_to_all(
                list(whole.split(sizes[rank])),
                out=list(target.split(count_of(rank))) if count_of(rank) else [target] * size,
            )
            start = sum(count_of(b) for b in range(rank))
            expected = [
                values(dtype, sum(sizes[a]), a, 9)[start : start + count_of(rank)]
                for a in range(size)
            ]
            check_bits(target, torch.cat(expected))
    for kind in ("reduce_scatter", "scatter"):
        if size == 1:
            continue
        with suite.case(kind, "ragged is refused"), expect_refusal():
            blocks_of_mine = [torch.zeros(4 + (r != rank)) for r in range(size)]
            if kind == "scatter":
                pydist.scatter(blocks_of_mine, rank, out=torch.zeros(3))
            else:
                pydist.reduce_scatter(blocks_of_mine, out=torch.zeros(3))
