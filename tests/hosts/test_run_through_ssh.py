"""`pydist run -H` with real ssh: two hosts with ranks, and one that the job is started from.

tests/programs/test_run_on_hosts.py has what needs no second host.
"""

import contextlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from subprocess import CompletedProcess

import psutil  # type: ignore[import-untyped]
import pytest
from launch import clean_environment
from namespaces import Host, Hosts, HostsUnavailableError
from sshd import Ssh, made_ssh, why_no_ssh
from time_limit import PATIENCE

pytestmark = pytest.mark.timeout(150)

SUMS = """
import os, sys, torch, pydist
pydist.init(timeout=60)
total = torch.tensor([float(pydist.rank() + 1)])
pydist.all_reduce(total)
print(float(total), os.environ["LOCAL_WORLD_SIZE"], os.environ["MASTER_ADDR"],
      os.stat("/proc/self/ns/net").st_ino, os.getcwd())
"""
WAITS = """
import os, time
print("pid", os.getpid())
time.sleep(200)
"""


@pytest.fixture(scope="module")
def three() -> Iterator[Hosts]:
    """The last host is the one that jobs are started from."""
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(Hosts(3))
        except HostsUnavailableError as error:
            pytest.skip(str(error))
        yield made


@pytest.fixture(scope="module")
def ssh(three: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ssh]:
    if reason := why_no_ssh():
        pytest.skip(reason)
    with made_ssh(three, tmp_path_factory.mktemp("ssh")) as made:
        yield made


def command(ssh: Ssh, folder: Path, script: str, flags: Sequence[str]) -> list[str]:
    (folder / "train.py").write_text(script)
    run = [sys.executable, "-m", "pydist", "run", f"--ssh-args={' '.join(ssh.arguments)}"]
    return [*run, *flags, "train.py"]


def run(host: Host, ssh: Ssh, folder: Path, script: str, *flags: str) -> CompletedProcess[str]:
    return host.run(command(ssh, folder, script, flags), timeout=90, cwd=folder)


def space(host: Host) -> int:
    return host.namespace.stat().st_ino


@pytest.mark.parametrize(
    ("start", "flags", "hosts_of_ranks"),
    [
        # The meeting place is the address that the other host has seen ssh come from.
        pytest.param(
            *(0, ["-H", "localhost:2,host1:1"], [0, 0, 1]),
            id="from the first host",
        ),
        # The one that ssh has reached; the host that starts the job has no rank.
        pytest.param(
            *(2, ["-np", "3", "-H", "host1:1,host0:4"], [1, 0, 0]),
            id="from another host",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_ranks_of_two_hosts_compute_together(
    start: int, flags: list[str], hosts_of_ranks: list[int], three: Hosts, ssh: Ssh, tmp_path: Path
) -> None:
    done = run(three[start], ssh, tmp_path, SUMS, *flags)
    assert done.returncode == 0, done.stderr
    master = three[hosts_of_ranks[0]].address
    assert sorted(done.stdout.splitlines()) == [
        f"[{rank}]: 6.0 {hosts_of_ranks.count(host)} {master} {space(three[host])} {tmp_path}"
        for rank, host in enumerate(hosts_of_ranks)
    ], done.stderr


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("stranger", r"Permission denied \(publickey,password.*\)\."),
        pytest.param("unknown", "Host key verification failed", marks=pytest.mark.thorough),
    ],
)
def test_a_host_that_would_ask_is_one_clear_error(
    name: str, said: str, three: Hosts, ssh: Ssh, tmp_path: Path
) -> None:
    done = run(three[0], ssh, tmp_path, WAITS, "-H", f"localhost:1,{name}:1")
    assert done.returncode == 2
    assert re.search(
        f"pydist run: ssh does not get to host {name} .status 255.: .*{said}", done.stderr
    )
    assert done.stderr.count("\n") == 1
    assert "pid" not in done.stdout


class Waiting:
    """A job of two ranks that wait, one on each host, started from the third."""

    def __init__(self, three: Hosts, ssh: Ssh, folder: Path) -> None:
        self.launcher = three[2].popen(
            command(ssh, folder, WAITS, ["-H", "host0,host1"]),
            env=clean_environment(),
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.ranks: dict[int, psutil.Process] = {}
        said = []
        while len(self.ranks) < 2:
            line = self.launcher.stdout.readline()
            said.append(line)
            assert line, said
            if found := re.fullmatch(r"\[(\d)\]: pid (\d+)\n", line):
                self.ranks[int(found[1])] = psutil.Process(int(found[2]))
        self.torchruns = [self.ranks[rank].parent() for rank in range(2)]

    def connection_to(self, host: str) -> psutil.Process:
        """The ssh that runs here for a host."""
        children = psutil.Process(self.launcher.pid).children()
        return next(each for each in children if host in each.cmdline())

    def require_gone(self, timeout: float) -> float:
        """Waits until nothing is left of it; returns after how many seconds that was."""
        begin = time.monotonic()
        everything = [*self.ranks.values(), *self.torchruns]
        _, alive = psutil.wait_procs(everything, timeout=timeout * PATIENCE)
        assert not alive
        return time.monotonic() - begin

    def rest(self) -> str:
        text: str = self.launcher.communicate(timeout=60 * PATIENCE)[0]
        return text

    def close(self) -> None:
        for each in (*self.ranks.values(), *self.torchruns):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        self.launcher.kill()
        self.launcher.communicate()


@pytest.fixture
def waiting(three: Hosts, ssh: Ssh, tmp_path: Path) -> Iterator[Waiting]:
    job = Waiting(three, ssh, tmp_path)
    try:
        yield job
    finally:
        job.close()


def test_ctrl_c_ends_all_hosts(waiting: Waiting) -> None:
    waiting.launcher.send_signal(signal.SIGINT)
    waiting.require_gone(20)
    waiting.rest()
    assert waiting.launcher.returncode == 130


def test_when_the_launcher_is_killed_all_hosts_notice(waiting: Waiting) -> None:
    waiting.launcher.kill()
    waiting.require_gone(20)


@pytest.mark.thorough
def test_when_ssh_breaks_all_hosts_end(waiting: Waiting) -> None:
    waiting.connection_to("host1").kill()
    waiting.require_gone(20)
    assert "host host1: torchrun was ended there by signal 9; ends the ranks of host0" in (
        waiting.rest()
    )


@pytest.mark.thorough
def test_when_torchrun_is_killed_on_one_host_all_end(waiting: Waiting) -> None:
    waiting.torchruns[1].kill()
    waiting.require_gone(20)
    assert "host host1: ssh has lost it, or torchrun was killed there (status 255)" in (
        waiting.rest()
    )
    assert waiting.launcher.returncode == 255


@pytest.mark.thorough
def test_a_host_that_is_cut_off_ends_and_so_do_the_others(three: Hosts, waiting: Waiting) -> None:
    three[1].cut(silently=True)
    try:
        # ssh notices within 20 s; the host that was cut off does when it hears nothing for 30 s.
        waiting.require_gone(50)
        assert "host host1: ssh has lost it" in waiting.rest()
        assert waiting.launcher.returncode == 255
    finally:
        three[1].restore()
