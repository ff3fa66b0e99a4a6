"""For whom a launcher that spares survivors waits."""

import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch.distributed as dist

from pydist import _native
from pydist.job.processes import own_process, status_of
from pydist.job.recovery import last_ones
from pydist.job.recovery.last_ones import LastOnes
from pydist.job.recovery.left_behind import mark_left_behind


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(last_ones, "time", clock)
    monkeypatch.setenv("PYDIST_TIMEOUT", "60")
    return clock


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def look_for(last: LastOnes, clock: Clock, seconds: int, pid: int) -> str | None:
    for _ in range(seconds):
        clock.now_s += 1
        if why := last.why_to_end({1: pid}, has_any_ended=True):
            return why
    return None


def stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGSTOP)
    while status_of(process.pid).state != "T":
        os.sched_yield()


def test_the_last_one_is_stopped(clock: Clock, process: subprocess.Popen[bytes]) -> None:
    said: list[str] = []
    last = LastOnes(dist.HashStore(), 5.0, said.append)
    assert look_for(last, clock, 200, process.pid) is None
    assert not said
    stop(process)
    assert last.why_to_end({1: process.pid}, has_any_ended=False) is None
    assert look_for(last, clock, 55, process.pid) is None
    [warning] = said
    assert f"rank 1 (pid {process.pid}) is stopped" in warning
    process.send_signal(signal.SIGCONT)
    while status_of(process.pid).state == "T":
        os.sched_yield()
    assert look_for(last, clock, 10, process.pid) is None
    stop(process)
    assert look_for(last, clock, 55, process.pid) is None
    clock.now_s += 30  # the launcher was stopped too
    assert look_for(last, clock, 55, process.pid) is None
    assert look_for(last, clock, 10, process.pid) == "it was stopped for 60 s"
    assert len(said) == 1


def test_one_that_was_left_behind_gets_a_grace(
    clock: Clock, process: subprocess.Popen[bytes]
) -> None:
    store = dist.HashStore()
    last = LastOnes(store, 5.0, pytest.fail)
    assert look_for(last, clock, 50, process.pid) is None
    mark_left_behind(store, [replace(own_process(), pid=process.pid)])
    assert look_for(last, clock, 5, process.pid) is None
    assert look_for(last, clock, 2, process.pid) == "the others have gone on without it"


def test_one_that_is_frozen_counts_as_stopped(
    clock: Clock, process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    last = LastOnes(dist.HashStore(), 5.0, lambda said: None)
    monkeypatch.setattr(_native, "is_frozen", lambda pid: pid == process.pid)
    assert look_for(last, clock, 55, process.pid) is None
    assert look_for(last, clock, 10, process.pid) == "it was stopped for 60 s"
