"""How rank 0 puts together what the ranks send, when that comes early, late or never."""

import logging

import pytest
import torch.distributed as dist

from pydist.monitoring.chunks import Collector, Together, as_json
from pydist.monitoring.mailbox import Mailbox
from pydist.monitoring.measures import Row


def rows(number: int) -> list[Row]:
    """The chunk with that number: two steps."""
    return [Row(2 * number + step, 1.0, None, None, None) for step in (1, 2)]


def ranks_in(done: list[Together]) -> list[tuple[int, list[int]]]:
    """Of each chunk its first step, and the ranks that it has rows of."""
    return [(t[0][0].step, [rank for rank, each in enumerate(t) if each]) for t in done]


class Job:
    """Three ranks in one process."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.boxes = [Mailbox(self.store, "1", rank, 3) for rank in range(3)]
        self.collector = Collector(self.boxes[0], 3)

    def post(self, rank: int, number: int) -> None:
        self.boxes[rank].post(number, as_json(rows(number)))


def test_the_last_rank_that_closes_leaves_no_key() -> None:
    job = Job()
    for rank in (0, 2, 1):
        assert job.store.num_keys() > 0
        job.boxes[rank].close()
        if rank != 1:
            job.post(1, rank)
    assert job.store.num_keys() == 0


def test_a_chunk_is_done_when_all_ranks_have_sent_it() -> None:
    job = Job()
    job.post(1, 0)
    job.post(1, 1)  # ahead by a chunk
    assert job.collector.add(0, rows(0)) == []
    assert job.collector.look() == []
    assert job.collector.expects_more
    job.post(2, 0)
    assert ranks_in(job.collector.look()) == [(1, [0, 1, 2])]
    assert not job.collector.expects_more
    assert job.collector.add(1, rows(1)) == []
    job.post(2, 1)
    (done,) = job.collector.look()
    assert done == [rows(1)] * 3


def test_a_rank_that_is_always_late_is_heard_as_long_as_it_is_less_than_a_chunk(
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = Job()
    with caplog.at_level(logging.WARNING, "pydist"):
        assert job.collector.add(0, rows(0)) == []
        for number in range(5):
            # At the end of rank 0's own chunk.
            assert job.collector.look() == []
            for rank in (1, 2):
                if (rank, number) != (2, 1):
                    job.post(rank, number)
            done = job.collector.look() + job.collector.add(number + 1, rows(number + 1))
            assert ranks_in(done) == [(2 * number + 1, [0, 1] if number == 1 else [0, 1, 2])]
    assert [record.getMessage() for record in caplog.records] == [
        "pydist.monitor: ranks [2] have sent nothing of steps 3 to 4, so their numbers are missing "
        "there; call step() on every rank, once a step."
    ]


def test_at_the_end_only_ranks_that_were_there_are_waited_for() -> None:
    job = Job()
    job.collector.add(0, rows(0))
    job.post(1, 0)
    assert ranks_in(job.collector.look() + job.collector.add(1, rows(1))) == [(1, [0, 1])]
    assert job.collector.expects_more
    job.post(1, 1)
    # Would last for an hour if rank 2 was waited for.
    assert ranks_in(job.collector.wait(3600)) == [(3, [0, 1])]


def test_without_the_store_rank_0_goes_on_alone() -> None:
    job = Job()
    job.collector.add(0, rows(0))
    assert ranks_in(job.collector.leave_others()) == [(1, [0])]
    assert job.collector.add(1, rows(1)) == []
    assert ranks_in(job.collector.look()) == [(3, [0])]
