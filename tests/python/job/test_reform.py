"""`pydist.reform`: those that are left of a job go on, and nobody else takes part."""

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import free_port, rank_outcomes, run_ranks
from survivors_of import die, survivors_of
from thorough import everyday
from torch import nn

import pydist
from pydist.job import backend_choice, current, membership, past, processes
from pydist.job.recovery import reforming, survivors

pytestmark = pytest.mark.timeout(60)

LIMIT_S = 40.0


def total() -> float:
    return pydist.all_reduce(torch.ones(1)).item()


def lose(victims: list[int], **settings: Any) -> None:
    """Ranks die, and the others form a job of their own."""
    if pydist.rank() in victims:
        die()
    with pytest.raises(pydist.Error):
        total()
    pydist.reform(**settings)


def go_on(backend: str, victims: list[int]) -> tuple[Any, ...]:
    pydist.init(backend, timeout=30)
    model = pydist.DataParallel(nn.Linear(2, 1))
    group = pydist.new_group(range(pydist.world_size()))
    lose(victims)
    with pytest.raises(pydist.InvalidUsage, match="shut down"):
        pydist.all_reduce(torch.ones(1), group=group)
    with pytest.raises(pydist.InvalidUsage, match="shut down"):
        model(torch.ones(1, 2)).sum().backward()
    model = pydist.DataParallel(model.module)
    model.zero_grad()
    model(torch.full((1, 2), 1.0 + pydist.rank())).sum().backward()
    by_torch = torch.ones(1)
    dist.all_reduce(by_torch)
    return (
        pydist.rank(),
        pydist.world_size(),
        pydist.local_rank(),
        pydist.local_world_size(),
        pydist.backend(),
        total(),
        by_torch.item(),
        model.module.weight.grad[0, 0].item(),
        [int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")],
    )


@pytest.mark.parametrize(
    ("backend", "nprocs", "victims"),
    [
        ("native", 2, [0]),
        ("native", 4, [0, 2]),
        ("gloo", 3, [0]),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in [
                ("native", 2, [1]),
                *[("native", 3, [rank]) for rank in range(3)],
                *[("native", 4, [rank]) for rank in range(4)],
                ("native", 4, [1, 3]),
                ("native", 4, [0, 1, 2]),
                ("gloo", 2, [0]),
                ("gloo", 2, [1]),
                ("gloo", 3, [1]),
                ("gloo", 3, [2]),
                *[("gloo", 4, [rank]) for rank in range(4)],
                ("gloo", 4, [0, 3]),
            ]
        ),
    ],
)
def test_survivors_go_on(backend: str, nprocs: int, victims: list[int]) -> None:
    outcomes = rank_outcomes(go_on, nprocs, backend, victims, timeout=LIMIT_S)
    left = nprocs - len(victims)
    assert survivors_of(outcomes, victims) == [
        (rank, left, rank, left, backend, left, left, (left + 1) / 2, [rank, left, rank])
        for rank in range(left)
    ]
    first = next(outcome for outcome in outcomes if outcome.ok)
    rank = victims[0]
    said = rf"generation 2 of the job goes on with {left} ranks?: rank {rank} \(pid \d+ .* has died"
    assert re.search(said, first.output), first.output


def go_on_twice() -> tuple[int, int, float, int]:
    pydist.init(timeout=30)
    lose([2])
    lose([0])
    return pydist.rank(), pydist.world_size(), total(), current.job.generation


def test_survivors_of_survivors_go_on() -> None:
    outcomes = rank_outcomes(go_on_twice, 4, timeout=LIMIT_S)
    assert survivors_of(outcomes, [0, 2]) == [(0, 2, 2.0, 3), (1, 2, 2.0, 3)]


def reform_without_a_failure() -> list[tuple[int, int, float]]:
    seen = []
    pydist.init(timeout=30)
    for _ in range(2):
        pydist.reform()
        seen.append((pydist.rank(), pydist.world_size(), total()))
        pydist.shutdown()
        pydist.reform()  # after a shutdown, too
        pydist.shutdown()
        pydist.init(timeout=30)
    return seen


def test_all_may_go_on() -> None:
    for nprocs in (1, 2):
        expected = [[(rank, nprocs, nprocs)] * 2 for rank in range(nprocs)]
        assert run_ranks(reform_without_a_failure, nprocs, timeout=LIMIT_S) == expected


def what_is_left() -> tuple[set[str], set[str], int]:
    """Threads by name, open files by kind, and mapped shared segments."""
    threads = {(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()}
    files = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            target = os.readlink(entry)
            if target.startswith(("socket:", "/memfd:", "/dev/shm/", "anon_inode:[pidfd]")):
                files.add(target)
    maps = Path("/proc/self/maps").read_text()
    return threads, files, maps.count("/memfd:") + maps.count("/dev/shm/")


def leave_after_losses(backend: str) -> tuple[set[str], set[str], int]:
    pydist.init(backend, timeout=30)
    total()
    pydist.shutdown()
    before = what_is_left()
    pydist.init(backend, timeout=30)
    for victim in (3, 2):
        total()
        lose([victim])
        pydist.all_reduce(pydist.symmetric_empty(1000).zero_())
    total()
    pydist.shutdown()
    after = what_is_left()
    return after[0] - before[0], after[1] - before[1], after[2]


@pytest.mark.parametrize("backend", everyday("native", thorough=("gloo",)))
def test_nothing_is_left_behind(backend: str) -> None:
    outcomes = rank_outcomes(leave_after_losses, 4, backend, timeout=LIMIT_S)
    assert survivors_of(outcomes, [2, 3]) == [(set(), set(), 0)] * 2


# Where a rank is in reform: what it is about to call.
PHASES: dict[str, tuple[Any, str]] = {
    "before it tells that it is here": (survivors, "_decide"),
    "before it confirms": (survivors, "_confirm"),
    "before it joins": (membership, "enter"),
    "as it tells of itself": (backend_choice, "agree"),
    "as it makes its communicator": (backend_choice._Meeting, "create"),
}


def at(phase: str, act: Callable[[], None]) -> None:
    """Lets this process do something in that phase, once."""
    owner, name = PHASES[phase]
    original = getattr(owner, name)

    def instead(*args: Any, **kwargs: Any) -> Any:
        setattr(owner, name, original)
        act()
        return original(*args, **kwargs)

    setattr(owner, name, instead)


def lose_another_meanwhile(backend: str, phase: str) -> tuple[int, int, float]:
    pydist.init(backend, timeout=30)
    victim = pydist.rank() == 1
    if pydist.rank() == 0:
        die()
    with pytest.raises(pydist.Error):
        total()
    if victim:
        at(phase, die)
    began_s = time.monotonic()
    pydist.reform(settle=25)
    try:
        summed = total()
    except pydist.PeerLost:  # it had joined before the other died
        pydist.reform(settle=25)
        summed = total()
    # All can see that it has died, and wait for nobody else.
    assert time.monotonic() - began_s < 20
    return pydist.rank(), pydist.world_size(), summed


@pytest.mark.parametrize(
    ("backend", "phase"),
    [
        *(("native", phase) for phase in PHASES),
        *(pytest.param("gloo", phase, marks=pytest.mark.thorough) for phase in PHASES),
    ],
)
def test_a_rank_may_die_while_the_others_form_a_job(backend: str, phase: str) -> None:
    outcomes = rank_outcomes(lose_another_meanwhile, 4, backend, phase, timeout=LIMIT_S)
    assert survivors_of(outcomes, [0, 1]) == [(0, 2, 2.0), (1, 2, 2.0)]


def freeze_meanwhile(backend: str, phase: str) -> Any:
    pydist.init(backend, timeout=30)
    me = pydist.rank()
    known = past.last()
    assert known is not None
    frozen = known.processes[1].pid
    if me == 0:
        die()
    with pytest.raises(pydist.Error):
        total()
    if me == 1:
        at(phase, lambda: os.kill(os.getpid(), signal.SIGSTOP))
        with pytest.raises(pydist.Aborted) as caught:
            pydist.reform(settle=1)
        assert not pydist.is_initialized()
        with pytest.raises(pydist.Aborted):
            pydist.reform(settle=1)
        return str(caught.value)
    pydist.reform(settle=1)
    seen = (pydist.rank(), pydist.world_size(), total())
    if pydist.rank() == 0:
        os.kill(frozen, signal.SIGCONT)
    return seen


@pytest.mark.parametrize(
    ("backend", "phase"),
    [
        ("native", "before it tells that it is here"),
        ("native", "before it confirms"),
        pytest.param("gloo", "before it tells that it is here", marks=pytest.mark.thorough),
        pytest.param("gloo", "before it confirms", marks=pytest.mark.thorough),
    ],
)
def test_a_frozen_rank_is_left_behind_and_learns_it(backend: str, phase: str) -> None:
    outcomes = rank_outcomes(freeze_meanwhile, 4, backend, phase, timeout=LIMIT_S)
    late, *others = survivors_of(outcomes, [0])
    assert others == [(0, 2, 2.0), (1, 2, 2.0)]
    assert re.search(r"rank [01] \(pid \d+ .*came too late: 2 other ranks went on without it", late)


def fall_short() -> list[str]:
    pydist.init(timeout=30)
    if pydist.rank() == 1:
        die()
    with pytest.raises(pydist.Error):
        total()
    said = []
    # The largest number counts, whoever asks for it.
    for least in (pydist.rank() + 1, 4):
        with pytest.raises(pydist.PeerLost) as caught:
            pydist.reform(min_ranks=least)
        said.append(str(caught.value))
        assert not pydist.is_initialized()
    pydist.reform(min_ranks=2)
    assert total() == 2.0
    return said


def test_too_few_ranks_all_raise_and_may_try_again() -> None:
    outcomes = rank_outcomes(fall_short, 3, timeout=LIMIT_S)
    for said in survivors_of(outcomes, [1]):
        for least, text in zip((3, 4), said, strict=True):
            assert re.match(
                rf"2 of 3 ranks are left, and min_ranks={least} are needed to go on: "
                r"rank 1 \(pid \d+ on host .*\) has died",
                text,
            )


SERVED_BY_RANK_0 = {"TORCHELASTIC_USE_AGENT_STORE": None, "TORCHELASTIC_RESTART_COUNT": None}


def lose_the_store(victim: int, port: str) -> Any:
    os.environ["MASTER_PORT"] = port
    pydist.init(timeout=30)
    if pydist.rank() == victim:
        die()
    with pytest.raises(pydist.Error):
        total()
    try:
        pydist.reform()
    except pydist.TransportError as error:
        return str(error)
    return total()


@pytest.mark.parametrize(
    ("victim", "said"), [(0, r"rank 0 \(pid \d+ .*served the store"), (1, 2.0)]
)
def test_a_store_that_rank_0_serves_is_there_as_long_as_rank_0(victim: int, said: Any) -> None:
    port = str(free_port())
    outcomes = rank_outcomes(lose_the_store, 3, victim, port, timeout=LIMIT_S, env=SERVED_BY_RANK_0)
    for value in survivors_of(outcomes, [victim]):
        if isinstance(said, str):
            assert re.match(said, value), value
        else:
            assert value == said


def lose_the_store_out_of_sight(port: str) -> Any:
    """As where rank 0 is on another host: nobody sees that its process has died."""
    reforming._STORE_AWAY_S = 1.0
    processes.Process.is_known_dead = property(lambda _: False)  # type: ignore[assignment]
    return lose_the_store(0, port)


def test_a_store_at_which_nothing_answers_is_gone() -> None:
    port = str(free_port())
    outcomes = rank_outcomes(
        lose_the_store_out_of_sight, 3, port, timeout=LIMIT_S, env=SERVED_BY_RANK_0
    )
    for text in survivors_of(outcomes, [0]):
        said = rf"nothing has answered at the job's store, 127.0.0.1:{port}, for 1 s, .*"
        assert re.match(said + r"rank 0 \(pid \d+ .*, which serves it, has died", text), text


def lose_two_with_the_store_of_rank_0(port: str) -> float:
    os.environ["MASTER_PORT"] = port
    pydist.init(timeout=30)
    lose([3])
    if pydist.rank() == 2:
        die()
    with pytest.raises(pydist.Error):
        total()
    if pydist.rank() == 0:
        time.sleep(1.0)  # rank 1 comes before it
    pydist.reform()
    return total()


def test_a_store_that_rank_0_serves_is_the_same_the_next_time() -> None:
    port = str(free_port())
    outcomes = rank_outcomes(
        lose_two_with_the_store_of_rank_0, 4, port, timeout=LIMIT_S, env=SERVED_BY_RANK_0
    )
    assert survivors_of(outcomes, [2, 3]) == [2.0, 2.0]


def freeze_the_store(port: str) -> Any:
    os.environ["MASTER_PORT"] = port
    pydist.init(timeout=5)
    known = past.last()
    assert known is not None
    frozen = known.processes[0].pid
    if pydist.rank() == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
        return None
    with pytest.raises(pydist.Error):
        total()
    began = time.monotonic()
    try:
        pydist.reform(timeout=4, settle=1)
    except pydist.Error as error:
        return type(error).__name__, str(error)
    finally:
        assert time.monotonic() - began < 25
        if pydist_rank() == 1:
            time.sleep(3)
            os.kill(frozen, signal.SIGCONT)
    return None


def pydist_rank() -> int:
    return int(os.environ["RANK"])


def test_a_frozen_store_is_no_wait_for_ever() -> None:
    port = str(free_port())
    _, *others = run_ranks(freeze_the_store, 3, port, timeout=LIMIT_S, env=SERVED_BY_RANK_0)
    for kind, _ in others:
        assert kind in ("TransportError", "Timeout")


def init_again() -> tuple[str, float, float]:
    pydist.init(timeout=30)
    if pydist.rank() == int(os.environ["VICTIM"]):
        die()
    with pytest.raises(pydist.Error):
        total()
    pydist.shutdown()
    began = time.monotonic()
    with pytest.raises(pydist.PeerLost) as caught:
        pydist.init(timeout=30)
    took_s = time.monotonic() - began
    pydist.reform()
    return str(caught.value), took_s, total()


@pytest.mark.parametrize("victim", [0, 2])
def test_init_does_not_wait_for_the_dead(victim: int) -> None:
    outcomes = rank_outcomes(init_again, 3, timeout=LIMIT_S, env={"VICTIM": str(victim)})
    for said, took_s, summed in survivors_of(outcomes, [victim]):
        assert took_s < 20
        assert re.match(rf"rank {victim} \(pid \d+ on host .*\) has died and can't join", said)
        assert summed == 2.0


def replace_a_group_of_the_script() -> tuple[int, int, float]:
    dist.init_process_group("gloo")
    pydist.init(timeout=30)
    if pydist.rank() == 1:
        die()
    with pytest.raises(pydist.Error):
        total()
    with pytest.raises(pydist.InvalidUsage, match=r"destroy_process_group\(\), and then"):
        pydist.reform()
    dist.destroy_process_group()
    pydist.reform()
    return pydist.rank(), dist.get_world_size(), total()


def test_a_group_of_the_script_is_the_scripts_to_destroy() -> None:
    outcomes = rank_outcomes(replace_a_group_of_the_script, 3, timeout=LIMIT_S)
    assert survivors_of(outcomes, [1]) == [(0, 2, 2.0), (1, 2, 2.0)]


def test_what_is_asked_for_must_make_sense(monkeypatch: pytest.MonkeyPatch) -> None:
    pydist.shutdown()
    monkeypatch.setattr(past, "_last", None)
    for settings, said in (
        ({"min_ranks": 0}, "min_ranks=0"),
        ({"settle": -1}, "settle=-1"),
        ({}, "in no job"),
    ):
        with pytest.raises(pydist.InvalidUsage, match=said):
            pydist.reform(**settings)
