"""A small Slurm of a test's own: a controller, and a node on each host, or several on this machine.

    with made_slurm([Place("n0", "10.197.0.1", hosts[0].command), ...], tmp_path) as slurm:
        slurm.run(["srun", "-N2", "-n3", sys.executable, "train.py"])

Nothing of the machine's own Slurm is used: configuration, state, keys and sockets lie in the
folder. The controller, and what is run, are on the first node's place.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import launch
from time_limit import PATIENCE

PACKAGES = "slurm-wlm munge"
_PROGRAMS = ("slurmctld", "slurmd", "munged", "srun", "sbatch", "scontrol", "sinfo")
# Until all nodes are idle; 3 s as a rule.
_START_S = 60.0
_END_S = 10.0

_CONFIGURATION = """
ClusterName=pydist
SlurmctldHost={hostname}({first.address})
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
# Without cgroups, which a container may not have.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
# Nodes may have more processors than this machine.
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
"""
_NODE = (
    "NodeName={place.name} NodeHostname={hostname} NodeAddr={place.address} Port={port} CPUs=4\n"
)
_PARTITION = "PartitionName=all Nodes=ALL Default=YES MaxTime=5 OverSubscribe=FORCE:4 State=UP\n"


@dataclass(frozen=True)
class Place:
    """A node: its name for Slurm, which need not resolve, its address, and how to run there."""

    name: str
    address: str
    command: Callable[[Sequence[str]], list[str]] = list


class Slurm:
    """A running Slurm."""

    def __init__(self, places: Sequence[Place], folder: Path) -> None:
        self.places = places
        self.folder = folder
        self.env: dict[str, str | None] = {"SLURM_CONF": str(folder / "slurm.conf")}

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout: float = 60.0,
        env: Mapping[str, str | None] | None = None,
        cwd: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command on the first node's place; see `launch.run_command`."""
        return launch.run_command(
            self.places[0].command(argv),
            timeout=timeout,
            env={**self.env, **(env or {})},
            cwd=cwd,
        )

    def run_batch(self, argv: Sequence[str], folder: Path, *, timeout: float = 60.0) -> str:
        """Submits a batch job and waits for its end; returns what it has printed.

        Args:
            argv: flags of sbatch, the script and its arguments.
            folder: where the job runs, and leaves its output.
            timeout: seconds until its end, times PATIENCE.
        """
        output = folder / "output"
        submitted = self.run(["sbatch", "--parsable", f"--output={output}", *argv], cwd=folder)
        assert submitted.returncode == 0, submitted.stderr
        job = submitted.stdout.strip()
        deadline = time.monotonic() + timeout * PATIENCE
        # `sbatch --wait` looks seldom, after half a minute at last.
        while (state := self._state_of(job)) in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
            if time.monotonic() > deadline:
                self.run(["scancel", "--signal=KILL", job])
                raise launch.ExpiredError(
                    f"the batch job took more than {timeout * PATIENCE:g} s\n"
                    f"{output.read_text() if output.exists() else ''}\n{self.logs()}"
                )
            time.sleep(0.2)
        text = output.read_text()
        assert state == "COMPLETED", f"{state}\n{text}\n{self.logs()}"
        return text

    def _state_of(self, job: str) -> str:
        said = self.run(["scontrol", "--oneliner", "show", "job", job])
        found = re.search(r"JobState=(\S+)", said.stdout)
        assert found, said.stderr
        return found[1]

    def logs(self) -> str:
        """What the daemons have said, for a test that fails."""
        paths = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text()[-4000:]}" for path in paths)


def why_no_slurm() -> str:
    """Why this machine can't run a Slurm; empty if it can."""
    if os.geteuid() != 0:
        return "Slurm's daemons are started as root"
    if missing := [name for name in _PROGRAMS if _program(name) is None]:
        return f"{', '.join(missing)} not found: apt-get install {PACKAGES}"
    return ""


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


@contextlib.contextmanager
def made_slurm(places: Sequence[Place], folder: Path) -> Iterator[Slurm]:
    """Runs a Slurm until the end of a `with`."""
    (folder / "state").mkdir()
    _configure(places, folder)
    slurm = Slurm(places, folder)
    daemons: list[subprocess.Popen[bytes]] = []

    def start(place: Place, name: str, *arguments: str) -> None:
        # In a file: what a daemon leaves behind must not hold a pipe open.
        with (folder / f"{name}-output.log").open("ab") as log:
            daemons.append(
                subprocess.Popen(
                    place.command([str(_program(name)), *arguments]),
                    env=launch.clean_environment(slurm.env),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    try:
        start(places[0], "munged", "--foreground", "--force", *_munge_flags(folder))
        _await(slurm, (folder / "munge.socket").exists, "munged makes no socket")
        start(places[0], "slurmctld", "-D", "-i")
        for place in places:
            start(place, "slurmd", "-D", "-N", place.name)
        _await(slurm, lambda: _idle_nodes(slurm) == len(places), "the nodes don't become idle")
        yield slurm
    finally:
        _end(daemons, folder)


def _configure(places: Sequence[Place], folder: Path) -> None:
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    # Slurm compares its own host's name; a node's is its own.
    hostname = socket.gethostname()
    text = _CONFIGURATION.format(
        first=places[0], hostname=hostname, folder=folder, controller_port=launch.free_port()
    )
    for place in places:
        text += _NODE.format(place=place, hostname=hostname, port=launch.free_port())
    (folder / "slurm.conf").write_text(text + _PARTITION)


def _munge_flags(folder: Path) -> list[str]:
    files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "seed-file": "seed"}
    flags = [f"--{flag}={folder}/munge.{suffix}" for flag, suffix in files.items()]
    return [*flags, f"--log-file={folder}/munge.log"]


def _idle_nodes(slurm: Slurm) -> int:
    found = slurm.run(["sinfo", "--noheader", "--Node", "--format=%T"], timeout=30)
    return found.stdout.split().count("idle")


def _await(slurm: Slurm, is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _START_S * PATIENCE
    while not is_so():
        assert time.monotonic() < deadline, f"{what}\n{slurm.logs()}"
        time.sleep(0.1)


def _end(daemons: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    # slurmd's first child may live in another session: it is asked before it is made to.
    for daemon in reversed(daemons):
        daemon.terminate()
    deadline = time.monotonic() + _END_S
    for daemon in reversed(daemons):
        with contextlib.suppress(subprocess.TimeoutExpired):
            daemon.wait(max(0.0, deadline - time.monotonic()))
        if daemon.poll() is None:
            daemon.kill()
            daemon.wait()
