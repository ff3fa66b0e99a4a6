"""Who is to blame: what errors carry for programs, and whose error the launcher reports."""

import os
import pickle
import re
import signal
import socket
import sys
import threading
import time
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launch import rank_outcomes, run_ranks
from thorough import everyday
from torch import nn

import pydist
from pydist.errors import Aborted, Error, PeerLost, Timeout
from pydist.testing.exhaustion import exhausted


def blame_of(error: Error) -> tuple[object, ...]:
    return (error.ranks, error.host is not None, error.pid, error.operation, error.cause)


def test_an_error_of_a_program_blames_nobody() -> None:
    for error in (Error("said"), Timeout("said"), PeerLost("said")):
        assert blame_of(error) == ((), False, None, None, None)
        assert "said" in str(error)


@pytest.mark.parametrize("kind", [PeerLost, Timeout, pydist.InvalidUsage])
def test_blame_survives_pickling(kind: type[Error]) -> None:
    error = kind("rank 1 timed out", ranks=[1], pid=4711, cause="has died")
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy)) == (kind, "rank 1 timed out")
    assert (copy.ranks, copy.pid, copy.host, copy.cause) == ((1,), 4711, None, "has died")


def wait_for_the_dead(backend: str) -> tuple[object, ...] | None:
    pydist.init(backend)
    pids = pydist.all_gather(torch.tensor([os.getpid()]))
    pydist.barrier()
    if pydist.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLost) as caught:
        pydist.barrier()
    error = caught.value
    return (error.ranks, error.pid == pids[1].item(), str(error.operation)[:9], error.cause)


@pytest.mark.parametrize(("backend", "operation"), [("native", "barrier #"), ("gloo", "barrier o")])
def test_the_dead_are_named_by_attributes(backend: str, operation: str) -> None:
    outcomes = rank_outcomes(wait_for_the_dead, 3, backend)
    for rank in (0, 2):
        assert outcomes[rank].value == ((1,), True, operation, "has died"), outcomes[rank]


def fail_in_backward() -> tuple[object, ...]:
    pydist.init("native", timeout=1.0)
    model = pydist.DataParallel(nn.Linear(8, 8))
    model(torch.ones(2, 8)).sum().backward()
    loss = model(torch.ones(2, 8)).sum()
    if pydist.rank() == 1:
        time.sleep(4.0)
        return ((1,), True)
    with pytest.raises(Timeout) as caught:
        loss.backward()
    return (caught.value.ranks, caught.value.operation is not None)


def test_blame_comes_out_of_backward() -> None:
    assert run_ranks(fail_in_backward, 2) == [((1,), True), ((1,), True)]


def come_late(backend: str) -> tuple[object, ...]:
    pydist.init(backend, timeout=1.5)
    pydist.barrier()
    if pydist.rank() == 1:
        time.sleep(4.0)
    with pytest.raises(Error) as caught:
        pydist.barrier()
    return type(caught.value), caught.value.ranks, "timed out" in str(caught.value).lower()


@pytest.mark.parametrize("backend", ["native", "gloo"])
def test_a_rank_that_comes_too_late_reads_what_the_others_read(backend: str) -> None:
    for said in run_ranks(come_late, 3, backend):
        assert said == (Timeout, (1,), True)


def hear_of_an_abort(backend: str) -> tuple[object, ...]:
    pydist.init(backend)
    group = pydist.new_group(range(pydist.world_size()))
    pydist.barrier()
    if pydist.rank() == 1:
        time.sleep(0.2)
        pydist.abort("the loss is not finite")
    began = time.monotonic()
    heard = []
    for call in (lambda: pydist.barrier(), lambda: pydist.barrier(group=group)):
        with pytest.raises(Error, match="the loss is not finite") as caught:
            call()
        heard.append(type(caught.value).__name__)
    assert time.monotonic() - began < 20
    return tuple(heard)


@pytest.mark.parametrize("backend", ["native", "gloo"])
def test_abort_ends_all_groups_on_all_ranks(backend: str) -> None:
    assert run_ranks(hear_of_an_abort, 3, backend) == [("Aborted", "Aborted")] * 3


def make_a_group_after_an_abort(backend: str) -> str:
    pydist.init(backend, timeout=20)
    pydist.barrier()
    if pydist.rank() == 0:
        time.sleep(0.2)  # until the other one has left the barrier
        pydist.abort("the loss is not finite")
    began = time.monotonic()
    with pytest.raises(Error, match="the loss is not finite") as caught:
        pydist.new_group([0, 1])
    assert time.monotonic() - began < 10
    return type(caught.value).__name__


@pytest.mark.parametrize("backend", ["native", "gloo"])
def test_an_abort_is_heard_where_groups_are_made(backend: str) -> None:
    assert run_ranks(make_a_group_after_an_abort, 2, backend) == ["Aborted", "Aborted"]


def make_a_group_without_a_rank(backend: str) -> tuple[str, tuple[int, ...]]:
    pydist.init(backend, timeout=20)
    pydist.barrier()
    if pydist.rank() == 1:
        time.sleep(0.3)  # until the other one waits
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(Error, match="has died") as caught:
        pydist.new_group([0, 1])
    assert time.monotonic() - began < 10
    return type(caught.value).__name__, caught.value.ranks


@pytest.mark.parametrize("backend", ["native", "gloo"])
def test_a_death_is_heard_where_groups_are_made(backend: str) -> None:
    first, dead = rank_outcomes(make_a_group_without_a_rank, 2, backend)
    assert first.ok, first.describe()
    assert first.value == ("PeerLost", (1,))
    assert dead.exit_code == -signal.SIGKILL


def keep_meeting() -> None:
    while True:
        pydist.barrier()
        time.sleep(0.01)


def attributes_of_an_abort(backend: str) -> tuple[object, ...]:
    pydist.init(backend)
    pydist.barrier()
    if pydist.rank() == 0:
        threading.Timer(0.2, pydist.abort, ("genug für \0 heute \udc80",)).start()
    with pytest.raises(Aborted) as caught:
        keep_meeting()
    error = caught.value
    place = pydist.job.groups.communicator_of().place_of(0)
    return (error.ranks, (error.host, error.pid) == place, error.cause)


@pytest.mark.parametrize("backend", ["native", "gloo"])
def test_an_abort_names_its_rank_and_reason(backend: str) -> None:
    outcomes = run_ranks(attributes_of_an_abort, 2, backend)
    assert outcomes == [((0,), True, "genug für \\0 heute \\udc80")] * 2


def abort_for_an_exception() -> tuple[object, ...]:
    pydist.init("native")
    if pydist.rank() == 0:
        pydist.barrier()
        pydist.abort(ValueError("nan"))  # type: ignore[arg-type]
    with pytest.raises(Aborted) as caught:
        keep_meeting()
    return (caught.value.ranks, caught.value.cause)


def test_an_exception_will_do_as_the_reason() -> None:
    assert run_ranks(abort_for_an_exception, 2) == [((0,), "nan")] * 2


def test_blame_is_for_another_error() -> None:
    error = Timeout("it timed out", ranks=[2], host="b", pid=7, operation="barrier", cause="slow")
    other = PeerLost("lost", **error.blame)
    assert other.blame == error.blame
    assert other.blame["ranks"] == (2,)


def fail_in_a_step() -> tuple[object, ...]:
    pydist.init("native")
    model = pydist.DataParallel(nn.Linear(8, 8))
    optimizer = pydist.ShardedOptimizer(model, torch.optim.AdamW)

    def closure() -> torch.Tensor:
        if pydist.rank() == 1:
            raise ValueError("no such sample")
        loss: torch.Tensor = model(torch.ones(2, 8)).sum()
        loss.backward()
        return loss

    with pytest.raises((Error, ValueError)) as caught:
        optimizer.step(closure)
    error = caught.value
    if isinstance(error, ValueError):
        return ((1,), True, True)
    return (error.ranks, error.pid is not None, bool(error.cause))


def test_a_vote_names_who_voted_against_it() -> None:
    assert run_ranks(fail_in_a_step, 2) == [((1,), True, True)] * 2


def come_alone() -> tuple[object, ...]:
    if own_rank() == 1:
        return ((1,), "did not join")
    with pytest.raises(Timeout) as caught:
        pydist.init("native", timeout=1.0)
    return (caught.value.ranks, caught.value.cause)


def own_rank() -> int:
    return int(os.environ["RANK"])


def test_who_does_not_join_is_named_by_attributes() -> None:
    assert run_ranks(come_alone, 2) == [((1,), "did not join")] * 2


def test_abort_needs_a_group() -> None:
    with pytest.raises(pydist.InvalidUsage, match=r"nothing to end.*pydist\.init"):
        pydist.abort("nothing to end")


def keep_meeting_by_torch(group: dist.ProcessGroup | None) -> None:
    while True:
        dist.barrier(group=group)
        time.sleep(0.01)


def abort_a_script_of_torchs(backend: str) -> tuple[object, ...]:
    dist.init_process_group(backend)
    group = dist.group.WORLD if backend == "pydist" else dist.new_group([0, 1], backend="pydist")
    if dist.get_rank() == 1:
        dist.barrier(group=group)
        pydist.abort("the loss is not finite")
    with pytest.raises(Aborted, match=r"rank 1 \(pid .* has aborted the job") as caught:
        keep_meeting_by_torch(group)
    return (caught.value.ranks, caught.value.cause)


@pytest.mark.parametrize("backend", ["pydist", "gloo"])
def test_abort_ends_groups_that_a_script_made_by_torch_alone(backend: str) -> None:
    heard = ((1,), "the loss is not finite")
    assert run_ranks(abort_a_script_of_torchs, 2, backend) == [heard] * 2


def abort_beside_gloo() -> None:
    dist.init_process_group("gloo")
    with pytest.raises(pydist.InvalidUsage, match=r"nothing to end"):
        pydist.abort("enough")
    dist.barrier()


def test_a_group_of_torchs_gloo_alone_is_nothing_to_end() -> None:
    run_ranks(abort_beside_gloo, 2)


def put_a_hook_on_top() -> int:
    told = []

    def mine(*_: object) -> None:
        told.append("below")

    sys.excepthook = mine
    pydist.init("native")
    below = sys.excepthook
    sys.excepthook = lambda *error: below(*error)  # as pydist's dumps do, and other tools
    pydist.shutdown()
    pydist.init("native")
    error = ValueError("no such sample")
    sys.excepthook(type(error), error, None)
    with pytest.raises(Aborted, match="has ended with ValueError: no such sample"):
        pydist.barrier()
    return len(told)


def test_hooks_of_others_are_called_once_after_joining_again() -> None:
    assert run_ranks(put_a_hook_on_top, 1) == [1]


def fail_because_of_something() -> None:
    pydist.init("native")
    error = RuntimeError("\n    [Stage 1] failed to run forward:\n")
    error.__cause__ = KeyError("no such part")
    error.__cause__.__cause__ = error  # a circle is none of our business
    sys.excepthook(type(error), error, None)
    said = r"RuntimeError: \[Stage 1\] failed to run forward: \(because of KeyError: 'no such"
    with pytest.raises(Aborted, match=said):
        pydist.barrier()


def test_the_cause_of_an_exception_is_told_with_it() -> None:
    run_ranks(fail_because_of_something, 1)


def fail_in_a_forked_child(file: str) -> float:
    pydist.init("native")
    os.environ["TORCHELASTIC_ERROR_FILE"] = file
    child = os.fork()
    if child == 0:
        error = ValueError("the child's own")
        with suppress(BaseException):
            sys.excepthook(type(error), error, None)
        os._exit(0)
    os.waitpid(child, 0)
    return pydist.all_reduce(torch.ones(1)).item()


def test_an_exception_of_a_forked_child_is_not_told(tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    assert run_ranks(fail_in_a_forked_child, 2, str(file)) == [2.0, 2.0]
    assert not file.exists()


def pids_of_ranks() -> list[int]:
    return [int(pid) for pid in pydist.all_gather(torch.tensor([os.getpid()])).flatten()]


def make_a_group_by(maker: str, ranks: list[int]) -> object:
    if maker == "pydist":
        return pydist.new_group(ranks)
    patience = timedelta(seconds=2)
    return dist.new_group(ranks, timeout=patience, use_local_synchronization=True)


def join_the_others(maker: str) -> None:
    if pydist.rank() == 0:
        pydist.barrier()
    else:
        make_a_group_by(maker, [1, 2])


def name_the_stopped(backend: str, maker: str, stopped: int) -> tuple[object, ...]:
    pydist.init(backend, timeout=2.0)
    make_a_group_by(maker, [0, 1, 2])
    pids = pids_of_ranks()
    rank = pydist.rank()
    pydist.barrier()
    if rank == stopped:
        os.kill(os.getpid(), signal.SIGSTOP)
        return ()
    try:
        with pytest.raises(Timeout) as caught:
            join_the_others(maker)
    finally:
        if rank == 0:
            time.sleep(0.5)  # until the other one has given up, too
            os.kill(pids[stopped], signal.SIGCONT)
    error = caught.value
    assert f"rank {stopped} (pid {pids[stopped]} on host {socket.gethostname()})" in str(error)
    assert "is stopped" in str(error), error
    return error.ranks, error.pid == pids[stopped], error.host == socket.gethostname()


@pytest.mark.parametrize("backend", ["native", "gloo"])
@pytest.mark.parametrize("maker", ["pydist", "torch"])
@pytest.mark.parametrize("stopped", everyday(1, thorough=(2,)))
def test_who_is_stopped_while_a_group_is_made_is_named(
    backend: str, maker: str, stopped: int
) -> None:
    told = run_ranks(name_the_stopped, 3, backend, maker, stopped, timeout=10)
    told[stopped] = ((stopped,), True, True)
    assert told == [((stopped,), True, True)] * 3


def name_who_keeps_the_lowest() -> tuple[int, ...]:
    pydist.init("native", timeout=20.0)
    make_a_group_by("torch", [0, 1, 2])
    pids = pids_of_ranks()
    met = torch.zeros(1)
    if pydist.rank() == 0:
        time.sleep(3.5)
        pydist.send(met, 1)
    elif pydist.rank() == 1:
        pydist.recv(met, 0)
    else:
        with pytest.raises(Timeout, match=r"waits for rank 0") as caught:
            make_a_group_by("torch", [1, 2])
        assert caught.value.pid == pids[0]
        return caught.value.ranks
    return ()


def test_who_keeps_the_lowest_member_from_coming_is_named() -> None:
    """Of a group that torch makes: the lowest member opens the meeting, and waits elsewhere."""
    assert run_ranks(name_who_keeps_the_lowest, 3, timeout=15) == [(), (), (0,)]


def keep_joining_the_others(maker: str) -> None:
    while True:
        join_the_others(maker)


def lose_a_member(maker: str) -> tuple[object, ...]:
    pydist.init("native", timeout=20.0)
    make_a_group_by(maker, [0, 1, 2])
    pids = pids_of_ranks()
    if pydist.rank() == 2:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    with pytest.raises(PeerLost) as caught:
        keep_joining_the_others(maker)
    error = caught.value
    # By the number that it has in the new group, where an operation there has failed already.
    dead = f"rank {error.ranks[0]} (pid {pids[2]} on host"
    assert error.ranks in ((1,), (2,))
    return error.pid == pids[2], dead in str(error), re.findall(r"rank \d+: ", str(error))


@pytest.mark.parametrize("maker", ["pydist", "torch"])
def test_who_dies_while_a_group_is_made_is_named_and_nobody_else(maker: str) -> None:
    outcomes = rank_outcomes(lose_a_member, 3, maker)
    assert [each.value for each in outcomes[:2]] == [(True, True, [])] * 2


def make_a_group_without_memory(maker: str) -> tuple[object, ...]:
    pydist.init("native", timeout=20.0)
    make_a_group_by(maker, [0, 1, 2])
    pids = pids_of_ranks()
    if pydist.rank() == 0:
        return ()
    starved = exhausted("memory", spare=1 << 19) if pydist.rank() == 2 else nullcontext()
    with pytest.raises(pydist.TransportError) as caught, starved:
        make_a_group_by(maker, [1, 2])
    error = caught.value
    named = f"rank 2 (pid {pids[2]} on host {socket.gethostname()})" in str(error)
    return error.ranks, error.pid == pids[2], named, "group '" in str(error)


@pytest.mark.parametrize("maker", ["pydist", "torch"])
def test_who_cannot_take_part_in_a_group_is_named_by_its_number_in_the_job(maker: str) -> None:
    told = run_ranks(make_a_group_without_memory, 3, maker)
    assert told[1:] == [((2,), True, True, True)] * 2
