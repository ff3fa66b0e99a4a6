"""Tensors made within share_allocations(): whatever is called on them, alone or beside others."""

from __future__ import annotations

import torch

import pydist
from conformance.collectives import every_size
from conformance.memory import layouts
from conformance.ragged import ragged_blocks
from conformance.suite import Suite, check_bits


def shared_allocations(suite: Suite) -> None:
    """The usual cases with all tensors there, and cases with some of them."""
    rank, size = suite.rank, suite.size
    ordinary = [suite.contributions(torch.float32, count, 3) for count in (9000, 400_003)]
    with pydist.share_allocations(256 << 20):
        every_size(suite)
        layouts(suite)
        ragged_blocks(suite)
        shared = [[part.clone() for part in parts] for parts in ordinary]
    # Tensors go on after the end, and beside those that were made elsewhere.
    for usual, made in zip(ordinary, shared, strict=True):
        count = usual[0].numel()
        results = []
        for where in ("on all ranks", "on some ranks", "on none"):
            is_shared = where == "on all ranks" or (where == "on some ranks" and rank % 2 == 0)
            with suite.case("shared", "all_reduce", count, where):
                tensor = (made if is_shared else usual)[rank]
                out = tensor.clone() if where == "on none" else tensor
                results.append(pydist.all_reduce(out, "mean").clone())
                out.copy_(suite.contributions(torch.float32, count, 3)[rank])
                suite.check_reduced(results[-1], "all_reduce", "mean", usual)
                suite.same_everywhere(results[-1])
        with suite.case("shared", "the same bits wherever it lies", count):
            for result in results[1:]:
                check_bits(result, results[0])
    if size > 1:
        with suite.case("shared", "input there, output not"):
            parts = ordinary[1]
            out = torch.empty_like(parts[rank])
            pydist.all_reduce(shared[1][rank], out=out)
            suite.check_reduced(out, "all_reduce", "sum", parts)
