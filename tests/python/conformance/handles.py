"""Barriers, and handles of operations under way."""

from __future__ import annotations

import time

import torch

import pydist
from conformance.references import CHUNK_BYTES
from conformance.suite import Suite, check_bits


def barriers(suite: Suite) -> None:
    """No rank leaves a barrier before every rank has entered it."""
    rank, size = suite.rank, suite.size
    for is_async in (False, True):
        with suite.case("barrier", "asynchronous" if is_async else "blocking"):
            for late in range(size):
                time.sleep(0.02 if rank == late else 0.0)
                # CLOCK_MONOTONIC is one clock for all processes of a host.
                entered = time.monotonic()
                if is_async:
                    pydist.barrier(async_op=True).wait()
                else:
                    pydist.barrier()
                left = time.monotonic()
                times = pydist.all_gather(torch.tensor([[entered, left]], dtype=torch.float64))
                assert times[:, 1].min() >= times[:, 0].max()


def asynchronous(suite: Suite) -> None:
    """Handles of every kind; many under way, waited for in another order, or let go."""
    rank, size = suite.rank, suite.size
    for count in (1, 1023, CHUNK_BYTES):
        parts = suite.contributions(torch.float32, count, 7)
        wide = suite.contributions(torch.float32, count * size, 8) if count < 5000 else []
        with suite.case("asynchronous", "every kind", count):
            mine = parts[rank]
            reduced, everything = torch.empty(count), torch.empty(count * size)
            at_root = mine.clone()
            from_root = mine.clone()
            gathered = torch.empty(count * size)
            scattered = torch.empty(count)
            block, turned = torch.empty(count), torch.empty(count * size)
            blocks = torch.cat(parts)
            works = [
                pydist.all_reduce(mine, out=reduced, async_op=True),
                pydist.all_gather(mine, out=everything, async_op=True),
                pydist.reduce(at_root, size - 1, async_op=True),
                pydist.broadcast(from_root, size - 1, async_op=True),
                pydist.gather(mine, 0, out=gathered, async_op=True),
                pydist.scatter(blocks, 0, out=scattered, async_op=True),
                pydist.barrier(async_op=True),
            ]
            if wide:
                works += [
                    pydist.reduce_scatter(wide[rank], out=block, async_op=True),
                    pydist.all_to_all(wide[rank], out=turned, async_op=True),
                ]
            for work in reversed(works):
                work.wait(timeout=25)
                assert work.is_completed()
                assert work.exception() is None
            suite.check_reduced(reduced, "all_reduce", "sum", parts, "all_reduce")
            suite.same_everywhere(reduced)
            check_bits(everything, torch.cat(parts), "all_gather")
            check_bits(from_root, parts[-1], "broadcast")
            check_bits(scattered, parts[rank], "scatter")
            if rank == size - 1:
                suite.check_reduced(at_root, "reduce", "sum", parts, "reduce")
            if rank == 0:
                check_bits(gathered, torch.cat(parts), "gather")
            if wide:
                own = [part[rank * count : (rank + 1) * count] for part in wide]
                suite.check_reduced(block, "reduce_scatter", "sum", own, "reduce_scatter")
                check_bits(turned, torch.cat(own), "all_to_all")
    with suite.case("asynchronous", "many under way"):
        tensors = [torch.full((64 + i,), float(rank + i)) for i in range(100)]
        works = [pydist.all_reduce(tensor, async_op=True) for tensor in tensors]
        works[-1].wait()
        # Collectives of one group complete in order.
        assert suite.waits_on_stream or all(work.is_completed() for work in works)
        for i, tensor in enumerate(tensors):
            assert tensor.tolist() == [float(sum(r + i for r in range(size)))] * (64 + i)
    with suite.case("asynchronous", "blocking calls between"):
        first = torch.full((CHUNK_BYTES,), 1.0)
        second, third = torch.full((3,), 2.0), torch.full((3,), 3.0)
        work = pydist.all_reduce(first, async_op=True)
        pydist.all_reduce(second)
        later = pydist.all_reduce(third, async_op=True)
        assert suite.waits_on_stream or work.is_completed()
        later.wait()
        assert bool((first == size).all())
        assert (second.tolist(), third.tolist()) == ([2.0 * size] * 3, [3.0 * size] * 3)
    with suite.case("asynchronous", "tensors that only the handle holds"):
        works = [
            pydist.all_gather(
                torch.full((999,), float(i)), out=torch.empty(999 * size), async_op=True
            )
            for i in range(10)
        ]
        for work in works:
            work.wait()
    with suite.case("asynchronous", "handles let go"):
        kept = torch.ones(5000)
        pydist.all_reduce(kept, async_op=True)
        pydist.barrier()
        assert bool((kept == size).all())
    with suite.case("asynchronous", "non-contiguous output"):
        grid = torch.full((7, 40), float(rank)).t()
        pydist.all_reduce(grid, async_op=True).wait()
        assert bool((grid == sum(range(size))).all())
        lists = [torch.zeros(6, 2).t() for _ in range(size)]
        pydist.all_gather(torch.full((2, 6), float(rank)), out=lists, async_op=True).wait()
        assert [block.tolist() for block in lists] == [[[float(r)] * 6] * 2 for r in range(size)]
