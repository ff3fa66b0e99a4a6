"""Sub-groups."""

from __future__ import annotations

import torch
import torch.distributed as dist

import pydist
from conformance.references import values
from conformance.suite import Suite, check_bits


def groups(suite: Suite) -> None:
    """Sub-groups: of any ranks in any order, overlapping, nested, at work at the same time."""
    rank, size = suite.rank, suite.size
    orders: list[list[int]] = [[r] for r in range(size)]
    if size > 1:
        orders += [list(reversed(range(size))), [size - 1, 0], list(range(0, size, 2))]
    if size > 2:
        orders += [list(range(1, size)), [1, size - 1, 0], list(range(size))[::-2]]
    made = []
    for members in orders:
        with suite.case("groups", "making", members):
            made.append((members, pydist.new_group(members)))
            is_outside = made[-1][1] is dist.GroupMember.NON_GROUP_MEMBER
            assert is_outside == (rank not in members)
    # The latest first: groups are independent of the order in which they were made.
    for members, group in reversed(made):
        if isinstance(group, int):
            continue
        p, me = len(members), members.index(rank)
        with suite.case("groups", members):
            assert (group.rank, group.size) == (me, p)
            # In the group's rank order.
            parts = [values(torch.float32, 301, r, 3) for r in members]
            result = pydist.all_reduce(parts[me].clone(), group=group)
            suite.check_reduced(result, "all_reduce", "sum", parts, "all_reduce")
            check_bits(pydist.all_gather(parts[me], group=group), torch.cat(parts), "all_gather")
            sent = pydist.broadcast(parts[me].clone(), p - 1, group=group)
            check_bits(sent, parts[-1], "broadcast")
            turned = pydist.all_to_all(torch.arange(p) + 10 * me, group=group)
            assert turned.tolist() == [10 * r + me for r in range(p)]
            gathered = pydist.gather(parts[me], p - 1, group=group)
            assert (gathered is not None) == (me == p - 1)
            if p > 1:
                got = torch.empty(301)
                work = pydist.send(parts[me], (me + 1) % p, group=group, async_op=True)
                assert pydist.recv(got, (me - 1) % p, group=group) == (me - 1) % p
                work.wait()
                check_bits(got, parts[me - 1], "recv")
            memory = pydist.symmetric_empty(50, group=group).fill_(me + 1.0)
            pydist.all_reduce(memory, group=group)
            assert memory.tolist() == [p * (p + 1) / 2] * 50
    with suite.case("groups", "all at work at once"):
        works = []
        for number, (members, group) in enumerate(made):
            if not isinstance(group, int):
                tensor = torch.full((2000 + number,), float(rank))
                works.append(
                    (members, tensor, pydist.all_reduce(tensor, group=group, async_op=True))
                )
        whole = torch.ones(4000)
        everyone = pydist.all_reduce(whole, async_op=True)
        for members, tensor, work in reversed(works):
            work.wait(timeout=25)
            assert bool((tensor == sum(members)).all()), members
        everyone.wait()
        assert bool((whole == size).all())
    with suite.case("groups", "a group of a group"):
        if size > 2:
            outer = pydist.new_group(list(reversed(range(1, size))))
            if not isinstance(outer, int):
                # Ranks count within the parent: its 0 is our last.
                inner = pydist.new_group([outer.size - 1, 0], group=outer)
                if not isinstance(inner, int) and inner.size == 2:
                    total = pydist.all_reduce(torch.tensor([float(rank)]), group=inner)
                    assert total.item() == 1.0 + (size - 1)
    with suite.case("groups", "one twice"):
        members = list(range(size))
        first, second = pydist.new_group(members), pydist.new_group(members)
        a, b = torch.ones(10), torch.full((10,), 2.0)
        later = pydist.all_reduce(b, group=second, async_op=True)
        pydist.all_reduce(a, group=first)
        later.wait()
        assert (a.tolist(), b.tolist()) == ([float(size)] * 10, [2.0 * size] * 10)
    pydist.barrier()
