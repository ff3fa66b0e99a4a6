"""What ranks on other hosts read when a process, a host or the network between them fails.

Ranks 0 and 1 are on one host, rank 2 is on another.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hosts_or_skip import hosts_or_skip
from namespaces import Hosts
from rank_process import Outcome
from ranks_on import rank_outcomes_on, run_ranks_on
from thorough import everyday
from time_limit import PATIENCE

import pydist

pytestmark = pytest.mark.timeout(180)

RANKS_PER_HOST = (2, 1)
NATIVE = {"PYDIST_BACKEND": "native", "PYDIST_JOB_SECRET": "0123456789abcdef" * 2}


def loop(on_step: Callable[[int], None], count: int, timeout_s: float) -> tuple[Any, ...]:
    """Reduces until that raises: the error's class, whom it names, how long the last call took."""
    pydist.init(timeout=timeout_s)
    tensor = torch.ones(count)
    step = 0
    while True:
        on_step(step)
        began = time.monotonic()
        try:
            pydist.all_reduce(tensor)
        except pydist.Error as error:
            took = time.monotonic() - began
            if isinstance(error, pydist.Timeout) and os.environ["RANK"] == "0":
                os.kill(error.pid, signal.SIGKILL)  # it is stopped, and would not end
            return type(error).__name__, error.ranks, error.host, took, str(error)
        step += 1


def nothing(step: int) -> None:
    pass


def die_with_a_child(step: int) -> None:
    if step == 5 and os.environ["RANK"] == "2":
        if os.fork() == 0:  # as a data loader's worker, which outlives it
            time.sleep(20)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)


def leave_at(step: int) -> None:
    if step == 5 and os.environ["RANK"] == "2":
        pydist.shutdown()
        raise ValueError("a fault on purpose")


def stop_at(step: int) -> None:
    if step == 5 and os.environ["RANK"] == "2":
        os.kill(os.getpid(), signal.SIGSTOP)


def others(outcomes: list[Outcome]) -> list[tuple[Any, ...]]:
    for outcome in outcomes[:2]:
        assert outcome.ok, outcome.describe()
    return [outcome.value for outcome in outcomes[:2]]


@pytest.mark.parametrize("count", everyday(500_000, thorough=(3,)))
def test_a_process_that_dies_is_named_at_once(hosts: Hosts, count: int) -> None:
    outcomes = rank_outcomes_on(
        hosts, RANKS_PER_HOST, loop, die_with_a_child, count, 60, env=NATIVE
    )
    for name, ranks, host, took, text in others(outcomes):
        assert (name, ranks) == ("PeerLost", (2,)), text
        assert host
        assert took < 2 * PATIENCE, text


def test_a_rank_that_leaves_is_named(hosts: Hosts) -> None:
    outcomes = rank_outcomes_on(hosts, RANKS_PER_HOST, loop, leave_at, 500_000, 60, env=NATIVE)
    assert outcomes[2].error == "ValueError"
    for name, ranks, _, took, text in others(outcomes):
        assert (name, ranks) == ("PeerLost", (2,)), text
        assert took < 5 * PATIENCE, text


def test_a_process_that_is_stopped_is_named_at_the_deadline(hosts: Hosts) -> None:
    outcomes = rank_outcomes_on(hosts, RANKS_PER_HOST, loop, stop_at, 3, 4, timeout=20, env=NATIVE)
    for name, ranks, _, took, text in others(outcomes):
        assert (name, ranks) == ("Timeout", (2,)), text
        assert 3.5 < took < 4 + 3 * PATIENCE, text
        assert "has shown no sign of life" in text


# Five hosts, on which ranks hear of each other through others.
IN_ROUNDS = {**NATIVE, "PYDIST_ROUNDS_FROM": "2"}


@pytest.mark.parametrize(
    ("fault", "error"),
    [(die_with_a_child, "PeerLost"), (leave_at, "PeerLost"), (stop_at, "Timeout")],
)
@pytest.mark.parametrize("count", everyday(3, thorough=(30_000,)))
def test_who_fails_in_rounds_is_named_by_all(
    fault: Callable[[int], None], error: str, count: int
) -> None:
    with hosts_or_skip(5) as hosts:
        outcomes = rank_outcomes_on(
            hosts, (1,) * 5, loop, fault, count, 4, timeout=30, env=IN_ROUNDS
        )
    for rank in (0, 1, 3, 4):
        assert outcomes[rank].ok, outcomes[rank].describe()
        name, ranks, _, took, text = outcomes[rank].value
        assert (name, ranks) == (error, (2,)), text
        assert took < 4 + 3 * PATIENCE, text


def test_a_host_that_is_cut_off_is_lost_within_ten_seconds() -> None:
    with hosts_or_skip(2) as hosts:
        cut_at = []

        def cut() -> None:
            cut_at.append(time.monotonic())
            hosts[1].cut(silently=True)

        timer = threading.Timer(3, cut)
        timer.start()
        try:
            outcomes = rank_outcomes_on(
                hosts, RANKS_PER_HOST, loop, nothing, 3, 120, timeout=40, env=NATIVE
            )
        finally:
            timer.join()
        for name, ranks, _, took, text in others(outcomes):
            assert (name, ranks) == ("PeerLost", (2,)), text
            assert took < 10 + PATIENCE, text
        lonely = outcomes[2]
        assert lonely.ok, lonely.describe()
        assert lonely.value[0] == "PeerLost", lonely.value


def files_shared() -> set[tuple[int, int]]:
    """The memory that this process has in common with others, by device and inode."""
    pydist.init()
    pydist.all_reduce(torch.ones(100_000))
    shared = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split()
        if len(fields) > 5 and fields[5].startswith("/memfd:") and fields[1][3] == "s":
            shared.add((int(fields[3].replace(":", ""), 16), int(fields[4])))
    pydist.barrier()
    return shared


def test_hosts_share_no_memory(hosts: Hosts) -> None:
    first, second, other = run_ranks_on(hosts, RANKS_PER_HOST, files_shared, env=NATIVE)
    assert first & second, "ranks of a host do"
    assert not (first | second) & other
