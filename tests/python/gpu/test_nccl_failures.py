"""How NCCL fails, as users see it: on the fakes, which fail as they are told (FAKE_NCCL_FAULT).

Every detail is the C++ tests' (tests/cpp/communicator/nccl/nccl_communicator_test.cc).
"""

from __future__ import annotations

import atexit
import os
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import NamedTuple

import fake_nccl
import gpu_ranks
import pytest
import torch
import torch.distributed as dist
from gpu_ranks import needs_gpu_ranks
from launch import Ranks, rank_outcomes, run_ranks
from thorough import everyday
from training import LIMIT_S, TIME_LIMIT, joined

import pydist
from pydist.job import groups

pytestmark = [
    needs_gpu_ranks,
    pytest.mark.skipif(gpu_ranks.IS_REAL, reason="a real NCCL does not fail as it is told"),
    TIME_LIMIT,
]

NCCL: dict[str, str | None] = {"PYDIST_BACKEND": "nccl"}
AUTO: dict[str, str | None] = {"PYDIST_BACKEND": "auto"}


class Seen(NamedTuple):
    """What a rank saw of a failure."""

    kind: type[BaseException]
    message: str
    seconds: float
    ranks: tuple[int, ...]
    pid: int | None


def three_collectives(fault: str, timeout_s: float) -> Seen:
    """Joins, and reduces three times, while NCCL has a fault."""
    os.environ["FAKE_NCCL_FAULT"] = fault
    gpu_ranks.install()
    began = time.monotonic()
    try:
        joined()
        tensor = torch.ones(1000, device="cuda")
        for _ in range(3):
            pydist.all_reduce(tensor, async_op=True).wait(timeout=timeout_s)
    except pydist.Error as error:
        seconds = time.monotonic() - began
        return Seen(type(error), str(error), seconds, error.ranks, error.pid)
    finally:
        del os.environ["FAKE_NCCL_FAULT"]
        pydist.shutdown()
    raise AssertionError(f"nothing failed with {fault}")


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2, NCCL) as ranks:
        yield ranks


def fail(ranks: Ranks, fault: str, timeout_s: float = 20.0) -> list[Seen]:
    seen: list[Seen] = ranks.run(three_collectives, fault, timeout_s, timeout=LIMIT_S)
    return seen


def test_joining_fails_alike_on_all_ranks(two: Ranks) -> None:
    for seen in fail(two, "init_fail:1:0"):
        assert seen.kind is pydist.TransportError
        assert "Rank 1: joining the group: NCCL 2.30.7 says: unhandled system error" in seen.message
        assert seen.ranks == (1,)
        assert seen.pid is not None
        assert seen.seconds < 15


def test_an_asynchronous_error_reaches_all_ranks(two: Ranks) -> None:
    for seen in fail(two, "async:1:2"):
        assert seen.kind is pydist.PeerLost
        assert "all_reduce #2 on rank 1 of 2" in seen.message
        assert "remote process exited" in seen.message
        assert seen.seconds < 15


def test_a_time_out_of_nccls_own_says_where_the_ranks_are(two: Ranks) -> None:
    for seen in fail(two, "timeout:0:2"):
        assert seen.kind is pydist.Timeout
        assert "NCCL 2.30.7 says: timeout" in seen.message
        assert "is in all_reduce #2" in seen.message
        assert "rank 1 (" in seen.message


def behind_one_that_leaves(host: str) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if host == "gloo":
        os.environ["PYDIST_HOST_ID"] = f"host {rank}"
        os.environ["PYDIST_INTERFACE"] = "none0"  # so native can't join hosts
    os.environ["FAKE_NCCL_FAULT"] = "late:0:2"
    gpu_ranks.install()
    joined()
    tensor = torch.ones(1000, device="cuda")
    pydist.all_reduce(tensor)
    work = pydist.all_reduce(tensor, async_op=True)
    if rank == 0:
        work.wait(timeout=20.0)  # a second and a half after the others have left
        assert bool((tensor == size * size).all())
        with pytest.raises(pydist.PeerLost, match=r"rank . .*has left"):
            pydist.all_reduce(tensor, async_op=True).wait(timeout=20.0)
    pydist.shutdown()  # waits for what is under way


@pytest.mark.parametrize("host", everyday("native", thorough=("gloo",)))
def test_what_a_rank_did_before_it_left_comes_to_its_end(host: str) -> None:
    run_ranks(behind_one_that_leaves, 3, host, env=NCCL)


def behind_one_that_ends(host: str) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if host == "gloo":
        os.environ["PYDIST_HOST_ID"] = f"host {rank}"
        os.environ["PYDIST_INTERFACE"] = "none0"  # so native can't join hosts
    os.environ["FAKE_NCCL_FAULT"] = "late:0:2"
    gpu_ranks.install()
    dist.init_process_group("pydist", timeout=timedelta(seconds=20))
    tensor = torch.ones(1000, device="cuda")
    dist.all_reduce(tensor)
    gpu_ranks.synchronize()
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    work.wait()
    if rank == 0:
        assert bool((tensor == size * size).all())
    else:
        atexit._run_exitfuncs()  # a script that ends without destroy_process_group()


@pytest.mark.parametrize("host", everyday("native", thorough=("gloo",)))
def test_what_a_rank_did_before_its_script_ended_comes_to_its_end(host: str) -> None:
    run_ranks(behind_one_that_ends, 3, host, env=NCCL)


def test_an_abort_that_hangs_is_left_to_itself() -> None:
    # Ranks of their own: what hangs stays in the process.
    fault = "async:1:1,hang_abort:0:0,hang_abort:1:0"
    for seen in run_ranks(three_collectives, 2, fault, 20.0, env=NCCL, timeout=35):
        assert seen.kind is pydist.PeerLost
        assert seen.seconds < 20, "ten of them are the abort's"


def test_a_version_that_is_too_old_is_named(two: Ranks) -> None:
    env = {**NCCL, "FAKE_NCCL_VERSION": "21706"}
    for outcome in rank_outcomes(everyday, 2, env=env, timeout=LIMIT_S):
        assert outcome.error == "TransportError"
        assert "is version 2.17.6; pydist needs 2.18.0" in outcome.message


def everyday(nccl: str = "fake_nccl", *ranks: int) -> str:
    """Joins and reduces; the given ranks, or all, on another NCCL."""
    if not ranks or int(os.environ["RANK"]) in ranks:
        fake_nccl.install(nccl)
    gpu_ranks.install()
    _, size = joined()
    tensor = torch.ones(10, device="cuda")
    pydist.all_reduce(tensor)
    assert tensor[0].item() == size
    return pydist.backend()


@pytest.mark.parametrize("ranks", [(), (1,)])
def test_a_library_that_lacks_something_is_named(ranks: tuple[int, ...]) -> None:
    args = ("fake_nccl_incomplete", *ranks)
    for outcome in rank_outcomes(everyday, 2, *args, env=NCCL, timeout=LIMIT_S):
        assert outcome.error == "TransportError", outcome.describe()
        assert "lacks ncclCommAbort: it is no complete NCCL" in outcome.message
    # auto does without it, on all ranks.
    assert run_ranks(everyday, 2, *args, env=AUTO, timeout=LIMIT_S) == ["native", "native"]


def killed(on_hosts_of_their_own: bool) -> Seen:
    if on_hosts_of_their_own:
        os.environ["PYDIST_HOST_ID"] = f"host {os.environ['RANK']}"
        os.environ["PYDIST_INTERFACE"] = "none0"  # so native can't join hosts
    # Rank 2 is gone in the third collective, which the others have launched or do then.
    return three_collectives("exit:2:3", 20.0)


@pytest.mark.parametrize("on_hosts_of_their_own", [False, True])
def test_a_rank_killed_in_a_collective_is_named(on_hosts_of_their_own: bool) -> None:
    outcomes = rank_outcomes(killed, 4, on_hosts_of_their_own, env=NCCL, timeout=LIMIT_S)
    assert outcomes.pop(2).exit_code == 9
    for outcome in outcomes:
        assert outcome.ok, outcome.describe()
        assert outcome.value.kind is pydist.PeerLost
        assert "rank 2 " in outcome.value.message
        assert outcome.value.ranks == (2,)
        assert outcome.value.pid is not None
        assert outcome.value.seconds < 10


def replay_beside_a_dead_rank() -> None:
    gpu_ranks.install()
    rank, _ = joined()
    tensor = torch.ones(4, device="cuda")
    pydist.all_reduce(tensor)
    with gpu_ranks.Graph() as graph:
        pydist.all_reduce(tensor)
    graph.replay()
    gpu_ranks.synchronize()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    graph.replay()
    # Nothing is called that could raise.
    deadline = time.monotonic() + 15
    while groups.communicator_of(None).failure is None:
        assert time.monotonic() < deadline, "nobody has noticed"
        time.sleep(0.05)
    with pytest.raises(pydist.PeerLost, match="rank 1"):
        pydist.barrier()


def test_a_graph_that_is_replayed_beside_a_dead_rank_is_told_of() -> None:
    outcomes = rank_outcomes(replay_beside_a_dead_rank, 2, env=NCCL, timeout=LIMIT_S)
    assert outcomes[0].ok, outcomes[0].describe()
    told = outcomes[0].output.partition("rank 1 (pid")
    assert "What the GPU computes from here on is worth nothing." in told[2]
