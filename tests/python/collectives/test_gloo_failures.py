"""Groups on gloo that fail: ranks that are late, leave, die, abort, or fork."""

import contextlib
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_groups import gloo, make
from launch import Ranks, free_port
from survivors_of import die, survivors_of
from thorough import everyday
from torch_groups import bridge, join

import pydist
from pydist import _native
from pydist.testing import faults

pytestmark = pytest.mark.timeout(60)

LIMIT_S = 40.0
# After how long the log tells of a wait: the ranks differ by far less than half of it.
LONG_S = 2.0
LEFT = r"rank 1 \(pid \d+ on host .*\) has left the group \(shutdown\)"

Runner = Callable[..., list[Any]]


@pytest.fixture
def run_two() -> Iterator[Runner]:
    with Ranks(2) as ranks:
        yield lambda function, *args: ranks.run(function, *args, timeout=LIMIT_S)


def timed_out() -> list[Any]:
    communicator = make()
    start_s = time.monotonic()
    errors = []
    if communicator.rank == 0:
        for _ in range(2):
            try:
                communicator.all_reduce(torch.ones(2), torch.ones(2), timeout=0.3)
            except pydist.Error as error:
                errors.append(type(error).__name__)
        took_s = time.monotonic() - start_s
        assert isinstance(communicator.failure, pydist.Timeout)
        return [*errors, took_s]
    try:
        communicator.recv(torch.empty(1), 0)
    except pydist.Error as error:
        errors.append(type(error).__name__)
    return errors


def test_a_timeout_fails_the_group_on_both_sides(run_two: Runner) -> None:
    first, second = run_two(timed_out)
    assert first[:2] == ["Timeout", "Timeout"]
    assert first[2] < 5.0
    assert second == ["PeerLost"]


def missing_rank(how: str) -> str:
    communicator = make()
    if communicator.rank == 1:
        if how == "dead":
            os._exit(0)
        time.sleep(4.0)
        return ""
    try:
        communicator.all_reduce(torch.ones(2), torch.ones(2), timeout=0.5 + communicator.rank)
    except pydist.Error as error:
        who = f"{error.ranks[:1]} {error.pid is not None}"
        return f"{type(error).__name__} of {who}: {error}"
    return "nothing"


@pytest.mark.parametrize("how", ["late", "dead"])
def test_who_is_missing_is_named_to_everybody(how: str) -> None:
    with Ranks(3) as ranks:
        outcomes = ranks.outcomes(missing_rank, how, timeout=LIMIT_S)
    if how == "dead":
        for outcome in (outcomes[0], outcomes[2]):
            process = r"rank 1 \(pid \d+ on host .*\)"
            said = rf"PeerLost of \(1,\) True: all_reduce on rank \d of 3 .* {process} has died"
            assert re.match(said, outcome.value), outcomes
        return
    # Rank 0 gives up first, while rank 2 still waits for rank 1 and can't answer.
    assert re.search(r"No answer from rank 1(, rank 2)? \(late", outcomes[0].value), outcomes
    assert "No answer from rank 1 (late" in outcomes[2].value, outcomes
    assert outcomes[0].value.startswith("Timeout of (1,) True: "), outcomes


def wait_for_a_stopped_rank(waits: str) -> tuple[Any, ...]:
    communicator = make()
    communicator.barrier()
    if communicator.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        return ()
    stopped = None
    try:
        if waits == "in a collective":
            communicator.all_reduce(torch.ones(2), torch.ones(2), timeout=1.0)
        else:
            communicator.recv(torch.ones(2), 1, timeout=1.0)
    except pydist.Timeout as error:
        stopped = error.pid
        return str(error), error.ranks, error.cause
    finally:
        os.kill(stopped or os.getpid(), signal.SIGCONT)
    return ()


@pytest.mark.parametrize("waits", ["in a collective", "for a message"])
def test_a_timeout_says_that_a_rank_is_stopped(waits: str) -> None:
    with Ranks(2) as ranks:
        said, culprits, cause = ranks.run(wait_for_a_stopped_rank, waits, timeout=LIMIT_S)[0]
    stopped = "is stopped (SIGSTOP or a debugger)"
    assert (culprits, cause) == ((1,), stopped), said
    link = r": it " if waits == "in a collective" else " "
    assert re.search(rf"rank 1 \(pid \d+ on host .*\){link}{re.escape(stopped)}", said), said
    assert "(late" not in said, said


def wait_for_long(waits: str) -> None:
    communicator = make(long_wait_s=LONG_S)
    communicator.barrier()
    if communicator.rank == 1:
        time.sleep(2.5 * LONG_S)
    if waits == "in a collective":
        communicator.all_reduce(torch.ones(2), torch.ones(2), label="bucket 7")
        communicator.barrier()
    elif communicator.rank == 1:
        communicator.send(torch.ones(2), 0)
    elif communicator.rank == 0:
        communicator.recv(torch.ones(2), 1)


@pytest.mark.parametrize("waits", everyday("in a collective", thorough=("for a message",)))
def test_the_log_tells_once_for_whom_a_rank_waits(waits: str) -> None:
    with Ranks(3) as ranks:
        logs = [each.output for each in ranks.outcomes(wait_for_long, waits, timeout=LIMIT_S)]
    late = r"rank 1 \(pid \d+ on host .*\)"
    if waits == "in a collective":
        what = r"all_reduce \(bucket 7\)"
        why = rf"these do not wait in it, as they have not come or have left already: {late}\.\n"
        waiting = [0, 2]
    else:
        what, why, waiting = "recv from rank 1", rf"it waits for {late}\.\n", [0]
    for rank, log in enumerate(logs):
        warnings = re.findall(r"warning: gloo: rank .*\n", log)
        assert len(warnings) == (rank in waiting), logs
        said = (
            rf"rank {rank} \(pid .*\) has been in {what} of group 'tested' for {LONG_S:g} s: {why}"
        )
        assert all(re.search(said, warning) for warning in warnings), logs


def lose_one_with_a_worker(waits: str) -> tuple[str, float]:
    communicator = make()
    communicator.barrier()
    if communicator.rank == 1:
        if os.fork() == 0:  # as a data loader does: it holds all connections open
            time.sleep(20)
            os._exit(0)
        time.sleep(0.3)
        (Path(os.environ["FOLDER"]) / "dies").write_text(repr(time.monotonic()))
        die()
    try:
        if waits == "in a collective":
            communicator.all_reduce(torch.ones(2), torch.ones(2))
        elif waits == "for a message":
            communicator.recv(torch.ones(2), 1)
        else:
            while communicator.failure is None:
                time.sleep(0.001)
            communicator.barrier()
    except pydist.PeerLost as error:
        died_s = float((Path(os.environ["FOLDER"]) / "dies").read_text())
        return str(error), time.monotonic() - died_s
    return "nothing", 0.0


@pytest.mark.parametrize(
    "waits",
    everyday("in a collective", thorough=("for a message", "for nothing")),
)
def test_a_death_is_seen_while_a_forked_process_lives(waits: str, tmp_path: Path) -> None:
    with Ranks(3, {"FOLDER": str(tmp_path)}) as ranks:
        outcomes = ranks.outcomes(lose_one_with_a_worker, waits, timeout=LIMIT_S)
    for said, seconds in survivors_of(outcomes, [1]):
        assert re.search(r"rank 1 \(pid \d+ on host .*\) has died", said), outcomes
        assert seconds < 10.0  # far less than the worker lives


def leave_in_order() -> str:
    communicator = make()
    communicator.barrier()
    if communicator.rank == 1:
        communicator.shutdown()
        os._exit(0)
    time.sleep(1.0)
    # The others do without it.
    if communicator.rank == 0:
        communicator.send(torch.ones(2), 2)
    else:
        communicator.recv(torch.zeros(2), 0)
    assert communicator.failure is None
    with pytest.raises(pydist.PeerLost) as caught:
        communicator.all_reduce(torch.ones(2), torch.ones(2))
    return str(caught.value)


def test_a_rank_that_leaves_and_ends_has_not_died() -> None:
    with Ranks(3) as ranks:
        outcomes = ranks.outcomes(leave_in_order, timeout=LIMIT_S)
    for rank in (0, 2):
        assert re.search(LEFT, outcomes[rank].value), outcomes


def aborted() -> list[str]:
    communicator = make()
    works = []
    if communicator.rank == 0:
        works.append(communicator.recv(torch.empty(1), 1, async_op=True))
        works.append(communicator.all_reduce(torch.ones(2), torch.ones(2), async_op=True))
        time.sleep(0.2)
        communicator.abort("enough")
        names = []
        for work in works:
            with pytest.raises(pydist.Aborted, match="enough"):
                work.wait(5.0)
            names.append(type(work.exception()).__name__)
        communicator.shutdown()
        return names
    with pytest.raises(pydist.Aborted, match="enough") as caught:
        communicator.recv(torch.empty(1), 0)
    assert caught.value.ranks == (0,)
    assert communicator.place_of(0) == (caught.value.host, caught.value.pid)
    return [type(communicator.failure).__name__]


def test_abort_wakes_everybody(run_two: Runner) -> None:
    assert run_two(aborted) == [["Aborted", "Aborted"], ["Aborted"]]


def aborted_beside_a_leaver() -> None:
    communicator = make()
    rank = communicator.rank
    communicator.barrier()
    if rank == 1:
        communicator.shutdown()
        return
    # Rank 0 hears of it by its message from rank 1; whoever waits for the others is to wake too.
    peers = (1, 2) if rank == 0 else (0,)
    works = [communicator.recv(torch.empty(1), peer, async_op=True) for peer in peers]
    for work in works:
        with pytest.raises(pydist.PeerLost):
            work.wait(10.0)
    communicator.shutdown()


def test_a_leaver_keeps_nobody_from_ending_the_group() -> None:
    with Ranks(3) as ranks:
        ranks.run(aborted_beside_a_leaver, timeout=LIMIT_S)


def left_behind() -> str:
    communicator = make()
    if communicator.rank == 1:
        work = communicator.recv(torch.empty(1), 0, async_op=True)
        start_s = time.monotonic()
        communicator.shutdown()
        assert time.monotonic() - start_s < 3.0
        with pytest.raises(pydist.Aborted):
            work.wait(1.0)
        return ""
    try:
        communicator.all_reduce(torch.ones(2), torch.ones(2))
    except pydist.PeerLost as error:
        return str(error)
    return "nothing"


def test_a_rank_that_leaves_is_noticed(run_two: Runner) -> None:
    assert re.search(LEFT, run_two(left_behind)[0])


def forked() -> int:
    communicator = make()
    communicator.all_reduce(torch.ones(2), torch.ones(2), async_op=True).wait()
    pid = os.fork()
    if pid == 0:
        del communicator
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    communicator.barrier()
    communicator.shutdown()
    return status


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_lets_go(run_two: Runner) -> None:
    assert run_two(forked) == [0, 0]


def used_after_a_fork() -> str:
    communicator = make()
    work = communicator.all_reduce(torch.ones(2), torch.ones(2), async_op=True)
    never = communicator.recv(torch.ones(2), 1 - communicator.rank, async_op=True)
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        lines = []
        for call in (
            communicator.barrier,
            lambda: communicator.send(torch.ones(2), 1 - communicator.rank),
            lambda: communicator.split([communicator.rank]),
            never.wait,
            make,
        ):
            try:
                call()
                lines.append("went on")
            except pydist.InvalidUsage as error:
                lines.append(str(error))
        os.write(tell, "\n".join(lines).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    work.wait()
    communicator.send(torch.ones(2), 1 - communicator.rank, async_op=True).wait()
    never.wait()
    communicator.shutdown()
    return os.read(told, 100_000).decode()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_is_refused_at_once(run_two: Runner) -> None:
    for text in run_two(used_after_a_fork):
        lines = text.splitlines()
        assert len(lines) == 5
        assert all("in a process that was forked from a rank" in line for line in lines), text


def refused() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.HashStore()

    def broken(*_: object) -> None:
        raise RuntimeError("no network here")

    with pytest.raises(pydist.TransportError, match="no network here"):
        _native.create_gloo(store, rank, size, "broken", 5.0, broken)
    with pytest.raises(pydist.InvalidUsage, match="must return"):
        _native.create_gloo(dist.HashStore(), rank, size, "other", 5.0, lambda *_: "text")
    with pytest.raises(pydist.InvalidUsage, match="not a rank"):
        _native.create_gloo(store, size, size, "broken", 5.0, gloo)
    with pytest.raises(pydist.InvalidUsage, match="seconds"):
        _native.create_gloo(store, rank, size, "broken", 0.0, gloo)


def test_factories_that_fail(run_two: Runner) -> None:
    run_two(refused)


def block_without_threads() -> str:
    rank, _ = join()
    group = bridge()
    values, message = torch.ones(1000), torch.empty(1000)
    dist.barrier()
    if rank == 1:
        group._start_coalescing()
        works = [
            group.allreduce([values], dist.AllreduceOptions()),
            group.recv([message], 0, 0),
        ]
        with (
            faults.exhausted("threads"),
            pytest.raises(pydist.TransportError, match="no more threads"),
        ):
            group._end_coalescing()
        # So nothing uses the tensors any more.
        assert all(work.is_completed() for work in works)
        with pytest.raises(pydist.TransportError, match="no more threads"):
            works[1].wait()
    else:
        # That of the block, which may have come to its end before the rest failed.
        with contextlib.suppress(pydist.TransportError):
            dist.all_reduce(values)
    with pytest.raises(pydist.TransportError) as caught:
        dist.all_reduce(values)
    assert caught.value.ranks == (1,), caught.value.ranks
    return str(caught.value)


def test_where_no_thread_is_left_for_a_block_all_of_it_fails() -> None:
    with Ranks(2, {"PYDIST_BACKEND": "gloo"}) as ranks:
        for message in ranks.run(block_without_threads, timeout=LIMIT_S):
            assert "rank 1 of group" in message, message
            assert "no more threads" in message, message


def lose_the_host_of_the_store(port: int, number: int) -> tuple[Any, ...]:
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    os.environ["MASTER_PORT"] = str(port)
    pydist.init("gloo", timeout=2)
    pids = [int(pid) for pid in pydist.all_gather(torch.tensor([os.getpid()])).flatten()]
    if pydist.rank() == 0:
        os.kill(os.getpid(), number)
        return ()
    with pytest.raises(pydist.Error) as caught:
        pydist.all_reduce(torch.ones(2))
    error = caught.value
    with contextlib.suppress(ProcessLookupError):
        os.kill(pids[0], signal.SIGCONT)
    return type(error).__name__, error.ranks, error.pid == pids[0], str(error)


@pytest.mark.parametrize(
    ("number", "kind", "how"),
    [
        pytest.param(signal.SIGKILL, "PeerLost", "it has died", id="killed"),
        pytest.param(
            signal.SIGSTOP, "Timeout", "it is stopped (SIGSTOP or a debugger)", id="stopped"
        ),
    ],
)
def test_the_rank_that_hosts_the_store_is_named(number: int, kind: str, how: str) -> None:
    with Ranks(2) as ranks:
        outcomes = ranks.outcomes(lose_the_host_of_the_store, free_port(), number, timeout=LIMIT_S)
    name, culprits, is_rank_0, said = outcomes[1].value
    assert (name, culprits, is_rank_0) == (kind, (0,), True), said
    assert "The job's store does not answer either" in said
    assert how in said


OVER_GLOO = "compare their calls over gloo"


def disagree(without_port: int | None) -> None:
    if int(os.environ["RANK"]) == without_port:
        taken = socket.create_server(("", 0))
        port = taken.getsockname()[1]
        os.environ["PYDIST_PORTS"] = f"{port}-{port}"
    pydist.init("gloo", timeout=20)
    tensor = torch.full((3,), pydist.rank() + 1.0)
    pydist.all_reduce(tensor)
    assert torch.equal(tensor, torch.full((3,), 3.0))
    with pytest.raises(pydist.Mismatch, match=r"rank 0 called all_reduce.*but rank 1 called barr"):
        pydist.barrier() if pydist.rank() else pydist.all_reduce(tensor)


@pytest.mark.parametrize("secret", [None, "s" * 32], ids=["no_secret", "secret"])
@pytest.mark.parametrize("without_port", [None, 0, 1])
def test_ranks_compare_their_calls_with_and_without_connections_of_their_own(
    without_port: int | None, secret: str | None
) -> None:
    env = {"PYDIST_LOG": "info", "PYDIST_JOB_SECRET": secret}
    with Ranks(2, env) as ranks:
        outcomes = ranks.outcomes(disagree, without_port, timeout=LIMIT_S)
    for outcome in outcomes:
        assert outcome.ok, outcome.describe()
        assert (OVER_GLOO in outcome.output) == (without_port is not None), outcome.output
