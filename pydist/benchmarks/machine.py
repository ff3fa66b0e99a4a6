"""The machine that a figure depends on: what is said of it, and how benchmarks use it."""

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from pydist import _build, _native
from pydist.config.processor_name import processor_name

# Where this process may run, whatever `pin` does to its main thread.
_ALLOWED = frozenset(os.sched_getaffinity(0))


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _governor() -> str:
    names = {
        _read(str(path))
        for path in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor")
    }
    return ", ".join(sorted(names - {""})) or "unknown"


def _core_of(cpu: int) -> tuple[str, str]:
    """Socket and core; the CPUs of one core share it."""
    base = f"/sys/devices/system/cpu/cpu{cpu}/topology"
    return _read(f"{base}/physical_package_id"), _read(f"{base}/core_id") or str(cpu)


def _cache_bytes(level: int) -> int | None:
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        if (
            _read(str(index / "level")) == str(level)
            and _read(str(index / "type")) != "Instruction"
        ):
            text = _read(str(index / "size"))
            if text.endswith("K") and text[:-1].isdigit():
                return int(text[:-1]) << 10
    return None


def free_in_dev_shm() -> int | None:
    """Bytes; None where there is no /dev/shm."""
    try:
        shm = os.statvfs("/dev/shm")
    except OSError:
        return None
    return shm.f_bavail * shm.f_frsize


def _numa_nodes() -> int:
    return len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1


@dataclass(frozen=True)
class Machine:
    """What figures depend on. Equal machines may be compared, others hardly."""

    processor: str
    usable_cpus: int
    physical_cores: int
    sockets: int
    numa_nodes: int
    l2_bytes: int | None
    l3_bytes: int | None
    governor: str
    kernel: str
    instruction_set: str
    torch: str = torch.__version__
    pydist: str = _build.VERSION
    python: str = field(default_factory=platform.python_version)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def hardware(self) -> str:
        """A name for the hardware, good for a file: what is compared across runs must share it."""
        text = f"{self.processor}-{self.usable_cpus}cpus-{self.instruction_set}"
        return "".join(c if c.isalnum() else "-" for c in text.lower()).strip("-")

    def __str__(self) -> str:
        l2, l3 = (f"{size >> 10} KiB" if size else "?" for size in (self.l2_bytes, self.l3_bytes))
        return (
            f"{self.processor}, {self.usable_cpus} CPUs on {self.physical_cores} cores, "
            f"{self.sockets} sockets, {self.numa_nodes} NUMA nodes, L2 {l2}, L3 {l3}, governor "
            f"{self.governor}, {self.instruction_set}, Linux {self.kernel}\n"
            f"pydist {self.pydist}, torch {self.torch}, Python {self.python}"
        )


def describe() -> Machine:
    """The machine that this process may use."""
    cpus = sorted(_ALLOWED)
    cores = {_core_of(cpu) for cpu in cpus}
    return Machine(
        processor=processor_name(),
        usable_cpus=len(cpus),
        physical_cores=len(cores),
        sockets=len({package for package, _ in cores}),
        numa_nodes=_numa_nodes(),
        l2_bytes=_cache_bytes(2),
        l3_bytes=_cache_bytes(3),
        governor=_governor(),
        kernel=platform.release(),
        instruction_set=_native.usable_cpu_isas()[-1],
    )


def cpu_of(local_rank: int) -> int:
    """Where a rank computes: on a core of its own if there are enough.

    CPUs that share a core are taken last; with more ranks than CPUs it starts again.
    """
    seen: dict[tuple[str, str], int] = {}
    turns = []
    for cpu in sorted(_ALLOWED):
        turn = seen.get(_core_of(cpu), 0)
        seen[_core_of(cpu)] = turn + 1
        turns.append((turn, cpu))
    order = [cpu for _, cpu in sorted(turns)]
    return order[local_rank % len(order)]


def pin(local_rank: int) -> None:
    """One compute thread for this rank, on the CPU that is its own."""
    os.sched_setaffinity(0, {cpu_of(local_rank)})
    torch.set_num_threads(1)


@contextmanager
def unpinned() -> Iterator[None]:
    """For what starts threads: they may run on any CPU, as those of a process nobody has pinned.

    Threads inherit where they may run. gloo's would wait for the very CPU that their rank computes
    on, and every message would take milliseconds.
    """
    pinned = os.sched_getaffinity(0)
    os.sched_setaffinity(0, _ALLOWED)
    try:
        yield
    finally:
        os.sched_setaffinity(0, pinned)


def keep_freed_blocks() -> None:
    """For processes that start later: glibc keeps what they free, as most allocators do.

    It would give large blocks back to the system at every free, and every step of a training would
    pay for page faults.
    """
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(1 << 30))
    os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str((1 << 31) - 1))
