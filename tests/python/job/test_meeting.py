"""What the ranks say to each other when they meet, where some come late or never."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

import pydist
from pydist.job import meeting

pytestmark = pytest.mark.timeout(60)


def test_a_late_rank_0_is_not_blamed_for_one_that_never_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(meeting, "_VERDICT_GRACE_S", 0.5)
    store = dist.HashStore()

    def come(rank: int) -> pydist.Timeout:
        if rank == 0:
            time.sleep(1.0)
        with pytest.raises(pydist.Timeout) as caught:
            meeting.agree(store, rank, 3, {}, timedelta(seconds=1.2))
        return caught.value

    with ThreadPoolExecutor(2) as both:
        errors = list(both.map(come, (0, 1)))
    for error in errors:
        assert error.ranks == (2,)
        assert "rank 2 of 3 did not join" in str(error)


def test_a_rank_0_that_never_comes_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_VERDICT_GRACE_S", 0.1)
    with pytest.raises(pydist.Timeout, match="rank 0 did not join") as caught:
        meeting.agree(dist.HashStore(), 1, 2, {}, timedelta(seconds=0.2))
    assert caught.value.ranks == (0,)
