"""`pydist run -H`: several hosts, all of them this one. The ssh that is found in PATH stands in for
the real one: it runs here what another host is asked to run. tests/hosts has the real one."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import torch
from launch import clean_environment, run_command
from time_limit import PATIENCE

from pydist.cli import main, run, run_on_hosts
from pydist.cli.host_list import Host
from pydist.cli.host_protocol import Greeting, Task

pytestmark = pytest.mark.timeout(120)

# Like ssh it hands one word to a shell, with few variables, in another folder, and ends with its
# status. A host called refuses-… asks for a password, one called old-… has no such Python.
SSH = """#!/bin/sh
echo "ssh $*" >> {log}
while [ "$1" != -- ]; do shift; done
case $2 in
  refuses*) echo "$2: Permission denied (publickey,password)." >&2; exit 255;;
  old*) echo "sh: 1: exec: python: not found" >&2; exit 127;;
  silent*) exec sleep 100;;
esac
cd /
echo "a word of welcome"
exec env -i HOME=/ PATH="$PATH" {kept} SSH_CONNECTION="127.0.0.1 50022 127.0.0.1 22" sh -c "$3"
"""

TELLS = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "FOO", "PYDIST_TIMEOUT")
print([os.environ.get(name) for name in names], os.getcwd(), sys.argv[1:])
print("secret", os.environ["PYDIST_JOB_SECRET"])
print("error", file=sys.stderr)
print("no end of line", end="")
"""
SUMS = """
import sys, torch, pydist
pydist.init()
total = torch.tensor([float(pydist.rank() + 1)])
pydist.all_reduce(total)
sys.stdout.write(f"sum {float(total)}\\n")  # at once: ranks of one host share the pipe
"""
# Rank 1 fails if it is asked to; all others wait for what does not come. Lines are written at once,
# as above.
WAITS = """
import os, signal, sys, time

def told(number, frame):
    sys.stdout.write(f"got {signal.Signals(number).name}\\n")
    raise SystemExit(9)

signal.signal(signal.SIGINT, told)
sys.stdout.write(f"pid {os.getpid()} {os.getppid()}\\n")
if "fails" in sys.argv and os.environ["RANK"] == "1":
    raise SystemExit(5)
time.sleep(100)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the job runs; its name asks for quotes."""
    path = tmp_path / "it's a folder"
    path.mkdir()
    return path


@pytest.fixture
def with_ssh(tmp_path: Path) -> dict[str, str | None]:
    """An environment with the stand-in."""
    program = tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    kept = " ".join(
        f"{name}='{os.environ[name]}'" for name in ("PYTHONFAULTHANDLER",) if name in os.environ
    )
    program.write_text(SSH.format(log=tmp_path / "log", kept=kept))
    program.chmod(0o755)
    return {"PATH": f"{program.parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": None}


def write(folder: Path, script: str) -> str:
    (folder / "train.py").write_text(script)
    return "train.py"


def pydist_run(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pydist", "run", *arguments]


def test_ranks_are_numbered_in_the_order_of_the_hosts(
    folder: Path, with_ssh: dict[str, str | None], tmp_path: Path
) -> None:
    flags = ["-np", "4", "-H", "one:2,localhost:1,two:4", "-x", 'FOO=it\'s "x" $HOME']
    script = [write(folder, TELLS), "-n", "a b", "*"]
    env = {**with_ssh, "PYDIST_TIMEOUT": "77"}
    done = run_command(pydist_run(*flags, *script), env=env, cwd=folder, timeout=100)
    assert done.returncode == 0, done.stderr
    foo = 'it\'s "x" $HOME'
    places = [("0", "2"), ("1", "2"), ("0", "1"), ("0", "1")]
    expected = [
        f"[{rank}]: {[str(rank), '4', local, size, foo, '77']} {folder} {script[1:]}"
        for rank, (local, size) in enumerate(places)
    ]
    lines = done.stdout.splitlines()
    assert sorted(line for line in lines if "secret" not in line and "['" in line) == expected
    assert [f"[{rank}]: no end of line" in lines for rank in range(4)] == [True] * 4
    assert [f"[{rank}]: error" in done.stderr.splitlines() for rank in range(4)] == [True] * 4
    # What a shell prints when somebody logs in is no rank's.
    assert "[one]: a word of welcome" in lines
    secrets = set(re.findall("secret ([0-9a-f]{64})", done.stdout))
    assert len(secrets) == 1
    log = (tmp_path / "log").read_text()
    assert log.count("BatchMode=yes") == 2  # this host needs no ssh
    assert not any(word in log for word in (*secrets, "FOO", "train.py"))


def test_what_names_this_host_is_told_to_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYDIST_HOST_ID", "here")
    monkeypatch.setenv("PYDIST_SOCKETS", "4")
    sent = run_on_hosts._environment(["NAME=value", "PYDIST_INTERFACE=eth0"])
    assert sent["PYDIST_SOCKETS"] == "4"
    assert (sent["NAME"], sent["PYDIST_INTERFACE"]) == ("value", "eth0")
    assert "PYDIST_HOST_ID" not in sent


def test_ranks_of_all_hosts_compute_together_from_a_hostfile(
    folder: Path, with_ssh: dict[str, str | None], tmp_path: Path
) -> None:
    (folder / "hosts").write_text("localhost slots=1 # first\ntwo:1\n")
    # As in a shell that somebody has reached by ssh: that has nothing to do with these hosts.
    env = {**with_ssh, "SSH_CONNECTION": "192.0.2.8 50022 192.0.2.9 22"}
    flags = ["--hostfile", "hosts", "-p", "2222", "--ssh-args", "-i 'a key'"]
    done = run_command(pydist_run(*flags, write(folder, SUMS)), env=env, cwd=folder, timeout=100)
    assert done.returncode == 0, done.stderr
    sums = sorted(line for line in done.stdout.splitlines() if "sum" in line)
    assert sums == [f"[{rank}]: sum 3.0" for rank in range(2)]
    assert (tmp_path / "log").read_text().count("ssh -T -i a key -p 2222 -o BatchMode=yes") == 1


class Running:
    """A job of three ranks on two hosts, all of which wait."""

    def __init__(self, env: dict[str, str | None], folder: Path, *arguments: str) -> None:
        flags = ["-H", "one:2,two:1"]
        self.launcher = subprocess.Popen(
            pydist_run(*flags, write(folder, WAITS), *arguments),
            env=clean_environment(env),
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self.processes: dict[int, psutil.Process] = {}
        assert self.launcher.stdout is not None
        while len(self.processes) < 3:
            line = self.launcher.stdout.readline()
            assert line, self.lines
            self.lines.append(line)
            if found := re.fullmatch(r"\[(\d)\]: pid (\d+) \d+\n", line):
                with contextlib.suppress(psutil.NoSuchProcess):
                    self.processes[int(found[1])] = psutil.Process(int(found[2]))
        self.on_hosts = [
            each
            for each in psutil.Process(self.launcher.pid).children(recursive=True)
            if each.pid not in {process.pid for process in self.processes.values()}
        ]

    @property
    def ssh(self) -> dict[str, psutil.Process]:
        """What stands in for ssh is by now the process that it has started."""
        started = psutil.Process(self.launcher.pid).children()
        return dict(zip(("one", "two"), sorted(started, key=lambda p: p.pid), strict=True))

    def require_all_gone(self) -> None:
        everything = [*self.processes.values(), *self.on_hosts]
        _, alive = psutil.wait_procs(everything, timeout=20 * PATIENCE)
        assert not alive

    def rest(self) -> str:
        """What the launcher prints until its end."""
        text, _ = self.launcher.communicate(timeout=60 * PATIENCE)
        return text

    def close(self) -> None:
        for process in (*self.processes.values(), *self.on_hosts):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.launcher.kill()
        self.launcher.communicate()


@pytest.fixture
def running(folder: Path, with_ssh: dict[str, str | None]) -> Iterator[Running]:
    job = Running(with_ssh, folder)
    try:
        yield job
    finally:
        job.close()


def test_when_a_rank_fails_the_ranks_of_other_hosts_end(
    folder: Path, with_ssh: dict[str, str | None]
) -> None:
    done = run_command(
        pydist_run("-H", "one:2,two:1", write(folder, WAITS), "fails"),
        env=with_ssh,
        cwd=folder,
        timeout=60,
    )
    assert done.returncode == 1
    assert "host one: torchrun ended there with status 1; ends the ranks of two" in done.stderr
    assert "exitcode  : 5" in done.stderr
    for pid in re.findall(r"\]: pid (\d+)", done.stdout):
        assert not psutil.pid_exists(int(pid))


@pytest.mark.parametrize(
    ("number", "status"),
    [
        pytest.param(signal.SIGINT, 130, id="ctrl-c"),
        pytest.param(signal.SIGTERM, 143, id="sigterm", marks=pytest.mark.thorough),
    ],
)
def test_a_signal_to_the_launcher_reaches_all_ranks(
    running: Running, number: int, status: int
) -> None:
    running.launcher.send_signal(number)
    text = running.rest()
    assert running.launcher.returncode == status, text
    if number == signal.SIGINT:
        assert sorted(re.findall(r"\[\d\]: got SIGINT", text)) == [
            f"[{rank}]: got SIGINT" for rank in range(3)
        ]
    running.require_all_gone()


def test_when_the_launcher_is_killed_all_hosts_notice(running: Running) -> None:
    running.launcher.kill()
    running.require_all_gone()


def test_when_a_host_is_lost_the_ranks_of_the_others_end(running: Running) -> None:
    running.ssh["two"].kill()
    text = running.rest()
    assert running.launcher.returncode == 137, text
    assert "host two: torchrun was ended there by signal 9; ends the ranks of one" in text
    running.require_all_gone()


@pytest.fixture
def ssh_in_path(
    folder: Path, with_ssh: dict[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For commands that this process runs itself: the stand-in for ssh, in the folder."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", str(with_ssh["PATH"]))
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.parametrize(
    ("hosts", "said"),
    [
        (
            "localhost,refuses-b",
            "ssh does not get to host refuses-b (status 255): refuses-b: Permission denied "
            "(publickey,password). — `ssh refuses-b true` has to work",
        ),
        ("old-b,localhost", "pydist did not start on host old-b (status 127): sh: 1: exec:"),
    ],
)
@pytest.mark.usefixtures("ssh_in_path")
def test_a_host_that_can_not_be_had_is_one_clear_error(
    hosts: str,
    said: str,
    folder: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main(["run", "-H", hosts, write(folder, TELLS)]) == 2
    out, error = capfd.readouterr()
    assert said in error
    assert error.count("\n") == 1
    assert "secret" not in out


@pytest.mark.usefixtures("ssh_in_path")
def test_a_host_that_does_not_answer_is_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pydist.cli.run_on_hosts._GREETING_S", 0.2)
    monkeypatch.setattr("pydist.cli.run_on_hosts._END_S", 0.2)
    assert main(["run", "-H", "silent-a,silent-b", "train.py"]) == 2
    assert "no answer within 0.2 s from silent-a, silent-b" in capfd.readouterr().err


@pytest.mark.usefixtures("ssh_in_path")
def test_another_torch_on_a_host_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert main(["run", "-H", "one", write(folder, TELLS)]) == 2
    assert re.search(r"host one has pydist .* with torch 2\.\d+\.\d.*, this one .* with torch "
                     r"2\.99\.0: install the same", capfd.readouterr().err)  # fmt: skip


class Heard:
    """A host that hears what it is to run."""

    def __init__(self, name: str, slots: int | None, ssh_connection: str = "") -> None:
        self.host = Host(name, slots)
        self.greeting = Greeting("1", "2", 4000, ssh_connection)
        self.tasks: list[Task] = []

    def send(self, task: Task) -> None:
        self.tasks.append(task)


def options_of(flags: list[str], heard: list[Heard]) -> list[dict[str, Any]]:
    """Of torchrun on each host."""
    options = run._parser().parse_args([*flags, "train.py"])
    connections: list[Any] = heard
    run_on_hosts._send_tasks(options, connections, {})
    # They travel as text.
    return [Task.read(task.written()).options for each in heard for task in each.tasks]


# As sshd of a and of b have it when ssh comes from 10.0.0.9.
FROM_9 = ("10.0.0.9 50022 10.0.0.1 22", "10.0.0.9 50023 10.0.0.2 22")


@pytest.mark.parametrize(
    ("heard", "flags", "address"),
    [
        ([Heard("a", 1, FROM_9[0]), Heard("b", 1, FROM_9[1])], [], "10.0.0.1"),
        # The launcher is on the first host, which no ssh has reached.
        ([Heard("localhost", 1), Heard("b", 1, FROM_9[1])], [], "10.0.0.9"),
        # It is on the second.
        ([Heard("a", 1, FROM_9[0]), Heard("localhost", 1)], [], "10.0.0.1"),
        ([Heard("10.1.0.1", 1, FROM_9[0]), Heard("b", 1, FROM_9[1])], [], "10.1.0.1"),
        ([Heard("a", 1, FROM_9[0]), Heard("b", 1)], ["--master-addr", "a-ib"], "a-ib"),
        ([Heard("a", 1, FROM_9[0])], [], "127.0.0.1"),
        # These tell nothing that others could use.
        ([Heard("a", 1, "fe80::9%eth0 1 fe80::1%eth0 22"), Heard("b", 1)], [], "a"),
        ([Heard("a", 1, "UNKNOWN 1 UNKNOWN 22"), Heard("b", 1)], [], "a"),
    ],
    ids=["both by ssh", "first", "second", "literal", "told", "alone", "link-local", "unknown"],
)
def test_all_meet_at_an_address_of_the_first_host(
    heard: list[Heard], flags: list[str], address: str
) -> None:
    for number, options in enumerate(options_of(["-H", "a", *flags], heard)):
        assert (options["master_addr"], options["master_port"]) == (address, 4000)
        assert (options["nnodes"], options["node_rank"]) == (str(len(heard)), number)


@pytest.mark.parametrize(
    ("flags", "counts"),
    [(["-n", "2"], ["2", "2"]), (["--gpus", "-1"], [None, None])],
    ids=["-n", "--gpus"],
)
def test_each_host_may_get_as_many_processes(flags: list[str], counts: list[str | None]) -> None:
    options = run._parser().parse_args(["-H", "a,b", *flags, "train.py"])
    hosts = run_on_hosts._hosts(options)
    assert hosts == [Host("a", None), Host("b", None)]
    told = options_of(flags, [Heard(host.name, host.slots) for host in hosts])
    assert [each["nproc_per_node"] for each in told] == counts


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["-np", "9", "-H", "a:4,b:4"], "-np 9 is more than the 8 slots of the hosts (a:4, b:4)"),
        (["-np", "0", "-H", "a"], "'0' is no number, 1 or more"),
        (["-H", "a", "--hostfile", "b"], "-H and --hostfile both say"),
        (["-H", "a:2", "-n", "2"], "name the hosts alone, a,b"),
        (["-H", "a", "-n", "2", "-np", "2"], "leave out -np"),
        (["-H", "a", "--nnodes", "2"], "leave out --standalone, --nnodes"),
        (["-H", "a", "--on-failure=continue"], "leave out -H"),
        (["-H", "a", "-x", "NO_SUCH_VARIABLE"], "-x NO_SUCH_VARIABLE: no such variable is set"),
        (["-H", "a", "-x", "=1"], "-x =1: give a name"),
        (["-np", "2", "-n", "2"], "-np and -n say the same here"),
        (["-H", "a", "--ssh-args", "'"], "--ssh-args ': No closing quotation"),
    ],
)
def test_flags_that_contradict_each_other_are_one_line(
    flags: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["run", *flags, "train.py"]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_np_without_hosts_is_for_this_one(folder: Path) -> None:
    tells = "import os, sys\nsys.stdout.write(f\"of {os.environ['WORLD_SIZE']}\\n\")\n"
    done = run_command(pydist_run("-np", "2", write(folder, tells)), cwd=folder, timeout=90)
    assert (done.returncode, done.stdout) == (0, "of 2\nof 2\n"), done.stderr
