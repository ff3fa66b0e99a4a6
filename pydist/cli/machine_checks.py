"""What `pydist doctor` looks at before a run: what this machine, or the job, would fail by.

Each check is a function that returns a finding, or several; none changes anything.
"""

from __future__ import annotations

import os
import platform
import resource
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy
import torch

from pydist import _build, _native
from pydist.benchmarks.machine import free_in_dev_shm
from pydist.config.variables import unknown_variables
from pydist.errors import InvalidUsage
from pydist.job.launchers import Placement, read_placement

Verdict = Literal["fine", "warning", "problem"]

_MIB = 1 << 20
# A rank of pydist and torch takes about a hundred, and some for each peer and worker.
_FEW_DESCRIPTORS = 1024
_TOO_FEW_DESCRIPTORS = 256
# A rank has some threads of its own, and torch and data loaders start more.
_FEW_PROCESSES = 256
# torch's data loaders hand batches over in /dev/shm.
_SMALL_SHM_BYTES = 256 * _MIB
_SMALL_MEMORY_BYTES = 512 * _MIB
_SLOW_LOOK_UP_S = 1.0
# Between hosts; what compares time stamps of several hosts is misled by more.
_CLOCKS_APART_S = 1.0


@dataclass(frozen=True)
class Finding:
    """One result.

    Attributes:
        subject: What was looked at.
        verdict: "fine", "warning" (it may cost time, or fail under load) or "problem" (it fails).
        text: What was found; where it is not fine, what to do.
    """

    subject: str
    verdict: Verdict
    text: str


def _size(count: int) -> str:
    return f"{count / _MIB:,.0f} MiB"


def _shared_memory() -> Iterator[Finding]:
    bound, limited_by = _native.memory_room()
    small = bound < _SMALL_MEMORY_BYTES
    advice = f", limited by {limited_by}: free some, or raise the limit" if small else ""
    yield Finding(
        "shared memory",
        "warning" if small else "fine",
        f"room for {_size(bound)} in segments of pydist's{advice}",
    )
    free = free_in_dev_shm()
    if free is None or free < _SMALL_SHM_BYTES:
        has = "is not there" if free is None else f"has {_size(free)} free"
        yield Finding(
            "/dev/shm",
            "warning",
            f"{has}. pydist does not need it, but workers of torch's data loaders do: give "
            "the container more (docker run --shm-size=1g).",
        )
    else:
        yield Finding("/dev/shm", "fine", f"{_size(free)} free")


def _limit(kind: int) -> int | None:
    """The soft limit; None where there is none."""
    soft = resource.getrlimit(kind)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _locked_memory() -> Finding:
    limit = _limit(resource.RLIMIT_MEMLOCK)
    text = "no limit" if limit is None else f"{_size(limit)} may be locked"
    if limit is not None and limit < 64 * _MIB and torch.cuda.device_count() > 0:
        return Finding(
            "locked memory",
            "warning",
            f"{text}, too little for network cards that read memory directly: ulimit -l unlimited",
        )
    return Finding("locked memory", "fine", text)


def _descriptors() -> Finding:
    limit = _limit(resource.RLIMIT_NOFILE)
    if limit is None:
        return Finding("descriptors", "fine", "no limit")
    left = limit - len(os.listdir("/proc/self/fd"))
    text = f"{left} of {limit} are left"
    if left < _FEW_DESCRIPTORS:
        verdict: Verdict = "problem" if left < _TOO_FEW_DESCRIPTORS else "warning"
        return Finding("descriptors", verdict, f"{text}, which is few: ulimit -n 65536")
    return Finding("descriptors", "fine", text)


def _processes() -> Finding:
    left: dict[str, int] = {}
    limit = _limit(resource.RLIMIT_NPROC)
    if limit is not None and os.geteuid() != 0:
        left["ulimit -u"] = limit - _own_threads()
    if (granted := _native.tasks_left()) is not None:
        left["pids.max of the cgroup"] = granted
    if not left:
        return Finding("processes and threads", "fine", "no limit")
    name, least = min(left.items(), key=lambda each: each[1])
    text = f"{least} more may start ({name})"
    if least < _FEW_PROCESSES:
        return Finding("processes and threads", "warning", f"{text}, which is few: raise it")
    return Finding("processes and threads", "fine", text)


def _own_threads() -> int:
    """Threads of this user's, as RLIMIT_NPROC counts."""
    count = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if entry.stat().st_uid == os.geteuid():
                    count += len(os.listdir(entry / "task"))
    return count


def _ports() -> Finding:
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
    except OSError as error:
        return Finding("ports", "problem", f"none can be had on 127.0.0.1: {error.strerror}")
    return Finding("ports", "fine", "can be had on 127.0.0.1")


def _meeting_port(placement: Placement) -> Iterator[Finding]:
    """Whether rank 0 can serve where the launcher says; only before the job has begun."""
    meeting = placement.rendezvous
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
    if meeting is None or placement.rank != 0 or served:
        return
    where = f"{meeting.address}:{meeting.port}"
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", meeting.port))
    except OSError as error:
        yield Finding(
            "meeting place",
            "problem",
            f"rank 0 can't serve at {where}: {error.strerror}. Set MASTER_PORT to another "
            "port, on all ranks.",
        )
    else:
        yield Finding("meeting place", "fine", f"{where} is free")


def _interfaces() -> Iterator[Finding]:
    names = [name for _, name in socket.if_nameindex()]
    others = [name for name in names if name != "lo"]
    text = ", ".join(others) if others else "none but lo: ranks of other hosts can't be reached"
    yield Finding("interfaces", "fine", text)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        wanted = [each.strip("^=") for each in os.environ.get(variable, "").split(",") if each]
        missing = [each for each in wanted if not any(name.startswith(each) for name in names)]
        if missing:
            yield Finding(
                "interfaces",
                "problem",
                f"{variable} names {', '.join(missing)}; there are: {', '.join(names)}.",
            )
    began = time.monotonic()
    host = socket.gethostname()
    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        yield Finding(
            "name of the host",
            "warning",
            f"{host} has no address ({error}): gloo needs one, or GLOO_SOCKET_IFNAME.",
        )
        return
    took = time.monotonic() - began
    if took > _SLOW_LOOK_UP_S:
        yield Finding(
            "name of the host",
            "warning",
            f"looking up {host} took {took:.1f} s, as will joining: see RES_OPTIONS in "
            "docs/failure.md.",
        )
    else:
        yield Finding("name of the host", "fine", f"{host} is {address}")


def _processors(placement: Placement) -> Finding:
    allowed = sorted(os.sched_getaffinity(0))
    quota = _native.processor_quota()
    usable = len(allowed) if quota is None else min(len(allowed), quota)
    limited = "" if quota is None else f", of which the cgroup grants {quota:g}"
    text = f"this process may use {len(allowed)} of {os.cpu_count()} cores{limited}"
    local = placement.local_world_size or 1
    if usable < local:
        return Finding(
            "cores",
            "warning",
            f"{text}, for {local} ranks: they will wait for each other's turns. Start fewer, "
            "or see to it that the launcher binds each rank to cores of its own.",
        )
    return Finding("cores", "fine", text)


def _huge_pages() -> Finding:
    def chosen(name: str) -> str:
        with suppress(OSError):
            text = Path("/sys/kernel/mm/transparent_hugepage", name).read_text()
            if "[" in text:
                return text.partition("[")[2].partition("]")[0]
        return "not there"

    text = f"for memory: {chosen('enabled')}; for shared memory: {chosen('shmem_enabled')}"
    return Finding("huge pages", "fine", text)


def _environment() -> list[Finding]:
    found = []
    try:
        _native.read_environment()
    except InvalidUsage as error:
        found.append(Finding("variables", "problem", str(error)))
    for name, nearest in unknown_variables():
        text = f"{name} is set, but there is no such variable; did you mean {nearest}?"
        found.append(Finding("variables", "warning", text))
    return found or [Finding("variables", "fine", "all understood")]


def _launcher() -> tuple[Placement, list[Finding]]:
    try:
        placement = read_placement()
    except InvalidUsage as error:
        return read_placement({}), [Finding("launcher", "problem", str(error))]
    if placement.doubt:
        return placement, [Finding("launcher", "warning", placement.doubt)]
    text = f"{placement.launcher}: rank {placement.rank} of {placement.world_size}"
    return placement, [Finding("launcher", "fine", text)]


def on_this_machine() -> list[Finding]:
    """What this process finds without talking to others."""
    placement, found = _launcher()
    return [
        *found,
        *_environment(),
        *_shared_memory(),
        _locked_memory(),
        _descriptors(),
        _processes(),
        _ports(),
        *_interfaces(),
        _huge_pages(),
        _processors(placement),
        *_meeting_port(placement),
    ]


def facts() -> dict[str, Any]:
    """What a rank tells the others, for `between_ranks`."""
    return {
        "host": socket.gethostname(),
        "clock": time.time(),
        "cores": sorted(os.sched_getaffinity(0)),
        "versions": {
            "pydist": _build.VERSION,
            "built for torch": _build.TORCH_VERSION,
            "torch": str(torch.__version__),
            "CUDA of torch": torch.version.cuda or "none",
            "Python": platform.python_version(),
            "numpy": numpy.__version__,
        },
    }


def between_ranks(told: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """What only shows when all ranks are looked at.

    Args:
        told: The `facts()` of every rank, in rank order, all taken at the same time.
    """
    return [*_versions(told), _clocks(told), *_bindings(told)]


def _versions(told: Sequence[Mapping[str, Any]]) -> list[Finding]:
    found = []
    for name in told[0]["versions"]:
        by_value: dict[str, list[int]] = {}
        for rank, each in enumerate(told):
            by_value.setdefault(each["versions"][name], []).append(rank)
        if len(by_value) > 1:
            parts = [
                f"{value} on rank {', '.join(map(str, ranks))}" for value, ranks in by_value.items()
            ]
            found.append(
                Finding("versions", "problem", f"{name} differs: {'; '.join(parts)}. Install one.")
            )
    return found or [Finding("versions", "fine", f"the same on all {len(told)} ranks")]


def _clocks(told: Sequence[Mapping[str, Any]]) -> Finding:
    times = [each["clock"] for each in told]
    apart = max(times) - min(times)
    if apart > _CLOCKS_APART_S:
        early, late = times.index(min(times)), times.index(max(times))
        return Finding(
            "clocks",
            "warning",
            f"{apart:.1f} s apart, on rank {early} ({told[early]['host']}) and rank {late} "
            f"({told[late]['host']}): their logs and traces can't be compared. Set up NTP.",
        )
    return Finding("clocks", "fine", f"within {_CLOCKS_APART_S:g} s of each other")


def _bindings(told: Sequence[Mapping[str, Any]]) -> list[Finding]:
    by_host: dict[str, list[Mapping[str, Any]]] = {}
    for each in told:
        by_host.setdefault(each["host"], []).append(each)
    found = []
    for host, ranks in by_host.items():
        cores = {core for each in ranks for core in each["cores"]}
        if len(cores) < len(ranks):
            found.append(
                Finding(
                    "cores of all ranks",
                    "warning",
                    f"the {len(ranks)} ranks on {host} share {len(cores)}: they will wait for each "
                    "other's turns.",
                )
            )
    return found or [Finding("cores of all ranks", "fine", "at least one for each rank")]
