"""Ranks over hosts: where they live, and what the test hears of them."""

import os
import signal
import socket
import sys
from typing import Any

import pytest
from jobs import run_job, start_job
from launch import ExpiredError
from namespaces import Hosts
from rank_places import place_ranks
from ranks_on import RanksOn, rank_outcomes_on, run_ranks_on
from torch.distributed import TCPStore  # type: ignore[attr-defined]

pytestmark = pytest.mark.timeout(60)

# Each rank counts itself and waits for all, by the store that rank 0 serves.
PROGRAM = """
import datetime, os
from torch.distributed import TCPStore
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store = TCPStore(
    os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, rank == 0,
    timeout=datetime.timedelta(seconds=30),
)
store.add("here", 1)
store.wait(["here"])
print("rank", rank, "of", size, os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"],
      os.stat("/proc/self/ns/net").st_ino, os.environ.get("MINE"), flush=True)
store.add("done", 1)
if rank == 0:
    while store.add("done", 0) < size:
        pass
"""


def placement() -> dict[str, Any]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    with socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))) as s:
        own_address = s.getsockname()[0]
    return {
        "variables": [os.environ[name] for name in names],
        "namespace": os.stat("/proc/self/ns/net").st_ino,
        "address": own_address,
    }


def count_ranks() -> int:
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    return int(store.add("ranks", 1))


def end_if_rank(rank: int) -> None:
    if int(os.environ["RANK"]) == rank:
        os.kill(os.getpid(), signal.SIGKILL)


def raise_on_rank(rank: int) -> None:
    if int(os.environ["RANK"]) == rank:
        raise KeyError("of this rank")


def test_ranks_live_on_their_hosts_and_are_told_so(hosts: Hosts) -> None:
    said = run_ranks_on(hosts, [2, 1], placement)
    first = hosts[0].address
    assert [each["variables"] for each in said] == [
        ["0", "3", "0", "2", first],
        ["1", "3", "1", "2", first],
        ["2", "3", "0", "1", first],
    ]
    namespaces = [os.stat(host.namespace).st_ino for host in hosts]
    assert [each["namespace"] for each in said] == [namespaces[0], namespaces[0], namespaces[1]]
    assert [each["address"] for each in said] == [first, first, hosts[1].address]


def test_they_live_for_several_calls_each_with_a_fresh_store(hosts: Hosts) -> None:
    with RanksOn(hosts, [1, 1]) as ranks:
        pids = ranks.pids
        for _ in range(2):
            assert sorted(ranks.run(count_ranks)) == [1, 2]
        assert ranks.pids == pids


def test_what_goes_wrong_on_one_is_told(hosts: Hosts) -> None:
    fine, failed = rank_outcomes_on(hosts, [1, 1], raise_on_rank, 1)
    assert fine.ok
    assert failed.error == "KeyError"
    assert "of this rank" in failed.message
    killed = rank_outcomes_on(hosts, [1, 1], end_if_rank, 1)[1]
    assert killed.exit_code == -signal.SIGKILL


def test_a_program_runs_on_all_ranks(hosts: Hosts) -> None:
    argv = [sys.executable, "-c", PROGRAM]
    outcomes = run_job(hosts, [2, 1], argv, [{"MINE": "a"}, {"MINE": "b"}, {"MINE": "c"}])
    spaces = [os.stat(host.namespace).st_ino for host in hosts]
    assert [outcome.exit_code for outcome in outcomes] == [0, 0, 0]
    # Before it, torch may say that these addresses have no names.
    assert [outcome.output.splitlines()[-1] for outcome in outcomes] == [
        f"rank 0 of 3 0 2 {spaces[0]} a",
        f"rank 1 of 3 1 2 {spaces[0]} b",
        f"rank 2 of 3 0 1 {spaces[1]} c",
    ]
    assert [outcome.host for outcome in outcomes] == [0, 0, 1]


def test_a_program_that_takes_too_long_is_killed_with_its_stacks(hosts: Hosts) -> None:
    waits = (
        "import os, threading\n"
        "def wait_in_vain(): threading.Event().wait()\n"
        "if os.environ['RANK'] == '1': wait_in_vain()"
    )
    with start_job(hosts, [1, 1], [sys.executable, "-c", waits]) as job:
        with pytest.raises(ExpiredError, match=r"ranks \[1\] of 2(?s:.)*wait_in_vain"):
            job.outcomes(timeout=1)
        assert job.processes[1].returncode == -signal.SIGABRT


def test_the_end_of_a_job_kills_its_ranks(hosts: Hosts) -> None:
    with start_job(hosts, [1], ["sleep", "1000"]) as job:
        assert job.processes[0].poll() is None
    assert job.processes[0].returncode in (-signal.SIGABRT, -signal.SIGKILL)


def test_more_places_than_hosts_are_refused(hosts: Hosts) -> None:
    for wrong in ([1, 1, 1], [0, 0]):
        with pytest.raises(ValueError, match="on no more hosts than there are"):
            place_ranks(hosts, wrong)
