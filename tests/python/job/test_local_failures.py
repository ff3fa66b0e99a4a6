"""What fails on one rank while the ranks join is told to all, and all can try again."""

import _thread
import errno
import os
import resource
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from launch import Outcome, Ranks, free_port, run_ranks

import pydist
from pydist.job import backend_choice, gloo_factory
from pydist.job.launchers import Placement, Rendezvous, read_placement
from pydist.job.meeting import meeting_number
from pydist.job.meeting.meeting_number import go_on_from, next_number, require_only_process
from pydist.job.meeting.rendezvous import meet
from pydist.job.processes import Process, own_process
from pydist.testing.exhaustion import exhausted

# Far below the time-outs of the tests, and above what gloo takes to give up.
SOON_S = 15.0
NOBODY = 65534
NO_THREAD = "gives this process no more threads"


def add_up() -> float:
    return float(pydist.all_reduce(torch.ones(1)).item())


def join_for(seconds: float) -> str:
    """How joining ended: the backend, or what was raised."""
    begin_s = time.monotonic()
    try:
        pydist.init(timeout=seconds)
        assert add_up() == pydist.world_size()
        how = pydist.backend()
        pydist.barrier()
        pydist.shutdown()
    except pydist.Error as error:
        how = f"{type(error).__name__}: {error}"
    assert time.monotonic() - begin_s < SOON_S, how
    return how


def leave_descriptors(spare: int) -> list[int]:
    """Takes descriptors until a few are left; they are given back when they are closed."""
    highest = max(map(int, os.listdir("/proc/self/fd")))
    taken = [os.open("/dev/null", os.O_RDONLY)]
    while taken[-1] < highest:
        taken.append(os.open("/dev/null", os.O_RDONLY))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken[-1] + 1 + spare, hard))
    return taken


def join_with_few_descriptors(spare: int) -> tuple[str, str]:
    first = join_for(40.0)  # modules are loaded, so that no descriptor is needed for them
    assert first == "native", first
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = leave_descriptors(spare) if int(os.environ["RANK"]) == 1 else []
    try:
        how = join_for(40.0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)
        for number in taken:
            os.close(number)
    return how, join_for(40.0)


def check_alike(outcomes: Sequence[tuple[str, str]]) -> str:
    hows = [how for how, _ in outcomes]
    if any(":" in how for how in hows):
        for how in hows:
            assert how.startswith("TransportError"), hows
            assert "rank 1" in how, hows
    else:
        assert len(set(hows)) == 1, hows
    assert [again for _, again in outcomes] == ["native"] * len(outcomes)
    return hows[0].partition(":")[0]


# From what the connection to the store needs to what the native engine needs.
@pytest.mark.parametrize(
    ("nprocs", "spare"),
    [
        (2, 4),
        (3, 8),
        *(
            pytest.param(nprocs, spare, marks=pytest.mark.thorough)
            for nprocs in (2, 3)
            for spare in range(5, 20, 3)
        ),
    ],
)
def test_a_rank_with_few_descriptors_goes_the_way_of_all(nprocs: int, spare: int) -> None:
    env = {"PYDIST_BACKEND": "native"}
    check_alike(run_ranks(join_with_few_descriptors, nprocs, spare, timeout=90, env=env))


def join_without_threads() -> tuple[str, str]:
    rank = int(os.environ["RANK"])
    first = join_for(40.0)  # as root: modules are loaded, which another user may not read
    assert first == "native", first
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_NPROC, (0, hard))
    try:
        how = join_for(40.0)
    finally:
        resource.setrlimit(resource.RLIMIT_NPROC, (soft, hard))
    return how, join_for(40.0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user whom limits bind")
@pytest.mark.parametrize("nprocs", [2, pytest.param(3, marks=pytest.mark.thorough)])
def test_a_rank_without_threads_goes_the_way_of_all(nprocs: int) -> None:
    env = {"PYDIST_BACKEND": "native"}
    outcomes = run_ranks(join_without_threads, nprocs, timeout=90, env=env)
    assert check_alike(outcomes) == "TransportError"


def wrap_without_threads() -> tuple[object, ...]:
    pydist.init("native", timeout=40.0)
    pids = [int(pid) for pid in pydist.all_gather(torch.tensor([os.getpid()])).flatten()]
    starved = exhausted("threads") if pydist.rank() == 1 else nullcontext()
    begin_s = time.monotonic()
    with pytest.raises(pydist.TransportError, match=NO_THREAD) as caught, starved:
        pydist.DataParallel(torch.nn.Linear(4, 4))
    assert time.monotonic() - begin_s < SOON_S
    error = caught.value
    named = f"rank 1 (pid {pids[1]} on host " in str(error)
    return error.ranks, error.pid == pids[1], named


def test_a_rank_that_gets_no_thread_for_a_model_is_named_by_all_at_once() -> None:
    assert run_ranks(wrap_without_threads, 2) == [((1,), True, True)] * 2


def make_a_group_on_gloo_without_threads() -> tuple[object, ...]:
    pydist.init("gloo", timeout=40.0)
    pids = [int(pid) for pid in pydist.all_gather(torch.tensor([os.getpid()])).flatten()]
    if pydist.rank() == 0:
        return ()
    starved = exhausted("threads") if pydist.rank() == 2 else nullcontext()
    begin_s = time.monotonic()
    with pytest.raises(pydist.TransportError, match=NO_THREAD) as caught, starved:
        pydist.new_group([1, 2])
    assert time.monotonic() - begin_s < SOON_S
    return caught.value.ranks, caught.value.pid == pids[2]


def test_a_rank_that_gets_no_thread_for_gloo_is_named_by_all() -> None:
    told = run_ranks(make_a_group_on_gloo_without_threads, 3)
    assert told[1:] == [((2,), True)] * 2


def join_gloo_without_threads() -> tuple[object, ...]:
    starved = exhausted("threads") if os.environ["RANK"] == "1" else nullcontext()
    with pytest.raises(pydist.TransportError, match=NO_THREAD) as caught, starved:
        pydist.init("gloo", timeout=20.0)
    return caught.value.ranks, caught.value.pid


def test_a_rank_that_gets_no_thread_joins_no_job_on_gloo() -> None:
    with Ranks(2) as ranks:
        assert ranks.run(join_gloo_without_threads) == [((1,), ranks.pids[1])] * 2


def make_a_group_with_one_thread_less() -> tuple[object, ...]:
    """Rank 1 gets one of the threads of gloo's, and no second one."""
    pydist.init("gloo", timeout=40.0)
    start = _thread.start_new_thread
    begun: list[int] = []

    def start_one(function: Callable[[], None], arguments: tuple[()]) -> None:
        def noted() -> None:
            begun.append(threading.get_native_id())
            function()

        if begun:
            raise RuntimeError("can't start new thread")
        start(noted, arguments)
        while not begun:
            time.sleep(1e-4)

    few = mock.patch.object(_thread, "start_new_thread", start_one)
    with (
        pytest.raises(pydist.TransportError, match=NO_THREAD) as caught,
        few if pydist.rank() == 1 else nullcontext(),
    ):
        pydist.new_group([0, 1])
    assert len(begun) == pydist.rank()
    assert not any(Path(f"/proc/self/task/{thread}").exists() for thread in begun)
    return caught.value.ranks


def test_a_rank_that_gets_too_few_threads_for_gloo_does_not_end() -> None:
    assert run_ranks(make_a_group_with_one_thread_less, 2) == [(1,)] * 2


def make_groups_on_gloo_with_few_descriptors() -> list[object]:
    """Ever more of them, until they are enough."""
    pydist.init("gloo", timeout=40.0)
    outcomes: list[object] = []
    for spare in (0, 2, 4, 5, 6, 7, 8, 12, 40):
        pydist.barrier()
        starved = exhausted("descriptors", spare=spare) if pydist.rank() == 1 else nullcontext()
        try:
            with starved:
                group = pydist.new_group([0, 1])
            outcomes.append(pydist.all_reduce(torch.ones(1), group=group).item())
        except pydist.TransportError as error:
            outcomes.append((error.ranks, "Too many open files" in str(error)))
    return outcomes


def test_a_rank_that_gets_too_few_descriptors_for_gloo_does_not_end() -> None:
    named = ((1,), True)
    assert run_ranks(make_groups_on_gloo_with_few_descriptors, 2) == [[named] * 8 + [2.0]] * 2


def make_two_groups_of_which_one_fails() -> list[object]:
    """Rank 0 fails in the first before rank 1 comes to it."""
    pydist.init("gloo", timeout=20.0)
    pydist.barrier()
    outcomes: list[object] = []
    for number, value in enumerate((1.0, 100.0)):
        starved = number == 0 and pydist.rank() == 0
        if pydist.rank() == 1:
            time.sleep(0.3)
        try:
            with exhausted("descriptors") if starved else nullcontext():
                group = pydist.new_group([0, 1])
            outcomes.append(pydist.all_reduce(torch.full((1,), value), group=group).item())
        except pydist.TransportError as error:
            outcomes.append(error.ranks)
    return outcomes


def test_nobodys_first_group_is_another_ones_second() -> None:
    assert run_ranks(make_two_groups_of_which_one_fails, 2) == [[(0,), 200.0]] * 2


def test_a_rank_without_descriptors_for_the_store_says_so() -> None:
    here = Placement(1, 2, 1, 2, Rendezvous("127.0.0.1", 1), "torchrun")
    begin_s = time.monotonic()
    with (
        pytest.raises(pydist.TransportError, match=r"Too many open files.*ulimit -n"),
        exhausted("descriptors"),
    ):
        meet(here, timedelta(seconds=20))
    assert time.monotonic() - begin_s < SOON_S


def fail_alone_then_join() -> list[str]:
    rank = int(os.environ["RANK"])
    told = []
    describe = backend_choice.describe_network

    def fail(*_: object) -> dict[str, object]:
        raise OSError(24, "Too many open files")

    if rank == 1:
        backend_choice.describe_network = fail  # type: ignore[assignment]
    told.append(join_for(40.0))
    backend_choice.describe_network = describe
    told.append(join_for(40.0))
    return told


def test_what_a_rank_cannot_tell_of_itself_is_an_error_of_all() -> None:
    for first, again in run_ranks(fail_alone_then_join, 3, timeout=60):
        assert first == "TransportError: rank 1: OSError: [Errno 24] Too many open files"
        assert again == "native"


def try_unequally_often() -> list[str]:
    told = []
    if int(os.environ["RANK"]) == 1:
        for _ in range(3):
            told.append(join_for(-1.0))  # fails alone, before it says anything
        time.sleep(2.5)
    else:
        told.append(join_for(2.0))
    told.append(join_for(30.0))
    return told


def test_ranks_that_have_tried_unequally_often_meet() -> None:
    waited, failed = run_ranks(try_unequally_often, 2, timeout=60)
    assert waited[0].startswith("Timeout"), waited
    assert [how.partition(":")[0] for how in failed[:3]] == ["InvalidUsage"] * 3
    assert (waited[-1], failed[-1]) == ("native", "native")


def test_numbers_of_meetings_are_those_of_rank_0() -> None:
    store = dist.HashStore()
    at_once = timedelta(0)
    assert next_number(store, 1, at_once) is None
    assert next_number(store, 0, at_once) == 1
    assert next_number(store, 0, at_once) == 2  # it failed alone, and tries again
    assert next_number(store, 1, at_once) == 2
    assert next_number(store, 1, at_once) is None
    assert next_number(store, 0, at_once) == 3
    assert [next_number(store, rank, at_once) for rank in (1, 2)] == [3, 3]


def test_a_second_process_with_a_rank_reads_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    at_once = timedelta(0)
    assert next_number(store, 0, at_once) == 1
    assert next_number(store, 2, at_once) == 1
    assert next_number(store, 2, at_once) is None  # the same process, for which rank 0 is late
    require_only_process(store, 2)
    second = Process("", "b", 4711, 1)
    monkeypatch.setattr(meeting_number, "own_process", lambda: second)
    assert next_number(store, 2, at_once) is None  # who may come again, in a later store
    with pytest.raises(
        pydist.Timeout, match="has joined as rank 2 already, and this is pid 4711 on"
    ) as told:
        require_only_process(store, 2)
    assert str(own_process()) in str(told.value)
    assert told.value.ranks == (2,)
    go_on_from(store, 2, 1)  # it is rank 2 of the survivors
    require_only_process(store, 2)


def test_the_process_that_an_earlier_store_knows_is_no_second_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank that is started again while the store of its predecessor is still on its way down."""
    port = free_port()
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    placement = read_placement()
    assert placement.rendezvous is not None
    prefix = f"pydist {placement.rendezvous.job} 0"

    def serve() -> tuple[dist.Store, dist.Store]:
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        numbers = dist.PrefixStore(prefix, store)
        assert next_number(numbers, 0, timedelta(0)) == 1
        return store, numbers

    earlier = serve()
    with monkeypatch.context() as patched:
        patched.setattr(meeting_number, "own_process", lambda: Process("", "b", 4711, 1))
        assert next_number(earlier[1], 1, timedelta(0)) == 1
    with ThreadPoolExecutor(1) as other:
        meeting = other.submit(meet, placement, timedelta(seconds=15), lambda _: None)
        time.sleep(2.5)  # more than it takes to find that nothing begins there
        del earlier
        later = serve()
        assert meeting.result(15).generation == 1
        del later


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("lost_rank_0_opened", [1, 2, 5])
def test_numbers_go_on_after_those_of_a_lost_rank_0(
    lost_rank_0_opened: int, order: tuple[int, int]
) -> None:
    store = dist.HashStore()
    at_once = timedelta(0)
    for number in range(1, lost_rank_0_opened + 1):
        assert next_number(store, 0, at_once) == number
    assert next_number(store, 2, at_once) == lost_rank_0_opened
    for rank in order:  # the survivors form generation 2
        go_on_from(store, rank, 2)
    assert next_number(store, 1, at_once) is None
    following = max(2, lost_rank_0_opened) + 1
    assert next_number(store, 0, at_once) == following
    assert next_number(store, 1, at_once) == following


def test_without_descriptors_no_process_is_taken_for_dead() -> None:
    own = own_process()
    stat = Path(f"/proc/{os.getppid()}/stat").read_text(errors="replace")
    started = int(stat.rpartition(")")[2].split()[19])
    living = Process(own.machine, own.host, os.getppid(), started)
    gone = Process(own.machine, own.host, os.getppid(), started + 1)
    assert not living.is_known_dead
    assert gone.is_known_dead
    with exhausted("descriptors"):
        assert not living.is_known_dead
        assert own_process() == own


def test_a_thread_that_never_runs_is_not_waited_for_without_limit() -> None:
    """As one for which there is no memory left when it begins."""
    with (
        mock.patch.object(_thread, "start_new_thread"),
        mock.patch.object(gloo_factory, "_STARTING_S", 0.1),
        pytest.raises(pydist.TransportError, match=os.strerror(errno.EAGAIN)),
    ):
        gloo_factory._require_threads(2)


def show_secret() -> tuple[str, list[str]]:
    folder = os.environ["XDG_RUNTIME_DIR"]
    pydist.init()
    add_up()
    return os.environ.get("PYDIST_JOB_SECRET", ""), os.listdir(folder)


def test_spawn_makes_a_secret_for_each_job() -> None:
    jobs = [pydist.spawn(_secret, nprocs=nprocs) for nprocs in (2, 1)]
    assert len({secret for job in jobs for secret in job}) == 2
    assert all(len(secret) == 64 for job in jobs for secret in job)


def _secret() -> str:
    return os.environ["PYDIST_JOB_SECRET"]


def test_ranks_without_a_secret_share_one_through_a_file(tmp_path: str) -> None:
    with Ranks(2, env={"XDG_RUNTIME_DIR": str(tmp_path)}) as ranks:
        assert ranks.run(show_secret) == [("", [])] * 2


def hide_secret() -> list[object]:
    return [row for row in pydist._native.environment_variables() if "SECRET" in row[0]]


def test_the_secret_is_not_shown() -> None:
    secret = "0123456789abcdef" * 4
    with Ranks(1, env={"PYDIST_JOB_SECRET": secret}) as ranks:
        assert secret not in str(ranks.run(hide_secret))


def test_a_secret_that_can_be_guessed_is_refused() -> None:
    with Ranks(2, env={"PYDIST_JOB_SECRET": "short"}) as ranks:
        outcomes: list[Outcome] = ranks.outcomes(add_up_after_joining)
    assert {outcome.error for outcome in outcomes} == {"InvalidUsage"}
    assert all("can be guessed" in str(outcome.message) for outcome in outcomes)


def join_with_a_secret_of_its_own() -> None:
    os.environ["PYDIST_JOB_SECRET"] = os.environ["RANK"] * 32
    pydist.init(timeout=20)


def test_a_rank_with_another_secret_is_not_let_in_by_another_backend() -> None:
    with Ranks(2, env={"PYDIST_BACKEND": "auto"}) as ranks:
        outcomes: list[Outcome] = ranks.outcomes(join_with_a_secret_of_its_own)
    assert {outcome.error for outcome in outcomes} == {"Mismatch"}
    assert all("PYDIST_JOB_SECRET" in str(outcome.message) for outcome in outcomes)


def add_up_after_joining() -> float:
    pydist.init()
    return add_up()
