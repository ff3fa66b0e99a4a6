"""`pydist info --topology` on one host, and its tables for jobs that are made up."""

import json
import os
import sys
from typing import Any

import pytest
from launch import NO_LAUNCHER, run_command

import pydist
from pydist.cli import main
from pydist.cli.topology_tables import print_host, print_job
from pydist.topology.host import HostFacts
from pydist.topology.interfaces import Interface, Told
from pydist.topology.job import JobTopology, RankFacts
from pydist.topology.links import Link
from pydist.topology.placement import Placement
from pydist.topology.processors import NumaNode

pytestmark = pytest.mark.timeout(110)

NODES = (
    NumaNode(0, (0,), (0, 1, 2, 3), (0, 1), 8 << 30, 1 << 30),
    NumaNode(1, (), (), (), None, None),
)
ETH0 = Interface("eth0", "up", 25_000, 9000, ("10.0.0.1", "2001:db8::1"))


def host_named(name: str, identity: str, gpus: tuple[str, ...] = ()) -> HostFacts:
    return HostFacts(name, identity, NODES, gpus, (ETH0, Interface("ib0", "down", None, None, ())))


def rank_facts(rank: int, gpu: int | None = None) -> RankFacts:
    way = "the way to the job's store"
    return RankFacts(rank, 0, 100 + rank, (0, 1), (0,), gpu, ("10.0.0.1",), ("eth0",), way)


def job_of(count: int, covers: str = "all pairs", gpu: int | None = None) -> JobTopology:
    """Of a rank on each of some hosts."""
    names = [f"h{number}" for number in range(count)]
    return JobTopology(
        Placement(names),
        tuple(
            host_named(name, f"id:{name}", ("H100",) if gpu is not None else ()) for name in names
        ),
        tuple(rank_facts(rank, gpu) for rank in range(count)),
        "native",
        "native",
        "the fastest that every rank can use",
        covers,
        (Link((0, 1), 12.5e-6, 1.25e9, 1e9, 0.75e9),),
        2,
    )


def line_with(text: str, printed: str) -> list[str]:
    return next(line for line in printed.splitlines() if text in line).split()


def test_tables_of_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    print_job(job_of(2))
    printed = capsys.readouterr().out
    assert "2 ranks on 2 hosts, backend native: the fastest that every rank can use." in printed
    assert line_with("id:h1", printed) == ["1", "h1", "id:h1", "1", "1"]
    assert line_with("101", printed)[:8] == ["1", "1", "0", "101", "0", "0-1", "eth0", "10.0.0.1"]
    assert "GPU" not in printed
    lines = printed.splitlines()
    first = next(n for n, line in enumerate(lines) if "from \\ to" in line) + 1
    links = [line.split() for line in lines[first : first + 6]]
    # What goes from host 0, then what goes from host 1.
    assert links == [
        ["0", "h0", "12.5", "µs"],
        ["10", "Gbit/s"],
        ["6", "Gbit/s", "both", "ways"],
        ["1", "h1", "12.5", "µs"],
        ["8", "Gbit/s"],
        ["6", "Gbit/s", "both", "ways"],
    ]
    caption = " ".join(printed.split())
    assert "over 2 connections from each end" in caption
    assert "several pairs" not in caption


def test_a_ring_of_many_hosts_says_so_and_gpus_are_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_job(job_of(8, "ring", gpu=3))
    printed = capsys.readouterr().out
    assert "each was measured with the next one alone" in " ".join(printed.split())
    assert "cuda:3" in line_with("101", printed)
    assert line_with("H100", printed) == ["0", "H100"]


def test_tables_of_one_host(capsys: pytest.CaptureFixture[str]) -> None:
    print_host(host_named("h", "id:h"), Told(("10.0.0.1",), "PYDIST_INTERFACE"))
    printed = capsys.readouterr().out
    node = [line.split() for line in printed.splitlines() if line.startswith(("0 ", "1 "))]
    assert node == [
        ["0", "0", "0-3", "0-1", "8", "GiB", "1", "GiB"],
        ["1", "?", "none", "none", "?", "?"],
    ]
    assert line_with("eth0", printed) == [
        *("eth0", "up", "25", "Gbit/s", "9000", "10.0.0.1,", "2001:db8::1", "in", "use")
    ]
    assert line_with("ib0", printed) == ["ib0", "down", "?", "?", "none"]
    assert "Other hosts would connect to 10.0.0.1: PYDIST_INTERFACE." in printed
    print_host(host_named("h", "id:h"), Told((), ""))
    assert "neither PYDIST_INTERFACE nor MASTER_ADDR is set" in capsys.readouterr().out


def run(*arguments: str, env: dict[str, str | None] | None = None) -> tuple[int, str, str]:
    variables: dict[str, str | None] = {**NO_LAUNCHER, **(env or {})}
    done = run_command([sys.executable, "-m", "pydist", *arguments], timeout=90, env=variables)
    return done.returncode, done.stdout, done.stderr


def test_this_host_as_json() -> None:
    status, printed, said = run(
        "info", "--json", "--topology", env={"PYDIST_INTERFACE": "lo", "PYDIST_HOST_ID": "mine"}
    )
    assert status == 0, said
    report: dict[str, Any] = json.loads(printed)
    (host,) = report["hosts"]
    assert host["identity"] == "id:mine"
    allowed = [cpu for node in host["nodes"] for cpu in node["allowed"]]
    assert sorted(allowed) == sorted(os.sched_getaffinity(0))
    assert report["would_connect_to"] == {"addresses": ["127.0.0.1"], "reason": "PYDIST_INTERFACE"}


def test_ranks_of_one_host_measure_no_link() -> None:
    status, printed, said = run("run", "-n", "2", "-m", "pydist", "info", "--topology", "--json")
    assert status == 0, said
    report: dict[str, Any] = json.loads(printed)
    assert report["links"] == {"covers": "all pairs", "sockets": None, "measured": []}
    assert [host["ranks"] for host in report["hosts"]] == [[0, 1]]
    assert [rank["addresses"] for rank in report["ranks"]] == [[], []]
    assert [rank["host"] for rank in report["ranks"]] == [0, 0]


@pytest.mark.parametrize(
    ("arguments", "env", "said"),
    [
        (["--topology", "--xml"], {}, "unrecognized arguments: --xml"),
        (["--topology", "all"], {}, "unrecognized arguments: all"),
        (["--topology"], {"RANK": "0"}, "WORLD_SIZE, MASTER_ADDR, MASTER_PORT missing"),
        (["--topology"], {"PYDIST_INTERFACE": "eth77"}, "PYDIST_INTERFACE names 'eth77'"),
    ],
)
def test_bad_usage_is_one_line_and_status_2(
    arguments: list[str],
    env: dict[str, str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in NO_LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert main(["info", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("pydist info: ")
    assert said in error
    assert error.count("\n") == 1


def test_a_world_that_is_described_as_one_rank_is_this_host(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.delenv("PYDIST_INTERFACE", raising=False)
    assert main(["info", "--topology", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["would_connect_to"]["addresses"] == ["127.0.0.1"]
    assert not pydist.is_initialized()
