"""How much of the machine is taken by processes that are not ours.

A pair that takes turns meets the same noise, but does not always suffer the same: what waits
longer, or moves more memory, loses more. So a ratio that was measured beside busy neighbours may
tell nothing, however narrow its interval is.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

# The fields of a processor's line in /proc/stat. Stolen time is that of other virtual machines;
# what guests take is counted as user time already.
_FIELDS = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class _Reading:
    """Seconds so far, of all processors that this process may use."""

    all_s: float
    busy_s: float
    ours_s: float


def _read() -> _Reading:
    names = {f"cpu{cpu}" for cpu in os.sched_getaffinity(0)}
    all_ticks = idle_ticks = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *ticks = line.split()
        if name in names:
            of = dict(zip(_FIELDS, map(int, ticks), strict=False))
            all_ticks += sum(of.values())
            idle_ticks += of["idle"] + of["iowait"]
    return _Reading(all_ticks * _TICK_S, (all_ticks - idle_ticks) * _TICK_S, _our_seconds())


def _our_seconds() -> float:
    """Of this process, all below it, and those of them that have ended."""
    this = psutil.Process()
    total_s = 0.0
    for process in (this, *this.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total_s += times.user + times.system + times.children_user + times.children_system
    return total_s


class OtherProcesses:
    """Watches from its construction on."""

    def __init__(self) -> None:
        self._start = _read()

    def share(self) -> float:
        """What they have taken since, of all that this process may use: 0 to 1."""
        now = _read()
        others_s = (now.busy_s - self._start.busy_s) - (now.ours_s - self._start.ours_s)
        return max(0.0, others_s) / max(now.all_s - self._start.all_s, _TICK_S)
