"""`pydist info --topology` over two hosts."""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hosts_or_skip import hosts_or_skip
from jobs import RankOutcome, run_job
from namespaces import Hosts
from ranks_on import rank_outcomes_on, run_ranks_on

import pydist
from pydist.cli import main
from pydist.topology import job, pairs

pytestmark = pytest.mark.timeout(120)

COMMAND = [sys.executable, "-m", "pydist", "info", "--topology"]
RANKS_PER_HOST = [2, 1]


def report_of(outcomes: list[RankOutcome]) -> dict[str, Any]:
    """What rank 0 has printed; the others print nothing of it."""
    for rank in outcomes:
        assert rank.exit_code == 0, rank.describe()
        assert rank.rank == 0 or "{" not in rank.output
    printed = outcomes[0].output
    report: dict[str, Any] = json.loads(printed[printed.index("{\n") :])
    return report


def test_hosts_ranks_and_links(hosts: Hosts) -> None:
    rate = 400e6
    hosts.shape("400mbit")
    try:
        report = report_of(run_job(hosts, RANKS_PER_HOST, [*COMMAND, "--json"]))
    finally:
        hosts.shape(None)
    assert report["backend"]["name"] == "native"
    assert [(host["leader"], host["ranks"]) for host in report["hosts"]] == [(0, [0, 1]), (2, [2])]
    one, other = (host["identity"] for host in report["hosts"])
    assert one != other
    for number, host in enumerate(report["hosts"]):
        shown = {each["name"]: each for each in host["interfaces"]}
        assert set(shown) == {"eth0", "eth1"}
        for link in hosts[number].links:
            assert shown[link.interface]["addresses"] == [link.address, link.address6]
            assert shown[link.interface]["state"] == "up"
            assert shown[link.interface]["mtu_bytes"] == 1500
    for rank in report["ranks"]:
        host = hosts[rank["host"]]
        assert (rank["interfaces"], rank["addresses"]) == (["eth0"], [host.address])
        assert rank["cores"] == sorted(os.sched_getaffinity(0))
        assert rank["nodes"]
    assert [(rank["rank"], rank["host"], rank["local_rank"]) for rank in report["ranks"]] == [
        (0, 0, 0),
        (1, 0, 1),
        (2, 1, 0),
    ]
    assert report["links"]["covers"] == "all pairs"
    (link,) = report["links"]["measured"]
    assert link["hosts"] == [0, 1]
    assert link["latency_s"] > 0
    for name in ("out_bytes_per_s", "back_bytes_per_s", "both_bytes_per_s"):
        # Of a MiB or more in 20 ms, up to 256 KiB pass at once (at the host, and at the switch).
        assert 0 < link[name] * 8 < 1.4 * rate


def test_tables_and_the_interface_that_is_named(hosts: Hosts) -> None:
    env = {"PYDIST_INTERFACE": "eth1", "PYDIST_SOCKETS": "3", "PYDIST_BACKEND": "native"}
    outcomes = run_job(hosts, RANKS_PER_HOST, COMMAND, env)
    for rank in outcomes:
        assert rank.exit_code == 0, rank.describe()
    printed = outcomes[0].output
    assert "3 ranks on 2 hosts, backend native: asked for." in printed
    assert "PYDIST_INTERFACE" in printed
    assert hosts[1].links[1].address in printed
    assert "Gbit/s both ways" in printed
    assert "over 3 connections" in " ".join(printed.split())
    for line in printed.splitlines():
        if line.startswith("eth"):
            assert line.rstrip().endswith("in use") == line.startswith("eth1")


def test_where_native_cannot_connect_the_reason_is_told(hosts: Hosts) -> None:
    env = {"PYDIST_INTERFACE": "lo"}
    report = report_of(run_job(hosts, [1, 1], [*COMMAND, "--json"], env))
    assert report["backend"]["name"] == "gloo"
    assert "native can't serve these ranks" in report["backend"]["reason"]
    assert [rank["addresses"] for rank in report["ranks"]] == [[each.address] for each in hosts]
    assert report["links"]["sockets"] is None
    (link,) = report["links"]["measured"]
    assert link["out_bytes_per_s"] > 0


def show(rank_2: Callable[[], None]) -> int:
    """The command, on a rank of a test; the third of them does something before."""
    if os.environ["RANK"] == "2":
        rank_2()
    return main(["info", "--topology"])


def take_an_interface_that_is_not_there() -> None:
    os.environ["PYDIST_INTERFACE"] = "eth7"


def die_when_measuring() -> None:
    job.measure_link = lambda *arguments, **options: os._exit(3)


def test_where_one_rank_is_wrong_all_say_so(hosts: Hosts) -> None:
    env = {"PYDIST_BACKEND": "native"}
    outcomes = rank_outcomes_on(
        hosts, RANKS_PER_HOST, show, take_an_interface_that_is_not_there, env=env
    )
    for rank in outcomes:
        assert rank.value == 1, rank.describe()
        assert "rank 2" in rank.output
        assert "PYDIST_INTERFACE names 'eth7'" in rank.output


def test_where_one_rank_dies_the_others_end_and_name_it(hosts: Hosts) -> None:
    *others, last = rank_outcomes_on(hosts, RANKS_PER_HOST, show, die_when_measuring)
    assert last.exit_code == 3
    for rank in others:
        assert rank.value == 1, rank.describe()
        assert "pydist info: " in rank.output
        assert "rank 2" in rank.output


def links_of_a_ring() -> tuple[str, list[tuple[int, int]]]:
    """As of more hosts than there are here."""
    pairs.MOST_HOSTS_IN_PAIRS = 1
    pydist.init()
    topology = job.collect_job()
    assert all(link.out_bytes_per_s > 0 for link in topology.links)
    return topology.covers, [link.hosts for link in topology.links]


def test_a_ring_of_hosts_is_measured_and_all_ranks_learn_of_it() -> None:
    with hosts_or_skip(4) as hosts:
        found = run_ranks_on(hosts, [1, 1, 1, 1], links_of_a_ring)
    assert found == [("ring", [(0, 1), (0, 3), (1, 2), (2, 3)])] * 4
