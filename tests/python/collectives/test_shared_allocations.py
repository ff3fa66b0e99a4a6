"""pydist.share_allocations(): what torch allocates there, its bound, forks, and failures.

That collectives on such tensors are right is the conformance suite's matter.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import Ranks, rank_outcomes, run_ranks
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, Dataset

import pydist
from pydist import _native
from pydist.testing.exhaustion import exhausted

LIMIT_S = 40.0
MIB = 1 << 20
NATIVE = {"PYDIST_BACKEND": "native"}

Runner = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def two() -> Iterator[Runner]:
    """Two ranks, for tests that leave their group sound."""
    with Ranks(2, NATIVE) as ranks:
        yield lambda function, *args: ranks.run(function, *args, timeout=LIMIT_S)


def used() -> int:
    """Bytes of the heap that torch allocates from at present."""
    return int(_native.shared_allocation_bytes()[0])


def lies_in_heap(tensor: torch.Tensor) -> bool:
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(word, 16) for word in line.split(maxsplit=1)[0].split("-"))
        if begin <= address < end:
            return "memfd:pydist:allocations" in line and " rw-s " in line
    return False


def make_tensors_here_and_there() -> None:
    pydist.init()
    before = torch.ones(MIB)
    with pydist.share_allocations(256 * MIB):
        within = torch.ones(MIB)
        small = torch.ones(10)
        made_by_thread: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: made_by_thread.append(torch.zeros(MIB)))
        thread.start()
        thread.join()
        assert used() >= 8 * MIB
        with pydist.share_allocations():  # once more
            inner = within + 1
        still = within * 2
        assert used() >= 16 * MIB
    after = torch.ones(MIB)
    where = [lies_in_heap(each) for each in (before, within, small, inner, still, after)]
    assert where == [False, True, False, True, True, False]
    assert lies_in_heap(made_by_thread[0])
    assert used() == 0  # none is in use now
    # Tensors live on, and are resized as any others.
    assert float(within.sum()) == MIB
    within.resize_(2 * MIB)
    assert not lies_in_heap(within)
    assert float(within[:MIB].sum()) == MIB
    assert float(pydist.all_reduce(inner)[-1]) == 4.0


def test_torch_allocates_there_between_enter_and_exit(two: Runner) -> None:
    two(make_tensors_here_and_there)


def leave_by_an_error() -> None:
    pydist.init()

    def fail_within() -> None:
        with pydist.share_allocations(256 * MIB):
            assert lies_in_heap(torch.ones(MIB))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_within()
    assert not lies_in_heap(torch.ones(MIB))
    with pytest.raises(pydist.InvalidUsage, match="positive number of bytes"):
        pydist.share_allocations(-1).__enter__()
    with pytest.raises(pydist.InvalidUsage, match="positive number of bytes"):
        pydist.share_allocations(1.5).__enter__()  # type: ignore[arg-type]


def test_it_ends_where_the_body_raises(two: Runner) -> None:
    two(leave_by_an_error)


def outlive_the_job() -> None:
    pydist.init()
    with pydist.share_allocations(256 * MIB):
        tensor = torch.ones(MIB)
        pydist.shutdown()
        assert float((tensor + tensor).sum()) == 2 * MIB
    assert float(tensor.sum()) == MIB
    del tensor
    assert "pydist:allocations" not in Path("/proc/self/maps").read_text()
    pydist.init()
    with pydist.share_allocations(64 * MIB):  # of the new job, with a bound of its own
        tensor = torch.ones(MIB)
        assert lies_in_heap(tensor)
        assert float(pydist.all_reduce(tensor)[5]) == 2.0
    pydist.shutdown()


def test_tensors_outlive_the_job_and_nothing_else_does() -> None:
    run_ranks(outlive_the_job, 2, env=NATIVE, timeout=LIMIT_S)


def go_beyond_the_bound() -> None:
    pydist.init()
    with pydist.share_allocations(256 * MIB):
        kept = [torch.full((4 * MIB,), float(i)) for i in range(40)]  # 640 MiB
        assert used() <= 256 * MIB
        where = [lies_in_heap(each) for each in kept]
        assert 10 < sum(where) <= 16
        assert not all(where)
        for i, each in enumerate(kept):
            assert float(pydist.all_reduce(each)[-1]) == 2 * i
        del kept, each
        for _ in range(1000):  # freed and used again
            assert lies_in_heap(torch.empty(4 * MIB))
        assert _native.shared_allocation_bytes()[1] <= 256 * MIB


def test_what_is_beyond_the_bound_is_ordinary_memory(two: Runner) -> None:
    two(go_beyond_the_bound)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def allocate_again_and_again() -> tuple[int, int]:
    pydist.init()
    with pydist.share_allocations(256 * MIB):

        def step() -> None:
            parts = [torch.ones(MIB // 4 + 1000 * i) for i in range(10)]
            assert all(map(lies_in_heap, parts[:1]))

        for _ in range(10):
            step()
        before = resident_bytes()
        for _ in range(1000):
            step()
        return before, resident_bytes()


def test_memory_is_used_again(two: Runner) -> None:
    for before, after in two(allocate_again_and_again):
        assert after - before < 8 * MIB


def profile_memory() -> None:
    pydist.init()
    with (
        pydist.share_allocations(256 * MIB),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled,
    ):
        tensor = torch.ones(MIB)
        assert lies_in_heap(tensor)
        del tensor
    ones = [event for event in profiled.events() if event.name == "aten::empty"]
    assert sum(event.cpu_memory_usage for event in ones) == 4 * MIB


def test_the_profiler_sees_it(two: Runner) -> None:
    two(profile_memory)


def nothing_changes() -> None:
    pydist.init()
    with pydist.share_allocations():
        assert not lies_in_heap(torch.ones(MIB))
        assert float(pydist.all_reduce(torch.ones(MIB))[0]) == pydist.world_size()


@pytest.mark.parametrize(("nprocs", "backend"), [(1, "native"), (2, "gloo")])
def test_where_nothing_can_be_shared_nothing_changes(nprocs: int, backend: str) -> None:
    run_ranks(nothing_changes, nprocs, env={"PYDIST_BACKEND": backend}, timeout=LIMIT_S)


# -- data-loader workers --------------------------------------------------------------------------


class InPlace(Dataset[torch.Tensor]):
    """Rows of one tensor; a worker changes them in place, and the parent looks on."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        scratch = torch.ones(MIB)  # an allocation of the worker's own
        assert not lies_in_heap(scratch)
        return self.rows[index].mul_(-1).clone()


def load_in_place() -> None:
    pydist.init()
    multiprocessing.current_process().daemon = False  # which may have no workers
    with pydist.share_allocations(256 * MIB):
        rows = torch.arange(64.0).repeat_interleave(MIB // 64).view(64, -1).contiguous()
        assert lies_in_heap(rows)
        kept = rows.clone()
        loader = DataLoader(
            InPlace(rows), batch_size=4, num_workers=2, multiprocessing_context="fork"
        )
        got = []
        for number, batch in enumerate(loader):
            if number == 0:
                rows.fill_(1000.0)  # workers still see what there was when they were started
            got.append(batch.clone())
        assert torch.equal(torch.cat(got), -kept)
        assert torch.equal(rows, torch.full_like(rows, 1000.0))
        assert float(pydist.all_reduce(rows)[3, 3]) == 2000.0


def test_workers_change_nothing_here_and_see_no_change(two: Runner) -> None:
    two(load_in_place)


def free_in_a_child() -> None:
    pydist.init()
    with pydist.share_allocations(256 * MIB):
        tensors = [torch.full((MIB,), float(i)) for i in range(8)]
        before = used()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                assert [float(each[0]) for each in tensors] == [float(i) for i in range(8)]
                for each in tensors:
                    each.fill_(-1.0)
                tensors.clear()
                del each
                made = [torch.zeros(MIB) for _ in range(8)]
                assert not any(lies_in_heap(each) for each in made)
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert used() == before
        assert [float(each[0]) for each in tensors] == [float(i) for i in range(8)]
        assert float(pydist.all_reduce(tensors[3])[1]) == 6.0


def test_a_child_frees_and_allocates_for_itself(two: Runner) -> None:
    two(free_in_a_child)


# -- failures -------------------------------------------------------------------------------------


def swap_messages() -> None:
    pydist.init()
    rank, peer = pydist.rank(), 1 - pydist.rank()
    with pydist.share_allocations(256 * MIB):
        made = torch.arange(3 * MIB, dtype=torch.int32)
    for count in (5_000, 100_003, 3 * MIB):
        for is_shared in (True, False):
            # On one rank alone, or on both; from the middle of a tensor.
            mine = made[-count:] if is_shared or rank == 0 else made[-count:].clone()
            mine += rank + 1
            got = torch.empty(count, dtype=torch.int32)
            sending = pydist.send(mine, peer, async_op=True)
            pydist.recv(got, peer)
            sending.wait()
            want = torch.arange(3 * MIB - count, 3 * MIB, dtype=torch.int32) + peer + 1
            assert torch.equal(got, want), (count, is_shared)
            mine -= rank + 1  # it is this rank's again
            pydist.barrier()
    mine, swapped = made[:MIB], torch.empty(MIB, dtype=torch.int32)
    for time in range(400):  # so that both ways are tried
        mine.fill_(2 * time + rank)
        works = [pydist.send(mine, peer, async_op=True)]
        works.append(pydist.recv(swapped, peer, async_op=True))
        for work in works:
            work.wait()
        assert bool((swapped == 2 * time + peer).all()), time
    tuned = [each for each in _native.tuning_table() if each.memory == "shared"]
    (swaps,) = [each for each in tuned if each.sends_too and each.bytes == 4 * MIB]
    assert {way for way, _ in swaps.times_us} == {(128 << 10, False, False), (0, False, True)}


def test_messages_are_copied_from_where_they_lie() -> None:
    assert run_ranks(swap_messages, 2, env={**NATIVE, "PYDIST_TUNING": "uncached"}) == [None] * 2


def share_with_nothing_left(what: Any, spare: int) -> tuple[str, bool]:
    pydist.init()
    torch.ones(MIB)  # whatever the first one needs
    how = ""
    try:
        if pydist.rank() == 1:
            with exhausted(what, spare=spare), pydist.share_allocations(1024 * MIB):
                pass
        else:
            with pydist.share_allocations(1024 * MIB):
                pass
    except pydist.Error as error:
        how = f"{type(error).__name__}: {error}"
    is_ordinary = not lies_in_heap(torch.ones(MIB))
    assert float(pydist.all_reduce(torch.ones(MIB))[0]) == pydist.world_size()
    with pydist.share_allocations(64 * MIB):  # all can try again
        tensor = torch.ones(MIB)
        assert lies_in_heap(tensor)
        assert float(pydist.all_reduce(tensor)[0]) == pydist.world_size()
    return how, is_ordinary


@pytest.mark.parametrize(
    ("what", "spare"), [("descriptors", 0), ("descriptors", 2), ("memory", 1100 * MIB)]
)
def test_where_one_rank_has_nothing_left_all_raise(what: str, spare: int) -> None:
    outcomes = run_ranks(share_with_nothing_left, 3, what, spare, env=NATIVE, timeout=LIMIT_S)
    for how, is_ordinary in outcomes:
        assert how.startswith("TransportError: The ranks cannot share their allocations: rank 1:")
        assert is_ordinary


def die_amid() -> None:
    pydist.init()
    with pydist.share_allocations(256 * MIB):
        tensor = torch.ones(16 * MIB)
    assert lies_in_heap(tensor)
    pydist.all_reduce(tensor)
    if pydist.rank() == 1:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        pydist.all_reduce(tensor, "max")


def test_a_rank_that_dies_is_named_to_the_others() -> None:
    outcomes = rank_outcomes(die_amid, 3, env=NATIVE, timeout=LIMIT_S)
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error == "PeerLost", outcome
        assert "rank 1" in str(outcome.message)
