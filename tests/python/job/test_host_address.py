"""Slurm's names of nodes, where no name server knows them. A scontrol in PATH stands in for the
real one, which tests/hosts has."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from launch import NO_LAUNCHER, run_ranks

import pydist
from pydist.errors import InvalidUsage
from pydist.job.meeting import host_address
from pydist.job.meeting.host_address import reachable_address

# A name that ends so never resolves.
NODE = "node03.invalid"

SAYS = "Arch=x86_64 NodeAddr={address} NodeHostName=vm Port=6818 Version=22.05.8"


@pytest.fixture(autouse=True)
def _in_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.delenv("SLURM_NODE_ALIASES", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(host_address, "_PATIENCE_S", 0.3)
    host_address._address_by_slurm.cache_clear()


@pytest.fixture
def scontrol(tmp_path: Path) -> Callable[[str], Path]:
    """Makes a scontrol that runs some lines of shell; returns where it notes how it was called."""

    def make(lines: str) -> Path:
        program, log = tmp_path / "scontrol", tmp_path / "called"
        program.write_text(f'#!/bin/sh\necho "$*" >> {log}\n{lines}\n')
        program.chmod(0o755)
        return log

    return make


def test_a_name_that_resolves_is_taken(scontrol: Callable[[str], Path]) -> None:
    log = scontrol("exit 1")
    for name in ("localhost", "10.0.0.7", "fd00::1"):
        assert reachable_address(name) == name
    assert not log.exists()


def test_outside_of_slurm_a_name_may_be_known_later(
    scontrol: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = scontrol("exit 1")
    monkeypatch.delenv("SLURM_JOB_ID")
    assert reachable_address(NODE) == NODE
    assert not log.exists()


def test_slurms_controller_is_asked_once(scontrol: Callable[[str], Path]) -> None:
    log = scontrol(f"echo NodeName={NODE} {SAYS.format(address='10.0.0.7')}")
    assert [reachable_address(NODE) for _ in range(2)] == ["10.0.0.7"] * 2
    assert log.read_text() == f"--oneliner show node {NODE}\n"


@pytest.mark.parametrize(
    ("aliases", "address"),
    [
        (f"other:10.0.0.8:vm8,{NODE}:10.0.0.7:vm7", "10.0.0.7"),
        (f"{NODE}:[fd00::7]:vm7,other:[fd00::8]:vm8", "fd00::7"),
    ],
)
def test_the_aliases_of_a_cloud_are_enough(
    aliases: str, address: str, scontrol: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = scontrol("exit 1")
    monkeypatch.setenv("SLURM_NODE_ALIASES", aliases)
    assert reachable_address(NODE) == address
    assert not log.exists()


@pytest.mark.parametrize(
    "lines",
    [
        "exit 1",
        "echo 'no such node'",
        # Slurm itself has only the name.
        f"echo NodeName={NODE} {SAYS.format(address=NODE)}",
    ],
    ids=["fails", "knows none", "has the name"],
)
def test_a_node_that_nobody_finds_is_an_error_at_once(
    lines: str, scontrol: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol(lines)
    monkeypatch.setenv("SLURM_NODE_ALIASES", "(null)")
    with pytest.raises(InvalidUsage, match=f"on node {NODE}, .* set MASTER_ADDR to one"):
        reachable_address(NODE)


def test_without_scontrol_the_error_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/no/such/folder")
    with pytest.raises(InvalidUsage, match=f"on node {NODE}, "):
        reachable_address(NODE)


def test_a_name_that_is_known_soon_is_taken(
    scontrol: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name server that answers late is no reason to end."""
    scontrol("exit 1")
    answers = iter([False, False, True])
    monkeypatch.setattr(host_address, "_resolves", lambda _host: next(answers))
    monkeypatch.setattr(host_address, "_PATIENCE_S", 30.0)
    assert reachable_address(NODE) == NODE


def sum_of_ranks() -> float:
    rank = os.environ["RANK"]
    for name in [name for name in os.environ if name in (*NO_LAUNCHER, "MASTER_PORT")]:
        del os.environ[name]
    os.environ.update(SLURM_PROCID=rank, SLURM_LOCALID=rank)
    pydist.init(timeout=30)
    total = torch.tensor([float(rank)])
    pydist.all_reduce(total)
    pydist.shutdown()
    return float(total)


def test_ranks_meet_at_the_address_that_slurm_knows(scontrol: Callable[[str], Path]) -> None:
    scontrol(f"echo NodeName={NODE} {SAYS.format(address='127.0.0.1')}")
    step = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NODELIST": NODE,
        "PATH": os.environ["PATH"],
    }
    assert run_ranks(sum_of_ranks, 2, env=step) == [1.0, 1.0]
