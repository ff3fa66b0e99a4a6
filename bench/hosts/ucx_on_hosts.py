"""UCX's ucx_perftest between two hosts, by TCP alone."""

from __future__ import annotations

import csv
import select
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from on_hosts import Hosts, stop

from pydist.benchmarks import machine

# Of ucx_perftest's CSV: medians and means of half a round trip, in microseconds.
_MEDIAN, _MEAN = "50.0_percentile_lat", "avg_lat"


@dataclass(frozen=True)
class OneWay:
    """Seconds that a message takes, which is half a round trip."""

    # Of the last 2048 round trips, which is as many as ucx_perftest remembers.
    median_s: float
    mean_s: float


@dataclass(frozen=True)
class Ucx:
    """UCX as bench/peers/install.py has installed it."""

    folder: Path

    def tag_lat(self, hosts: Hosts, size_bytes: int, calls: int, timeout: float) -> OneWay:
        """Runs `ucx_perftest -t tag_lat` from the first host to the second.

        Each side polls, on a core of its own where there are two. Ends the script where one fails.

        Args:
            hosts: two.
            size_bytes: of a message.
            calls: round trips; a tenth as many come before.
            timeout: of each side, in seconds.
        """
        port = str(hosts[1].free_port())
        # Line by line, or it would keep to itself that it listens.
        listen = ["stdbuf", "-oL", *self._command(hosts, 1, "-p", port)]
        with hosts[1].popen(
            listen,
            env=self._variables(hosts, 1),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
        ) as listener:
            try:
                assert listener.stdout is not None
                _wait_until_it_listens(listener.stdout, timeout)
                ask = ["-p", port, "-t", "tag_lat", "-s", str(size_bytes), "-f", "-v"]
                ask += ["-n", str(calls), "-w", str(max(1, calls // 10))]
                done = hosts[0].run(
                    self._command(hosts, 0, hosts[1].address, *ask),
                    env=self._variables(hosts, 0),
                    timeout=timeout,
                )
                if done.returncode != 0:
                    said = (done.stderr or done.stdout).strip()
                    stop(f"ucx_perftest has ended with status {done.returncode}:\n{said}")
                listener.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                stop(f"the listening ucx_perftest has not ended after {timeout:g} s")
            finally:
                listener.kill()
        return _read(done.stdout)

    def _command(self, hosts: Hosts, index: int, *arguments: str) -> list[str]:
        # UCX looks for interfaces in /sys/class/net, and `ip netns exec` shows it the host's.
        enter = ["ip", "netns", "exec", hosts[index].name]
        program = str(self.folder / "libucx" / "bin" / "ucx_perftest")
        return [*enter, program, *arguments, "-c", str(machine.cpu_of(index))]

    def _variables(self, hosts: Hosts, index: int) -> dict[str, str]:
        return {
            # The program would find a UCX of the system first, which may be older.
            "LD_LIBRARY_PATH": str(self.folder / "libucx" / "lib"),
            "UCX_TLS": "tcp",
            "UCX_NET_DEVICES": hosts[index].interface,
        }


def _wait_until_it_listens(said: IO[bytes], timeout: float) -> None:
    lines = ""
    while select.select([said], [], [], timeout)[0]:
        line = said.readline().decode(errors="replace")
        if line.startswith("Waiting for connection"):
            return
        lines += line
        if not line:
            stop(f"ucx_perftest has ended before it listened:\n{lines.strip()}")
    stop(f"ucx_perftest does not listen after {timeout:g} s:\n{lines.strip()}")


def _read(text: str) -> OneWay:
    rows = list(csv.DictReader(text.splitlines()))
    if len(rows) != 1 or _MEDIAN not in rows[0] or _MEAN not in rows[0]:
        stop(f"ucx_perftest has said something else than latencies:\n{text.strip()}")
    return OneWay(float(rows[0][_MEDIAN]) * 1e-6, float(rows[0][_MEAN]) * 1e-6)


def find(folder: Path) -> Ucx | None:
    """UCX in the folder that bench/peers/install.py has filled; None where it isn't there."""
    ucx = Ucx(folder.resolve() / "ucx")
    return ucx if (ucx.folder / "libucx" / "bin" / "ucx_perftest").exists() else None
