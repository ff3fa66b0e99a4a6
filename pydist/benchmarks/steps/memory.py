"""What averaging gradients costs in memory, beside torch's DDP.

A step is forward and backward. After some of them, with the gradients there and garbage collected,
every rank reads what the kernel says of it, while all wait for each other. The arms: `alone` (the
plain module, nothing of the engine), `pydist` (pydist.DataParallel as it comes) and those of DDP
(over gloo, with the knobs of `ddp_knobs`). Each runs in processes of its own, with the same malloc
settings, so that no arm hides in what another one has left.

Of all ranks together, *in use* is what malloc has not got back, and the memory that ranks share,
which counts once. The *peak* is that and what malloc keeps for the next step, for it gives nothing
back (`machine.keep_freed_blocks`). To tell them apart, malloc gives back what it can before the
second reading. Counted are proportional shares of anonymous and shared memory, and shared memory
that is reserved and untouched. Pages of libraries are left out: how many processes share them,
strangers among them, changes all the time.

An arm counts with the modules that it imports: DDP imports dynamo.

Gradients are malloc's for `alone` and shared memory for pydist, so that what pydist uses beyond
alone is what the engine owns beyond one copy of them. It promises at most 2 % of the model and 8
MiB, for each rank, of models without sparse gradients.
"""

import ctypes
import gc
import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pydist
from pydist._torch import bytes_of
from pydist.benchmarks.machine import pin
from pydist.benchmarks.steps import ddp_knobs
from pydist.benchmarks.steps.models import MODELS

ALONE, OURS = "alone", "pydist"

PROMISED_SHARE = 0.02
PROMISED_MIB = 8.0

# Before the reading: the plan may change after steps 1, 2 and 4.
_STEPS = 5

MIB = 1 << 20


@dataclass
class _Reading:
    """Of one rank, or of all of them together. Bytes."""

    proportional: int = 0
    # The bytes that back shared memory, touched or not, by inode.
    segments: dict[int, int] = field(default_factory=dict)
    # The proportional shares of all mappings of one file or kind, by its name.
    owners: dict[str, int] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        touched = sum(size for owner, size in self.owners.items() if owner.startswith("memfd:"))
        return self.proportional + max(0, sum(self.segments.values()) - touched)

    def add(self, other: "_Reading") -> None:
        self.proportional += other.proportional
        self.segments.update(other.segments)
        for owner, size_bytes in other.owners.items():
            self.owners[owner] = self.owners.get(owner, 0) + size_bytes


class _Barrier:
    """Of the ranks that pydist.spawn has started, without the engine or gloo."""

    def __init__(self, rank: int, size: int) -> None:
        self._size = size
        self._number = 0
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._store = dist.PrefixStore("bench", dist.TCPStore(host, port, is_master=False))

    def wait(self) -> None:
        self._number += 1
        if self._store.add(f"came {self._number}", 1) == self._size:
            self._store.set(f"all came {self._number}", "")
        self._store.wait([f"all came {self._number}"])


def _read() -> _Reading:
    """What this process takes."""
    reading = _Reading()
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
            reading.proportional += int(line.split()[1]) << 10
    owner = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if mapping := re.match(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \S+ *(.*)", line):
            path = mapping[1].removesuffix(" (deleted)")
            if path.startswith("/memfd:"):
                owner = path[1:]
            elif path.startswith("/"):
                owner = "variables of libraries"
            else:
                owner = "malloc's heap" if path == "[heap]" else "anonymous"
            continue
        # Of a library, what the process has written to is its own.
        counted = "Anonymous:" if owner == "variables of libraries" else "Pss:"
        if line.startswith(counted):
            reading.owners[owner] = reading.owners.get(owner, 0) + (int(line.split()[1]) << 10)
    for link in Path("/proc/self/fd").iterdir():
        # The one that listed the folder is gone by now.
        if link.is_symlink() and os.readlink(link).startswith("/memfd:"):
            status = link.stat()
            reading.segments[status.st_ino] = status.st_blocks * 512
    return reading


def _wrap(arm: str, model: nn.Module) -> nn.Module:
    if arm == ALONE:
        return model
    if arm == OURS:
        pydist.init()
        return pydist.DataParallel(model)
    dist.init_process_group("gloo")
    return DistributedDataParallel(model, **ddp_knobs.KNOBS[arm])


@dataclass
class _RankMemory:
    taken: _Reading
    in_use: _Reading
    gradient_bytes: int
    modules: int


def _run(name: str, arm: str, pins: bool) -> _RankMemory:
    """On each rank."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if pins:
        pin(rank)
    barrier = _Barrier(rank, size)
    torch.manual_seed(0)
    model, inputs = MODELS[name].make()
    model = _wrap(arm, model)
    for _ in range(_STEPS):
        model.zero_grad()
        model(*inputs).square().mean().backward()
    _read()  # which takes some memory itself
    gc.collect()
    barrier.wait()
    taken = _read()
    barrier.wait()
    ctypes.CDLL(None).malloc_trim(0)
    barrier.wait()
    in_use = _read()
    barrier.wait()
    # Which shows that they are there.
    gradients = [bytes_of(p.grad) for p in model.parameters() if p.grad is not None]
    return _RankMemory(taken, in_use, sum(gradients), len(sys.modules))


def measure_memory(name: str, arm: str, ranks: int, *, pins: bool) -> dict[str, Any]:
    """Trains a model in new processes and reads what they take.

    Args:
        name: of the model.
        arm: `alone`, `pydist` or one of `ddp_knobs.KNOBS`.
        ranks: how many.
        pins: whether each rank has a core of its own.

    Returns:
        For JSON: MiB of all ranks together (but gradients, of rank 0), and what maps them.
    """
    taken, in_use = _Reading(), _Reading()
    readings = pydist.spawn(_run, (name, arm, pins), nprocs=ranks)
    for reading in readings:
        taken.add(reading.taken)
        in_use.add(reading.in_use)
    return {
        "gradients_mib": readings[0].gradient_bytes / MIB,
        "modules": readings[0].modules,
        "in_use_mib": in_use.size_bytes / MIB,
        "peak_mib": taken.size_bytes / MIB,
        "owners_mib": {owner: size / MIB for owner, size in sorted(in_use.owners.items())},
    }


def engine_share(alone: dict[str, Any], ours: dict[str, Any], ranks: int) -> dict[str, Any]:
    """What the engine owns beyond one copy of the gradients, for each rank, and what it may.

    Args:
        alone: what `measure_memory` returned of the arm `alone`.
        ours: the same of `pydist`.
        ranks: how many ranks both had.
    """
    owned_mib = (ours["in_use_mib"] - alone["in_use_mib"]) / ranks
    promised_mib = PROMISED_SHARE * ours["gradients_mib"] + PROMISED_MIB
    return {
        "owned_mib": owned_mib,
        "promised_mib": promised_mib,
        "keeps_promise": owned_mib <= promised_mib,
    }
