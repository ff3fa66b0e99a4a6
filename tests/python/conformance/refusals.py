"""What is refused, and what only some backends offer."""

from __future__ import annotations

from collections.abc import Callable

import torch

import pydist
from conformance.suite import Suite, check_bits, expect_refusal


def refusals(suite: Suite) -> None:
    """What is wrong with a call, or not offered, is said before anything is sent."""
    rank, size = suite.rank, suite.size
    # Messages go by native beside nccl, too.
    is_native = suite.backend in ("native", "nccl")
    peer = (rank + 1) % size
    t = torch.ones(size * 2)
    wrong: dict[str, Callable[[], object]] = {
        "unknown op": lambda: pydist.all_reduce(t, "median"),
        "root out of range": lambda: pydist.broadcast(t, size),
        "negative root": lambda: pydist.broadcast(t, -1),
        "peer out of range": lambda: pydist.send(t, size),
        "negative tag": lambda: pydist.send(t, peer, tag=-1),
        "another output count": lambda: pydist.all_reduce(t, out=torch.ones(1)),
        "another output dtype": lambda: pydist.all_reduce(t, out=t.double()),
        "sparse tensor": lambda: pydist.all_reduce(t.to_sparse()),
        "meta tensor": lambda: pydist.all_reduce(t.to("meta")),
        "lists of another length": lambda: pydist.all_gather(t, out=[t] * (size + 1)),
        "output too short": lambda: pydist.all_gather(t, out=torch.ones(2 * size * size - 1)),
    }
    if suite.on_device:
        del wrong["sparse tensor"]  # the fake device has none
    for name, call in wrong.items():
        with suite.case("refusals", name), expect_refusal():
            call()
    # What docs/backends.md says only some backends offer.
    with suite.case("refusals", "a message to itself"):
        if is_native:
            got = torch.empty(2 * size)
            work = pydist.send(t, rank, tag=5, async_op=True)
            assert pydist.recv(got, rank, tag=5) == rank
            work.wait()
            check_bits(got, t)
        else:
            with expect_refusal():
                pydist.send(t, rank)
            with expect_refusal():
                pydist.recv(t, rank)
    if size > 1:
        with suite.case("refusals", "a long tag"):
            if is_native:
                got = torch.empty(2 * size)
                work = pydist.send(t, peer, tag=2**40, async_op=True)
                pydist.recv(got, (rank - 1) % size, tag=2**40)
                work.wait()
                check_bits(got, t)
            else:
                with expect_refusal():
                    pydist.send(t, peer, tag=0x70000000)
    with suite.case("refusals", "the group is sound afterwards"):
        assert pydist.all_reduce(torch.ones(3)).tolist() == [float(size)] * 3
