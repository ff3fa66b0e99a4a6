"""Ctrl-C and signal handlers reach a rank that waits in a collective."""

import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from launch import Ranks, run_command
from thorough import everyday

import pydist
from pydist.job.groups import communicator_of

pytestmark = pytest.mark.timeout(60)

LIMIT_S = 40.0
# A wait looks for signals 20 times a second; the rest is for a busy machine.
SOON_S = 5.0
Runner = Callable[..., list[Any]]


@pytest.fixture(params=everyday("native", thorough=("gloo",)))
def run_two(request: pytest.FixtureRequest) -> Iterator[Runner]:
    with Ranks(2, {"PYDIST_BACKEND": request.param}) as ranks:
        yield lambda function, *args: ranks.run(function, *args, timeout=LIMIT_S)


def signal_soon(number: signal.Signals) -> None:
    """To this process, once its main thread is in the call that comes next."""
    threading.Timer(0.3, os.kill, (os.getpid(), number)).start()


def wait_in(what: str) -> None:
    tensor = torch.ones(3)
    if what == "all_reduce":
        pydist.all_reduce(tensor)
    elif what == "large":
        pydist.all_reduce(torch.ones(1_000_000))
    elif what == "recv":
        pydist.recv(tensor, 0)
    elif what == "work":
        pydist.all_reduce(tensor, async_op=True).wait()
    elif what == "allocation":
        pydist.symmetric_empty(10)
    elif what == "second":
        pydist.all_reduce(tensor, async_op=True)
        pydist.barrier()


def interrupted(what: str) -> str:
    pydist.init(timeout=30)
    if pydist.rank() == 0:
        # Alive, and never comes.
        time.sleep(1.5)
        try:
            pydist.barrier()
        except pydist.Error as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"
    signal_soon(signal.SIGINT)
    began = time.monotonic()
    try:
        wait_in(what)
    except KeyboardInterrupt:
        assert time.monotonic() - began < SOON_S
        if what == "work":
            # The operation goes on, and the group with it.
            return "interrupted"
        with pytest.raises(pydist.Aborted, match="interrupted"):
            pydist.barrier()
        return "interrupted"
    return "nothing"


@pytest.mark.parametrize(
    ("run_two", "what"),
    [
        ("native", "all_reduce"),
        ("native", "large"),
        ("native", "recv"),
        ("native", "second"),
        ("gloo", "all_reduce"),
        *(
            pytest.param("gloo", what, marks=pytest.mark.thorough)
            for what in ("large", "recv", "second")
        ),
    ],
    indirect=["run_two"],
)
def test_ctrl_c_ends_the_wait_and_the_group(run_two: Runner, what: str) -> None:
    peer, rank = run_two(interrupted, what)
    assert rank == "interrupted"
    assert re.match("Aborted: .*rank 1 .*interrupted", peer, re.IGNORECASE), peer


def allocating_handler() -> tuple[int, ...]:
    pydist.init(timeout=30)
    sizes = []
    signal.signal(
        signal.SIGUSR2, lambda *_: sizes.append(pydist.symmetric_empty(7, dtype=torch.int8).numel())
    )
    if pydist.rank() == 0:
        signal_soon(signal.SIGUSR2)
    else:
        time.sleep(1.0)
    sizes.append(pydist.symmetric_empty(5, dtype=torch.int8).numel())
    if pydist.rank() == 1:
        sizes.append(pydist.symmetric_empty(7, dtype=torch.int8).numel())
    return tuple(sorted(sizes))


def test_a_handler_may_allocate_within_an_allocation() -> None:
    with Ranks(2, {"PYDIST_BACKEND": "native"}) as ranks:
        assert ranks.run(allocating_handler, timeout=LIMIT_S) == [(5, 7), (5, 7)]


def slow_handler() -> list[str]:
    pydist.init(timeout=30)

    def handler(_number: int, _frame: object) -> None:
        time.sleep(1.5)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, handler)
    seen = []
    if pydist.rank() == 0:
        signal_soon(signal.SIGINT)
    else:
        time.sleep(0.8)
    try:
        pydist.all_reduce(torch.ones(2))
    except KeyboardInterrupt:
        seen.append("interrupted")
    assert pydist.all_reduce(torch.ones(2)).tolist() == [2.0, 2.0]
    return seen


def test_ctrl_c_after_the_operation_has_ended_leaves_the_group_alone(run_two: Runner) -> None:
    assert run_two(slow_handler) == [["interrupted"], []]


def test_ctrl_c_ends_the_wait_for_a_rank_0_that_is_not_there() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        script = (
            "import os, signal, threading, pydist\n"
            "threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
            "pydist.init(timeout=30)"
        )
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        began = time.monotonic()
        done = run_command(
            [sys.executable, "-c", script],
            env={**env, "RANK": "1", "WORLD_SIZE": "2"},
            timeout=LIMIT_S,
        )
    assert "KeyboardInterrupt" in done.stderr
    assert time.monotonic() - began < 20.0


def interrupted_backward() -> str:
    pydist.init(timeout=30)
    model = pydist.DataParallel(torch.nn.Linear(3, 1))
    if pydist.rank() == 0:
        time.sleep(1.0)
        with pytest.raises(pydist.Error, match="backward raised on rank 1"):
            model(torch.ones(1, 3)).sum().backward()
    else:
        signal_soon(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            model(torch.ones(1, 3)).sum().backward()
        assert model.module.weight.grad is None
    # Nobody has an average that another has not, so all may go on.
    model.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    assert model.module.weight.grad.tolist() == [[1.0] * 3]
    return "went on"


def test_ctrl_c_in_backward_lets_no_rank_train_on_alone(run_two: Runner) -> None:
    assert run_two(interrupted_backward) == ["went on"] * 2


def interrupted_group() -> str:
    pydist.init(timeout=30)
    if pydist.rank() == 0:
        time.sleep(1.0)
    else:
        signal_soon(signal.SIGINT)
    with pytest.raises((KeyboardInterrupt, pydist.Aborted), match=r"^$|rank 1 .*interrupted"):
        pydist.new_group([0, 1])
    # Both have given up the same attempt, and meet at the next.
    group = pydist.new_group([0, 1])
    return str(pydist.all_reduce(torch.ones(1), group=group).item())


@pytest.mark.parametrize("backend", everyday("native", thorough=("gloo",)))
def test_ctrl_c_in_new_group_leaves_the_ranks_in_step(backend: str) -> None:
    with Ranks(2, {"PYDIST_BACKEND": backend}) as ranks:
        assert ranks.run(interrupted_group, timeout=LIMIT_S) == ["2.0", "2.0"]


def interrupted_while_a_group_is_made(late: int) -> tuple[str, tuple[int, ...], float]:
    pydist.init(timeout=30)
    if pydist.rank() == 1:
        signal_soon(signal.SIGINT)
    elif pydist.rank() == late:
        time.sleep(1.5)
    began = time.monotonic()
    outcome: tuple[str, tuple[int, ...]] = ("nothing", ())
    try:
        pydist.new_group([0, 1, 2])
    except KeyboardInterrupt:
        outcome = ("interrupted", ())
    except pydist.Aborted as error:
        told = re.search("rank 1 .*interrupted", str(error))
        outcome = ("told" if told else str(error), error.ranks)
    assert time.monotonic() - began < SOON_S
    group = pydist.new_group([0, 1, 2])
    return (*outcome, pydist.all_reduce(torch.ones(1), group=group).item())


@pytest.mark.parametrize(
    ("backend", "late"),
    [
        ("native", 0),
        ("gloo", 2),
        pytest.param("native", 2, marks=pytest.mark.thorough),
        pytest.param("gloo", 0, marks=pytest.mark.thorough),
    ],
)
def test_ctrl_c_while_a_group_is_made_is_told_to_all_whenever_they_come(
    backend: str, late: int
) -> None:
    told, interrupted = ("told", (1,), 3.0), ("interrupted", (), 3.0)
    with Ranks(3, {"PYDIST_BACKEND": backend}) as ranks:
        outcomes = ranks.run(interrupted_while_a_group_is_made, late, timeout=LIMIT_S)
    assert outcomes == [told, interrupted, told]


def interrupted_allocation() -> str:
    return interrupted("allocation")


def test_ctrl_c_ends_an_allocation() -> None:
    with Ranks(2, {"PYDIST_BACKEND": "native"}) as ranks:
        peer, rank = ranks.run(interrupted_allocation, timeout=LIMIT_S)
    assert rank == "interrupted"
    assert peer.startswith("Aborted: rank 1")


def interrupted_work() -> float:
    pydist.init(timeout=30)
    tensor = torch.full((3,), pydist.rank() + 1.0)
    if pydist.rank() == 0:
        time.sleep(1.0)
        pydist.all_reduce(tensor)
        return tensor.sum().item()
    signal_soon(signal.SIGINT)
    work = pydist.all_reduce(tensor, async_op=True)
    with pytest.raises(KeyboardInterrupt):
        work.wait()
    work.wait()
    return tensor.sum().item()


def test_ctrl_c_leaves_an_asynchronous_operation_alone(run_two: Runner) -> None:
    assert run_two(interrupted_work) == [9.0, 9.0]


def handled(number: int) -> tuple[float, list[str]]:
    pydist.init(timeout=30)
    seen: list[str] = []

    def handler(_number: int, _frame: object) -> None:
        # May look at the group that the interrupted call waits for.
        communicator_of().whereabouts()
        seen.append(f"{pydist.rank()} was called")

    signal.signal(number, handler)
    tensor = torch.full((3,), pydist.rank() + 1.0)
    if pydist.rank() == 0:
        time.sleep(1.0)
    else:
        signal_soon(signal.Signals(number))
    began = time.monotonic()
    pydist.all_reduce(tensor)
    if pydist.rank() == 1:
        assert time.monotonic() - began > 0.5
    return tensor.sum().item(), seen


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_handler_that_returns_lets_the_wait_go_on(run_two: Runner, number: int) -> None:
    assert run_two(handled, int(number)) == [(9.0, []), (9.0, ["1 was called"])]


def aborting_handler() -> str:
    pydist.init(timeout=30)
    if pydist.rank() == 1:
        time.sleep(1.5)
        return ""
    signal.signal(signal.SIGTERM, lambda *_: communicator_of().abort("preempted"))
    signal_soon(signal.SIGTERM)
    try:
        pydist.all_reduce(torch.ones(3))
    except pydist.Aborted as error:
        return str(error)
    return "nothing"


def test_a_handler_may_abort_the_group(run_two: Runner) -> None:
    assert "preempted" in run_two(aborting_handler)[0]


def shut_down_elsewhere() -> None:
    thread = threading.Thread(target=pydist.shutdown)
    thread.start()
    thread.join()


def handler_that_shuts_down(is_here: bool) -> str:
    pydist.init(timeout=30)
    if pydist.rank() == 1:
        time.sleep(1.5)
        return ""
    end = pydist.shutdown if is_here else shut_down_elsewhere
    signal.signal(signal.SIGTERM, lambda *_: end())
    signal_soon(signal.SIGTERM)
    began = time.monotonic()
    with pytest.raises(pydist.Aborted, match=r"shut ?down"):
        pydist.all_reduce(torch.ones(3))
    assert time.monotonic() - began < SOON_S
    return "ended"


@pytest.mark.parametrize("is_here", [True, False], ids=["here", "elsewhere"])
def test_a_handler_may_shut_down(run_two: Runner, is_here: bool) -> None:
    assert run_two(handler_that_shuts_down, is_here)[0] == "ended"


def handler_that_reduces() -> tuple[float, list[str]]:
    pydist.init(timeout=30)
    seen: list[str] = []
    sent: list[pydist.Work] = []

    def handler(_number: int, _frame: object) -> None:
        try:
            pydist.all_reduce(torch.ones(1))
        except pydist.InvalidUsage as error:
            seen.append(str(error))
        # Messages go by themselves.
        sent.append(pydist.send(torch.tensor([5.0]), 1, async_op=True))

    signal.signal(signal.SIGUSR2, handler)
    if pydist.rank() == 0:
        signal_soon(signal.SIGUSR2)
    else:
        time.sleep(1.0)
    reduced = pydist.all_reduce(torch.ones(3)).sum().item()
    if pydist.rank() == 1:
        message = torch.zeros(1)
        pydist.recv(message, 0)
        reduced += message.item()
    for work in sent:
        work.wait()
    return reduced, seen


def handler_amid_a_gather() -> float:
    pydist.init(timeout=30)
    began = time.monotonic()
    called = 0.0

    def handler(_number: int, _frame: object) -> None:
        nonlocal called
        called = time.monotonic() - began

    signal.signal(signal.SIGUSR2, handler)
    if pydist.rank() == 0:
        signal_soon(signal.SIGUSR2)
    else:
        time.sleep(1.5)
    pydist.gather(torch.ones(1_000_000), 0)
    return called


def test_a_handler_runs_amid_a_gather(run_two: Runner) -> None:
    called, other = run_two(handler_amid_a_gather)
    assert 0.0 < called < 1.2
    assert other == 0.0


# On the native backend it would wait for the other ranks to do the same.
def test_on_gloo_a_handler_may_not_reduce_while_a_collective_waits() -> None:
    with Ranks(2, {"PYDIST_BACKEND": "gloo"}) as ranks:
        (interrupted, (words,)), other = ranks.run(handler_that_reduces, timeout=LIMIT_S)
    assert (interrupted, other) == (6.0, (11.0, []))
    assert "called while this thread is in another one of it: by a signal handler" in words


def interrupted_meeting() -> str:
    if pydist_rank() == 0:
        time.sleep(1.0)
        return ""
    signal_soon(signal.SIGINT)
    began = time.monotonic()
    try:
        pydist.init(timeout=30)
    except KeyboardInterrupt:
        assert time.monotonic() - began < SOON_S
        return "interrupted"
    return "nothing"


def pydist_rank() -> int:
    return int(os.environ["RANK"])


def test_ctrl_c_ends_the_meeting(run_two: Runner) -> None:
    assert run_two(interrupted_meeting)[1] == "interrupted"


def interrupted_weighted_backward() -> str:
    pydist.init(timeout=30)
    model = pydist.DataParallel(torch.nn.Linear(3, 1, bias=False))
    if pydist.rank() == 0:
        time.sleep(1.0)
        with pytest.raises(pydist.Error, match="raised on rank 1"), model.weighted(1):
            model(torch.ones(1, 3)).sum().backward()
    else:
        signal_soon(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), model.weighted(1):
            model(torch.ones(1, 3)).sum().backward()
    model.zero_grad()
    with model.weighted(3 * pydist.rank() + 1):
        model(torch.full((1, 3), pydist.rank() * 5.0)).sum().backward()
    assert model.weight.grad.tolist() == [[4.0] * 3]
    return "went on"


def test_ctrl_c_in_a_weighted_backward_lets_no_rank_train_on_alone(run_two: Runner) -> None:
    assert run_two(interrupted_weighted_backward) == ["went on"] * 2
