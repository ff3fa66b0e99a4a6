"""bench/peers' C program on Open MPI, with ranks on several hosts that talk by TCP alone."""

from __future__ import annotations

import contextlib
import stat
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from on_hosts import Hosts, stop

from pydist.benchmarks import machine
from pydist.benchmarks.processes.peers import Installation

SMALLEST_BYTES = 8
PROGRAM = "pydist-collectives"

# What mpiexec calls in the place of ssh: AGENT HOST WORD... Each daemon gets a host name of its
# own, or Open MPI would take them all for one host.
AGENT = """\
#!/bin/sh
host=$1
shift
case $host in
{cases}
esac
exec nsenter --net="$namespace" unshare --uts \\
  sh -c 'echo "$0" >/proc/sys/kernel/hostname; exec sh -c "$1"' "$host" "$*"
"""

# Open MPI's ranks, which poll, give way by themselves where a host has more ranks than cores. Here
# each host seems to have all cores of the machine to itself.
_YIELDING = ("--mca", "mpi_yield_when_idle", "1")

# Microseconds by size in bytes.
TimesByBytes = dict[int, float]


@dataclass(frozen=True)
class OpenMpi:
    """Runs the program again and again."""

    installation: Installation
    hosts: Hosts
    ranks_per_host: Sequence[int]
    agent: Path

    def run(self, largest_bytes: int, seconds: float, timeout: float) -> TimesByBytes:
        """The time of its faster arm, in place or out of place, of each power of 2.

        Args:
            largest_bytes: of a tensor.
            seconds: for each size.
            timeout: of the whole program, in seconds.
        """
        used = list(zip(self.hosts, self.ranks_per_host, strict=False))
        named = ",".join(f"{host.address}:{ranks}" for host, ranks in used)
        command = [
            *self.installation.command(sum(self.ranks_per_host)),
            *("--prtemca", "plm_ssh_agent", str(self.agent), "--host", named),
            # No shared memory, which namespaces of one machine have in common, too.
            *("--mca", "pml", "ob1", "--mca", "btl", "tcp,self"),
            *("--mca", "btl_tcp_if_include", self.hosts[0].interface),
            *(_YIELDING if sum(self.ranks_per_host) > machine.describe().usable_cpus else ()),
            *(str(self.installation.folder / "bin" / PROGRAM), "all_reduce"),
            *(str(SMALLEST_BYTES), str(largest_bytes), str(seconds)),
        ]
        done = self.hosts[0].run(command, env=self.installation.variables, timeout=timeout)
        if done.returncode != 0:
            said = (done.stderr or done.stdout).strip()
            stop(f"Open MPI has ended with status {done.returncode}:\n{said}")
        rows = [line.split() for line in done.stdout.splitlines()]
        return {
            int(row[0]): min(float(row[1]), float(row[2]))
            for row in rows
            if len(row) == 4 and row[0].isdigit()
        }


def find(folder: Path) -> Installation | None:
    """Open MPI as bench/peers/install.py has installed it; None where it hasn't."""
    installation = Installation("openmpi", folder.resolve() / "openmpi")
    program = installation.folder / "bin" / PROGRAM
    return installation if installation.mpiexec.exists() and program.exists() else None


@contextlib.contextmanager
def open_mpi(
    installation: Installation, hosts: Hosts, ranks_per_host: Sequence[int]
) -> Iterator[OpenMpi]:
    """Open MPI on these hosts, ready to run."""
    with tempfile.TemporaryDirectory(prefix="pydist-mpi-") as folder:
        agent = Path(folder) / "agent"
        cases = "\n".join(f"  {host.address}) namespace={host.namespace} ;;" for host in hosts)
        agent.write_text(AGENT.format(cases=cases))
        agent.chmod(agent.stat().st_mode | stat.S_IXUSR)
        yield OpenMpi(installation, hosts, ranks_per_host, agent)
