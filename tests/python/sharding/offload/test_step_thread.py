"""The thread that a delayed step runs on."""

from __future__ import annotations

import pytest

from pydist.sharding.offload.step_thread import StepThread

pytestmark = pytest.mark.timeout(60)


def test_the_job_may_join_its_own_thread() -> None:
    """As a finalizer does that the collector runs there; the job's error stays for others."""
    thread = StepThread()
    steps: list[str] = []

    def job() -> None:
        thread.join()
        steps.append("joined")
        raise ValueError("no luck")

    thread.start(job)
    with pytest.raises(ValueError, match="no luck"):
        thread.join()
    assert steps == ["joined"]
    thread.join()
