"""Launchers that somebody starts on each host: torchrun, `pydist run`, a process by SkyPilot or by
Kubeflow's trainer; and mpirun, which starts on all hosts by itself."""

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from launch import run_command
from namespaces import Hosts
from sshd import made_ssh, why_no_ssh
from thorough import everyday
from time_limit import PATIENCE

pytestmark = pytest.mark.timeout(120)

SUMS = """
import os, sys, torch, pydist
pydist.init(timeout=60)
rank, size, local_rank = pydist.rank(), pydist.world_size(), pydist.local_rank()
total = torch.tensor([float(rank + 1)])
pydist.all_reduce(total)
space = os.stat("/proc/self/ns/net").st_ino
sys.stdout.write(f"{rank}/{size} {float(total)} {local_rank} {space}\\n")  # at once
sys.stdout.flush()
"""
PORT = 29517
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
PYDIST_RUN = [sys.executable, "-m", "pydist", "run"]


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SUMS)
    return str(path)


def start_on_each(
    hosts: Hosts,
    commands: Sequence[Sequence[str]],
    envs: Sequence[Mapping[str, str]] = ({}, {}),
) -> list[str]:
    """Runs a command on each host, all at a time; returns what their ranks have printed."""
    running = [
        host.popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for host, command, env in zip(hosts, commands, envs, strict=True)
    ]
    said: list[str] = []
    try:
        for process in running:
            out, error = process.communicate(timeout=90 * PATIENCE)
            assert process.returncode == 0, error
            said += out.splitlines()
    finally:
        for process in running:
            process.kill()
            process.communicate()
    return sorted(said)


def lines_of(hosts: Hosts, ranks: Sequence[tuple[int, int]]) -> list[str]:
    """What the ranks print whose local rank and host are these."""
    size, total = len(ranks), len(ranks) * (len(ranks) + 1) / 2
    return [
        f"{rank}/{size} {total} {local} {hosts[host].namespace.stat().st_ino}"
        for rank, (local, host) in enumerate(ranks)
    ]


# The ranks of one host have numbers that follow each other, however many each host has.
FIRST_HOST_FIRST = [(0, 0), (1, 0), (0, 1)]
SECOND_HOST_FIRST = [(0, 1), (0, 0), (1, 0)]


def test_torchrun_with_a_static_meeting_place(hosts: Hosts, script: str) -> None:
    place = ["--nnodes=2", f"--master-addr={hosts[0].address}", f"--master-port={PORT}"]
    commands = [
        [*TORCHRUN, *place, f"--node-rank={number}", f"--nproc-per-node={2 - number}", script]
        for number in range(2)
    ]
    assert start_on_each(hosts, commands) == lines_of(hosts, FIRST_HOST_FIRST)


@pytest.mark.thorough
def test_torchrun_with_c10d(hosts: Hosts, script: str) -> None:
    """Its nodes have no numbers of their own, so their order is any."""
    place = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={hosts[0].address}:{PORT}"]
    commands = [
        [
            *(*TORCHRUN, *place, "--rdzv-id=7", f"--nproc-per-node={2 - number}"),
            # torch finds out by the host's name, which here means 127.0.0.1, as it does on Debian.
            *(f"--rdzv-conf=is_host={number == 0}", f"--local-addr={hosts[number].address}"),
            script,
        ]
        for number in range(2)
    ]
    said = start_on_each(hosts, commands)
    assert said in [lines_of(hosts, order) for order in (FIRST_HOST_FIRST, SECOND_HOST_FIRST)]


def pet(hosts: Hosts, number: int, processes: int) -> dict[str, str]:
    """What Kubeflow's trainer tells each node."""
    return {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": str(processes),
        "PET_NODE_RANK": str(number),
        "PET_MASTER_ADDR": hosts[0].address,
        "PET_MASTER_PORT": str(PORT),
    }


@pytest.mark.parametrize("command", everyday(PYDIST_RUN, thorough=(TORCHRUN,)))
def test_the_variables_of_torchrun(command: list[str], hosts: Hosts, script: str) -> None:
    envs = [pet(hosts, number, 2 - number) for number in range(2)]
    said = start_on_each(hosts, [[*command, script]] * 2, envs)
    assert said == lines_of(hosts, FIRST_HOST_FIRST)


@pytest.mark.thorough
def test_a_process_on_each_node_by_torchruns_variables(hosts: Hosts, script: str) -> None:
    envs = [pet(hosts, number, 1) for number in range(2)]
    said = start_on_each(hosts, [[sys.executable, script]] * 2, envs)
    assert said == lines_of(hosts, [(0, 0), (0, 1)])


@pytest.mark.parametrize("processes", everyday(2, thorough=(None,)))
def test_skypilot(processes: int | None, hosts: Hosts, script: str) -> None:
    envs = [
        {
            "SKYPILOT_NODE_RANK": str(number),
            "SKYPILOT_NUM_NODES": "2",
            "SKYPILOT_NODE_IPS": "\n".join(host.address for host in hosts),
            "SKYPILOT_TASK_ID": f"sky-{processes}",
        }
        for number in range(2)
    ]
    command = [sys.executable] if processes is None else [*PYDIST_RUN, "-n", str(processes)]
    said = start_on_each(hosts, [[*command, script]] * 2, envs)
    local_ranks = range(processes or 1)
    assert said == lines_of(hosts, [(local, host) for host in (0, 1) for local in local_ranks])


@pytest.mark.parametrize("told", everyday(True, thorough=(False,)))
def test_mpirun(told: bool, hosts: Hosts, script: str, tmp_path: Path) -> None:
    """Open MPI's variables don't say where rank 0 is: without MASTER_ADDR the error says so."""
    if shutil.which("mpirun.openmpi") is None:
        pytest.skip("mpirun.openmpi not found: apt-get install openmpi-bin")
    if reason := why_no_ssh():
        pytest.skip(reason)
    with made_ssh(hosts, tmp_path) as ssh:
        flags = ["--allow-run-as-root", "--host", "host0:2,host1:1", "-np", "3"]
        flags += ["--mca", "plm_rsh_args", " ".join(ssh.arguments)]
        flags += ["-x", f"MASTER_ADDR={hosts[0].address}"] if told else []
        done = run_command(
            hosts[0].command(["mpirun.openmpi", *flags, sys.executable, script]), timeout=90
        )
    if told:
        assert done.returncode == 0, done.stderr
        assert sorted(done.stdout.splitlines()) == lines_of(hosts, FIRST_HOST_FIRST)
    else:
        assert done.returncode != 0
        assert "Set MASTER_ADDR to where rank 0 can be reached" in done.stderr
