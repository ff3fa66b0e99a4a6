"""A job on two hosts, played by two network namespaces whose host names mean a loopback address.

On each host the ranks are forked by a process that has torch loaded: that takes two seconds.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hosts_or_skip import hosts_or_skip
from launch import clean_environment
from namespace_names import OWN_FILES
from namespaces import address_of
from thorough import everyday
from time_limit import PATIENCE

from pydist.job.meeting.gloo_network import GlooNetwork, join_network

pytestmark = pytest.mark.timeout(120)

PORT = "29417"
NAMES = ("hosta", "hostb")


# A process of a host. For each line, a list of environments, it forks a rank in each of them,
# which runs the script, and says when all have ended.
FORKS = """
import json, os, runpy, sys, traceback
import pydist

script, out = sys.argv[1:]
for line in sys.stdin:
    pids = []
    for environment in json.loads(line):
        pids.append(os.fork())
        if pids[-1] == 0:
            os.environ.update(environment)
            sys.argv[:] = [script, out]
            try:
                runpy.run_path(script, run_name="__main__")
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
    for pid in pids:
        os.waitpid(pid, 0)
    print("all have ended", flush=True)
"""


@dataclass(frozen=True)
class JobHosts:
    """Two hosts; on each, eth0 and eth1 lead to the other."""

    servers: tuple[subprocess.Popen[str], ...]
    folder: Path

    def run(self, environments: tuple[list[dict[str, str]], ...], timeout: float) -> None:
        """Runs ranks on each host, in one environment each."""
        for server, of_ranks in zip(self.servers, environments, strict=True):
            assert server.stdin is not None
            server.stdin.write(json.dumps(of_ranks) + "\n")
            server.stdin.flush()
        for server in self.servers:
            assert server.stdout is not None
            ready, _, _ = select.select([server.stdout], [], [], timeout * PATIENCE)
            if not ready:
                for each in self.servers:
                    os.killpg(each.pid, signal.SIGABRT)  # they print their stacks
                pytest.fail(f"the ranks of a host have not ended in {timeout * PATIENCE} s")
            assert server.stdout.readline() == "all have ended\n"


def _serve(space: str, name: str, folder: Path) -> subprocess.Popen[str]:
    forks = f"exec {sys.executable} {folder / 'forks.py'} {folder / 'script.py'} {folder}"
    return subprocess.Popen(
        ["ip", "netns", "exec", space, "unshare", "--uts", "sh", "-c", f"hostname {name}; {forks}"],
        env=clean_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.fixture(scope="module")
def job_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobHosts]:
    if missing := [name for name in ("unshare", "hostname") if shutil.which(name) is None]:
        pytest.skip(f"{' and '.join(missing)} not installed")
    with hosts_or_skip(2, links=2) as hosts, contextlib.ExitStack() as stack:
        folder = tmp_path_factory.mktemp("hosts")
        (folder / "script.py").write_text(SCRIPT)
        (folder / "forks.py").write_text(FORKS)
        servers = []
        for host, name, other in zip(hosts, NAMES, NAMES[::-1], strict=True):
            # What `ip netns exec` shows as /etc/hosts. It goes with the host.
            of_host = OWN_FILES / host.name
            of_host.mkdir(parents=True)
            # As the installers of Debian and Ubuntu leave it, with the other host added.
            (of_host / "hosts").write_text(
                f"127.0.0.1 localhost\n127.0.1.1 {name}\n{hosts[1 - host.index].address} {other}\n"
            )
            servers.append(_serve(host.name, name, folder))
            # Closes its pipes, and waits.
            stack.enter_context(servers[-1])
            stack.callback(servers[-1].kill)
        yield JobHosts(tuple(servers), folder)


SCRIPT = """
import datetime, json, os, sys, time
import psutil
import torch
import torch.distributed as dist

import pydist

rank, how, out = int(os.environ["RANK"]), os.environ["HOW"], sys.argv[1]
said = {}
try:
    if how == "group of the script":
        dist.init_process_group("pydist", timeout=datetime.timedelta(seconds=30))
    pydist.init(timeout=30)
    total = torch.tensor([float(rank + 1)])
    pydist.all_reduce(total)
    model = pydist.DataParallel(torch.nn.Linear(2, 1))
    model(torch.full((1, 2), float(rank))).sum().backward()
    said["backend"] = pydist.backend()
    said["sum"] = float(total)
    said["gradient"] = model.weight.grad[0].tolist()
    listening = {
        connection.laddr.ip
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    # The store's server listens everywhere.
    said["listens on"] = sorted(listening - {"::", "0.0.0.0"})
    pydist.barrier()
except Exception as error:
    said["error"] = f"{type(error).__name__}: {error}"
with open(f"{out}/{rank}", "w") as file:
    json.dump(said, file)
# A rank that ends at once may be what another one hears of, instead of the error.
end = time.monotonic() + 20
size = int(os.environ["WORLD_SIZE"])
while time.monotonic() < end and not all(os.path.exists(f"{out}/{r}") for r in range(size)):
    time.sleep(0.01)
"""

# Two ranks on the host of the meeting place, one on the other.
HOST_OF_RANK = (0, 0, 1)


def run_job(
    job_hosts: JobHosts,
    master: str,
    *,
    how: str = "init",
    variables: tuple[dict[str, str], ...] = ({}, {}, {}),
) -> list[dict[str, Any]]:
    environments: tuple[list[dict[str, str]], ...] = ([], [])
    for rank, host in enumerate(HOST_OF_RANK):
        place = {"RANK": str(rank), "WORLD_SIZE": str(len(HOST_OF_RANK)), "MASTER_ADDR": master}
        given = {"HOW": how, "PYDIST_BACKEND": "gloo", **place, "MASTER_PORT": PORT}
        given |= variables[rank]
        environments[host].append(given)
        (job_hosts.folder / str(rank)).unlink(missing_ok=True)
    job_hosts.run(environments, timeout=60)
    said = []
    for rank in range(len(HOST_OF_RANK)):
        file = job_hosts.folder / str(rank)
        assert file.exists(), f"rank {rank} has ended without a word"
        said.append(json.loads(file.read_text()))
    return said


def require_trained(said: list[dict[str, Any]], addresses: list[list[str]]) -> None:
    for rank, each in enumerate(said):
        assert "error" not in each, (rank, each["error"])
        assert (each["backend"], each["sum"], each["gradient"]) == ("gloo", 6.0, [1.0, 1.0])
        assert each["listens on"] == addresses[rank]


# By the two links between the hosts: what the ranks talk by, and another one.
(A0, A1), (B0, B1) = ([address_of(host, link) for link in range(2)] for host in range(2))


@pytest.mark.parametrize("how", ["init", "group of the script"])
@pytest.mark.parametrize("master", everyday("hosta", thorough=(A0,)))
def test_hosts_whose_names_mean_a_loopback_address(
    job_hosts: JobHosts, master: str, how: str
) -> None:
    """The master's name is 127.0.1.1 on its own host, and its address on the other."""
    require_trained(run_job(job_hosts, master, how=how), [[A0], [A0], [B0]])


def test_without_a_variable_the_way_to_the_meeting_place_decides(job_hosts: JobHosts) -> None:
    require_trained(run_job(job_hosts, A1), [[A1], [A1], [B1]])


@pytest.mark.parametrize(
    ("names", "addresses"),
    [
        pytest.param("eth0", [[A0], [A0], [B0]], marks=pytest.mark.thorough),
        ("eth1", [[A1], [A1], [B1]]),
        ("eth0, eth1,", [[A0, A1], [A0, A1], [B0, B1]]),
    ],
)
def test_the_interfaces_named_are_taken(
    job_hosts: JobHosts, names: str, addresses: list[list[str]]
) -> None:
    variables = ({"GLOO_SOCKET_IFNAME": names},) * 3
    require_trained(run_job(job_hosts, "hosta", variables=variables), addresses)


def test_an_interface_that_is_not_there_is_an_error_on_all(job_hosts: JobHosts) -> None:
    variables = ({}, {}, {"GLOO_SOCKET_IFNAME": "eth0,eth7"})
    for each in run_job(job_hosts, "hosta", variables=variables):
        assert each["error"].startswith("InvalidUsage: rank 2: GLOO_SOCKET_IFNAME='eth0,eth7'")
        assert "'eth7', which host hostb does not have; it has lo, eth" in each["error"]


def test_different_numbers_of_interfaces_are_an_error_on_all(job_hosts: JobHosts) -> None:
    variables = ({}, {"GLOO_SOCKET_IFNAME": "eth0"}, {"GLOO_SOCKET_IFNAME": "eth0,eth1"})
    for each in run_job(job_hosts, "hosta", variables=variables):
        assert each["error"].startswith("Mismatch: GLOO_SOCKET_IFNAME names different numbers")
        assert "none on rank 0; 1 on rank 1; 2 on rank 2" in each["error"]


def told(v4: str = "", v6: str = "", interfaces: int = 0, problem: str = "") -> dict[str, Any]:
    return {"addresses": [v4, v6], "interfaces": interfaces, "problem": problem}


def test_addresses_are_of_one_family() -> None:
    both = [told("10.0.0.1", "fd00::1"), told("10.0.0.2", "fd00::2")]
    assert join_network(1, "ab", both) == GlooNetwork(address="10.0.0.2")
    mixed = [told("10.0.0.1", "fd00::1"), told("", "fd00::2")]
    assert join_network(0, "ab", mixed) == GlooNetwork(address="fd00::1")
    # Nothing that all have: gloo's own choice.
    none = [told("10.0.0.1", ""), told("", "fd00::2")]
    assert join_network(0, "ab", none) == GlooNetwork()


def test_a_tunnel_on_the_loopback_device_leaves_the_choice_to_gloo() -> None:
    assert join_network(1, "ab", [told("127.0.0.1"), told("127.0.0.1")]) == GlooNetwork()


def test_ranks_of_one_host_meet_on_the_loopback_device() -> None:
    far = [told("10.0.0.1"), told("10.0.0.1")]
    assert join_network(1, "aa", far) == GlooNetwork(address="127.0.0.1")
