"""What the ranks say to each other when they meet, where some come late or never."""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

import pydist
from pydist import _native
from pydist.job import backend_choice
from pydist.job.launchers import Placement, Rendezvous
from pydist.job.meeting import backend_agreement, store_waits
from pydist.job.meeting.rendezvous import meet
from pydist.job.processes import Process

pytestmark = pytest.mark.timeout(60)

HELLO = {"pydist": "1", "torch": "2"}
MANY = 32
MEETING_LIMIT_S = 30.0


def test_a_late_rank_0_is_not_blamed_for_one_that_never_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backend_agreement, "_VERDICT_GRACE_S", 0.5)
    store = dist.HashStore()

    def come(rank: int) -> pydist.Timeout:
        if rank == 0:
            time.sleep(1.0)
        with pytest.raises(pydist.Timeout) as caught:
            backend_agreement.agree(store, rank, 3, {}, timedelta(seconds=1.2))
        return caught.value

    with ThreadPoolExecutor(2) as both:
        errors = list(both.map(come, (0, 1)))
    for error in errors:
        assert error.ranks == (2,)
        assert "rank 2 of 3 did not join" in str(error)


def test_a_rank_0_that_never_comes_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_agreement, "_VERDICT_GRACE_S", 0.1)
    with pytest.raises(pydist.Timeout, match="rank 0 did not join") as caught:
        backend_agreement.agree(dist.HashStore(), 1, 2, {}, timedelta(seconds=0.2))
    assert caught.value.ranks == (0,)


def agree_with(
    make_roster: backend_agreement.MakeRoster,
) -> list[backend_agreement.Verdict | pydist.Error]:
    """What two ranks come to that introduce themselves to the native engine."""
    store = dist.HashStore()
    process = {"machine": "m", "host": "h", "pid": 1, "started": 1}
    hello = {"wish": "auto", "host": "h", "gpus": [], "for_cuda": False, "misses_gpu": False}
    hello |= {
        "local_rank": None,
        "no_gpu": "there is none",
        "chosen": None,
        "network": {},
        "process": process,
    }

    def come(rank: int) -> backend_agreement.Verdict | pydist.Error:
        mine = {**HELLO, **hello, "introduction": f"I am {rank}"}
        try:
            return backend_agreement.agree(
                store, rank, 2, mine, timedelta(seconds=20), make_roster=make_roster
            )
        except pydist.Error as error:
            return error

    with ThreadPoolExecutor(2) as both:
        return list(both.map(come, (0, 1)))


def test_all_hear_what_rank_0_makes_of_their_introductions() -> None:
    def make(introductions: Sequence[str], processes: Sequence[Process]) -> bytes:
        assert [each.pid for each in processes] == [1, 1]
        return "; ".join(introductions).encode() + b"\xff"

    for verdict in agree_with(make):
        assert isinstance(verdict, backend_agreement.Verdict)
        assert verdict.roster == b"I am 0; I am 1\xff"
        assert verdict.not_native is None


def test_all_hear_why_they_can_not_meet_on_the_native_engine() -> None:
    def make(_: Sequence[str], __: Sequence[Process]) -> bytes:
        raise pydist.TransportError("no thread", ranks=(1,), host="h", pid=1, cause="no thread")

    for verdict in agree_with(make):
        assert isinstance(verdict, backend_agreement.Verdict)
        assert verdict.roster is None
        assert (str(verdict.not_native), verdict.not_native.ranks) == ("no thread", (1,))


def test_what_must_be_alike_on_the_native_engine_is_an_error_of_all() -> None:
    def make(_: Sequence[str], __: Sequence[Process]) -> bytes:
        raise pydist.Mismatch("set alike", ranks=(1,))

    for error in agree_with(make):
        assert isinstance(error, pydist.Mismatch)
        assert (str(error), error.ranks) == ("set alike", (1,))


def test_rank_0_tells_why_it_can_not_make_a_roster(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> bytes:
        raise MemoryError("no memory is left")

    monkeypatch.setattr(_native, "make_native_roster", fail)
    own = _native.NativeIntroduction(0)
    make = partial(backend_choice._make_roster, own, dist.HashStore(), "world", (4, 5))
    for verdict in agree_with(make):
        assert isinstance(verdict, backend_agreement.Verdict)
        assert verdict.not_native is not None
        assert "no memory is left" in str(verdict.not_native)
        assert (verdict.not_native.ranks, verdict.not_native.pid) == ((4,), 1)


def test_rank_0_leaves_a_secret_when_all_have_come_and_takes_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("PYDIST_JOB_SECRET", raising=False)
    introduction = _native.NativeIntroduction(0)
    assert not list(tmp_path.iterdir())
    both = [introduction.text, _native.NativeIntroduction(1).text]
    processes = [(rank, "h", 1, 1, False) for rank in range(2)]
    _native.make_native_roster(introduction, dist.HashStore(), "world", both, processes)
    assert len(list(tmp_path.rglob("*"))) == 2  # a folder and a file
    introduction.end()
    introduction.end()
    assert not list(tmp_path.iterdir())
    _native.release_process()


def test_survivors_take_no_store_for_alive_that_closes_their_connections() -> None:
    """As a process does that ends: its last connections are still taken, and closed a moment later.

    torch's client would try again and again by itself, and tell nobody until the time-out.
    """
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as closing:
        is_over = threading.Event()
        server.settimeout(0.1)

        def close_all() -> None:
            while not is_over.is_set():
                with contextlib.suppress(TimeoutError):
                    server.accept()[0].close()

        closed = closing.submit(close_all)
        place = Placement(1, 2, 1, 2, Rendezvous(*server.getsockname()), "by hand")
        asked: list[object] = []
        try:
            with pytest.raises(pydist.TransportError, match="nothing answers at the job's store"):
                meet(place, timedelta(seconds=1), asked.append, purpose="reform")
        finally:
            is_over.set()
        closed.result()
    assert set(asked) == {None}


# -- what the log says of a wait that lasts --------------------------------------------------------


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_agreement, "_LONG_WAIT_S", 0.2)
    monkeypatch.setattr(store_waits, "_LOOK_S", 0.05)


def meet_in_vain(ranks: tuple[int, ...], size: int, timeout_s: float) -> None:
    """Joins some of the ranks of a job; the others never come."""
    store = dist.HashStore()

    def join(rank: int) -> None:
        with pytest.raises(pydist.Timeout):
            backend_agreement.agree(store, rank, size, HELLO, timedelta(seconds=timeout_s))

    with ThreadPoolExecutor(len(ranks)) as threads:
        list(threads.map(join, ranks))


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == "pydist" and record.levelno == logging.WARNING
    ]


@pytest.mark.usefixtures("_impatient")
def test_each_rank_warns_once_of_those_that_are_missing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    meet_in_vain((0, 2), 4, 2.0)
    warning = "ranks 1, 3 of 4 did not join within 0.2 s; this rank waits for 2 s in all."
    assert warnings_of(caplog) == [warning] * 2


@pytest.mark.usefixtures("_impatient")
def test_a_missing_rank_0_is_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_agreement, "_VERDICT_GRACE_S", 0.1)
    meet_in_vain((1,), 2, 1.0)
    assert warnings_of(caplog) == [
        "rank 0 of 2 did not join within 0.2 s; this rank waits for 1 s in all."
    ]


@pytest.mark.usefixtures("_impatient")
def test_a_time_out_that_is_short_speaks_for_itself(caplog: pytest.LogCaptureFixture) -> None:
    meet_in_vain((0,), 2, 0.2)
    assert warnings_of(caplog) == []


# -- what ranks of a native group say to each other: threads play many of them ---------------------


@pytest.mark.parametrize("ranks_per_host", [MANY, 8, 1])
def test_all_ranks_hear_what_they_need(ranks_per_host: int) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def meet(rank: int) -> None:
        client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
        _native.rehearse_meeting(client, rank, MANY, ranks_per_host, MEETING_LIMIT_S)

    with ThreadPoolExecutor(MANY) as threads:
        list(threads.map(meet, range(MANY)))


class CountingStore(dist.Store):
    """Holds nothing, and counts how often it is asked whether each key is there."""

    def __init__(self) -> None:
        super().__init__()
        self.looks: dict[str, int] = {}

    def check(self, keys: list[str]) -> bool:
        self.looks[keys[0]] = self.looks.get(keys[0], 0) + 1
        return False

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return desired.encode() if isinstance(desired, str) else desired


def looks_for_rank_1(size: int, timeout_s: float) -> int:
    """How often rank 0 asks, in its time, for a rank that never comes."""
    store = CountingStore()
    with pytest.raises(pydist.Timeout):
        _native.rehearse_meeting(store, 0, size, size, timeout_s)
    return store.looks["introduction/1"]


def test_a_rank_of_many_asks_the_store_seldom() -> None:
    # 10 pauses that double up to 0.1 s, then two or three in each 0.2 s, which slow machines only
    # make fewer. A rank of few asks some 100 times.
    assert looks_for_rank_1(1000, timeout_s=1.0) <= 30
