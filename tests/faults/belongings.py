"""What a process has of the system: to see that nothing of a job stays behind."""

import os
import time
from collections import Counter
from pathlib import Path

# Threads that a process keeps, whatever the job: torch's own once it has computed, and a pool of
# pydist's whose threads end when they have been idle for a while.
_OF_PROCESS = ("pt_autograd", "pt_main", "pt_nccl", "pt_tcpstore", "pydist-wait")


def belongings() -> Counter[str]:
    """Descriptors by what they are open on, threads by name, pydist's segments, and children."""
    found: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:  # the one of this listing
            continue
        # Sockets and pipes by kind: their numbers differ from one to the next.
        found[f"descriptor {target.partition(':')[0] if ':[' in target else target}"] += 1
    own = os.getpid()
    for task in Path(f"/proc/{own}/task").iterdir():
        try:
            name = (task / "comm").read_text().strip()
            children = (task / "children").read_text().split()
        except OSError:
            continue
        if int(task.name) != own and not name.startswith(_OF_PROCESS):
            found[f"thread {name}"] += 1
        for child in children:
            found[f"process {child}"] += 1
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/memfd:pydist" in line:
            found["segment " + line.split("memfd:", 1)[1].split()[0]] += 1
    return found


def left_since(before: Counter[str], within_s: float) -> list[str]:
    """What is there now and was not there before; waits a while for it to go."""
    deadline = time.monotonic() + within_s
    while True:
        left = belongings() - before
        if not left or time.monotonic() > deadline:
            return sorted(left.elements())
        time.sleep(0.05)


def resident_bytes() -> int:
    """Memory that this process alone has in use."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Private_Dirty:"):
            return int(line.split()[1]) * 1024
    return 0
