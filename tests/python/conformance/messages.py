"""send and recv."""

from __future__ import annotations

import torch

import pydist
from conformance.references import CHUNK_BYTES, DTYPES, values
from conformance.suite import Suite, check_bits


def messages(suite: Suite) -> None:
    """send and recv: dtypes, sizes, tags, any source, crossing, in any order."""
    rank, size = suite.rank, suite.size
    following, previous = (rank + 1) % size, (rank - 1) % size
    if size == 1:
        return
    for dtype in DTYPES:
        with suite.case("messages", "ring", dtype):
            got = torch.empty(129, dtype=dtype)
            sending = pydist.send(values(dtype, 129, rank, 4), following, async_op=True)
            assert pydist.recv(got, previous) == previous
            sending.wait()
            check_bits(got, values(dtype, 129, previous, 4))
    for count in (0, 1, 7, CHUNK_BYTES // 4 + 1, CHUNK_BYTES):
        with suite.case("messages", "crossed sends", count):
            # Both send first: neither may wait for the other's receive.
            peer = rank ^ 1
            if peer < size:
                got = torch.empty(count)
                sending = pydist.send(values(torch.float32, count, rank, 2), peer, async_op=True)
                pydist.recv(got, peer)
                sending.wait()
                check_bits(got, values(torch.float32, count, peer, 2))
        with suite.case("messages", "blocking, even ranks first", count):
            got = torch.empty(count)
            mine = values(torch.float32, count, rank, 6)
            peer = rank ^ 1
            if peer < size:
                if rank % 2 == 0:
                    pydist.send(mine, peer)
                    pydist.recv(got, peer)
                else:
                    pydist.recv(got, peer)
                    pydist.send(mine, peer)
                check_bits(got, values(torch.float32, count, peer, 6))
    with suite.case("messages", "tags are received in another order"):
        tags = [9, 0, 2**20, 4]
        works = [
            pydist.send(torch.tensor([rank, tag]), following, tag=tag, async_op=True)
            for tag in tags
        ]
        for tag in sorted(tags):
            pair = torch.empty(2, dtype=torch.int64)
            pydist.recv(pair, previous, tag=tag)
            assert pair.tolist() == [previous, tag]
        for work in works:
            work.wait()
    with suite.case("messages", "one tag keeps its order"):
        works = [
            pydist.send(torch.tensor([float(i)]), following, tag=3, async_op=True)
            for i in range(20)
        ]
        seen = []
        for _ in range(20):
            one = torch.empty(1)
            pydist.recv(one, previous, tag=3)
            seen.append(one.item())
        assert seen == list(range(20))
        for work in works:
            work.wait()
    with suite.case("messages", "receives come first"):
        targets = [torch.empty(5, dtype=torch.int32) for _ in range(size)]
        receiving = {
            r: pydist.recv(targets[r], r, tag=8, async_op=True) for r in range(size) if r != rank
        }
        sending_all = [
            pydist.send(values(torch.int32, 5, rank, r), r, tag=8, async_op=True)
            for r in reversed(range(size))
            if r != rank
        ]
        for r, work in receiving.items():
            work.wait(timeout=20)
            assert work.source_rank == r
            check_bits(targets[r], values(torch.int32, 5, r, rank), f"from {r}")
        for work in sending_all:
            work.wait()
    with suite.case("messages", "any source"):
        if rank == 0:
            sources = set()
            for _ in range(size - 1):
                got = torch.empty(100)
                source = pydist.recv(got, tag=11)
                sources.add(source)
                check_bits(got, values(torch.float32, 100, source, 1), f"from {source}")
            assert sources == set(range(1, size))
        else:
            pydist.send(values(torch.float32, 100, rank, 1), 0, tag=11)
    with suite.case("messages", "any source, asynchronous"):
        if rank == size - 1:
            targets = [torch.empty(1, dtype=torch.int64) for _ in range(size - 1)]
            works = [pydist.recv(target, tag=12, async_op=True) for target in targets]
            for work, target in zip(works, targets, strict=True):
                work.wait()
                assert work.source_rank == target.item()
            assert {int(target) for target in targets} == set(range(size - 1))
        else:
            pydist.send(torch.tensor([rank]), size - 1, tag=12)
    with suite.case("messages", "beside collectives"):
        got = torch.empty(3)
        receiving_one = pydist.recv(got, previous, tag=13, async_op=True)
        total = torch.ones(3)
        pydist.all_reduce(total)
        pydist.send(torch.full((3,), float(rank)), following, tag=13)
        receiving_one.wait()
        assert total.tolist() == [float(size)] * 3
        assert got.tolist() == [float(previous)] * 3
