"""What averaging gradients costs in memory, beside torch's DDP: python bench/memory.py

A step is forward and backward. After some of them, with the gradients there and garbage collected,
every rank reads what the kernel says of it, while all wait for each other. The arms: `alone` (the
plain module, nothing of the engine), `pydist` (pydist.DataParallel as it comes), `DDP` (torch's
DistributedDataParallel over gloo as it comes) and `DDP, views` (with gradient_as_bucket_view). Each
runs in processes of its own, with the same malloc settings.

Of all ranks together, *in use* is what malloc has not got back, and the memory that ranks share,
which counts once; *freed* is what malloc keeps for the next step beyond that. To tell them apart,
malloc gives back what it can before the second reading. Counted are proportional shares of
anonymous and shared memory, and shared memory that is reserved and untouched. Pages of libraries
are left out: how many processes share them, strangers among them, changes all the time.

An arm counts with the modules that it imports: DDP imports dynamo.

Gradients are malloc's for `alone` and shared memory for pydist, so that what pydist uses beyond
alone is what the engine owns beyond one copy of them. It promises at most 2 % of the model and 8
MiB, for each rank; the exit status is 1 where it takes more.
"""

import argparse
import ctypes
import gc
import json
import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from host import describe, keep_freed_blocks, pin
from models import MODELS
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pydist

ARMS = ("alone", "pydist", "DDP", "DDP, views")

PROMISED_SHARE = 0.02
PROMISED_MIB = 8.0

MIB = 1 << 20


@dataclass
class Reading:
    """Of one rank, or of all of them together. Bytes."""

    proportional: int = 0
    # By inode: what backs shared memory, touched or not.
    segments: dict[int, int] = field(default_factory=dict)
    # By who has mapped it: proportional shares.
    owners: dict[str, int] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        touched = sum(size for owner, size in self.owners.items() if owner.startswith("memfd:"))
        return self.proportional + max(0, sum(self.segments.values()) - touched)

    def add(self, other: "Reading") -> None:
        self.proportional += other.proportional
        self.segments.update(other.segments)
        for owner, size_bytes in other.owners.items():
            self.owners[owner] = self.owners.get(owner, 0) + size_bytes


class Barrier:
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


def read() -> Reading:
    """What this process takes."""
    reading = Reading()
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


def wrap(arm: str, model: nn.Module) -> nn.Module:
    if arm == "alone":
        return model
    if arm == "pydist":
        pydist.init("native")
        return pydist.DataParallel(model)
    dist.init_process_group("gloo")
    return DistributedDataParallel(model, gradient_as_bucket_view=arm == "DDP, views")


def run(name: str, arm: str, steps: int) -> tuple[Reading, Reading, int, int]:
    """On each rank.

    Returns:
        What it takes, what of that is in use, the bytes of the model's gradients, and how many
        modules are imported.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    pin(rank)
    barrier = Barrier(rank, size)
    torch.manual_seed(0)
    model, inputs = MODELS[name][1]()
    model = wrap(arm, model)
    for _ in range(steps):
        model.zero_grad()
        model(inputs).square().mean().backward()
    read()  # which takes some memory itself
    gc.collect()
    barrier.wait()
    taken = read()
    barrier.wait()
    ctypes.CDLL(None).malloc_trim(0)
    barrier.wait()
    in_use = read()
    barrier.wait()
    # Which shows that they are there.
    gradients = [p.grad.nbytes for p in model.parameters() if p.grad is not None]
    return taken, in_use, sum(gradients), len(sys.modules)


def measure(name: str, arm: str, steps: int, ranks: int) -> dict[str, Any]:
    taken, in_use = Reading(), Reading()
    readings = pydist.spawn(run, (name, arm, steps), nprocs=ranks)
    for rank_taken, rank_in_use, _, _ in readings:
        taken.add(rank_taken)
        in_use.add(rank_in_use)
    _, _, model_bytes, modules = readings[0]
    return {
        "model_mib": model_bytes / MIB,
        "modules": modules,
        "in_use_mib": in_use.size_bytes / MIB,
        "freed_mib": (taken.size_bytes - in_use.size_bytes) / MIB,
        "owners_mib": {owner: size / MIB for owner, size in sorted(in_use.owners.items())},
    }


def judge(arms: dict[str, dict[str, Any]], ranks: int) -> dict[str, float]:
    """What the engine owns, for each rank."""
    model_mib = arms["pydist"]["model_mib"]
    owned_mib = (arms["pydist"]["in_use_mib"] - arms["alone"]["in_use_mib"]) / ranks
    return {
        "owned_mib": owned_mib,
        "owned_share": owned_mib / model_mib,
        "promised_mib": PROMISED_SHARE * model_mib + PROMISED_MIB,
    }


def show(results: dict[str, dict[str, dict[str, Any]]], ranks: int) -> None:
    table = Table(title=f"memory of {ranks} ranks together after backward, MiB")
    for column in ("model", "its bytes", "arm", "modules", "in use", "beyond alone", "freed"):
        table.add_column(column, justify="left" if column in ("model", "arm") else "right")
    table.add_column("engine's own, a rank (of model)")
    for name, arms in results.items():
        verdict = judge(arms, ranks)
        for arm, result in arms.items():
            table.add_row(
                MODELS[name][0] if arm == "alone" else "",
                f"{ranks} x {result['model_mib']:.1f}" if arm == "alone" else "",
                arm,
                str(result["modules"]),
                f"{result['in_use_mib']:.1f}",
                f"{result['in_use_mib'] - arms['alone']['in_use_mib']:+.1f}",
                f"{result['freed_mib']:.1f}",
                f"{verdict['owned_mib']:.2f} ({verdict['owned_share']:.1%}), "
                f"promised {verdict['promised_mib']:.1f}"
                if arm == "pydist"
                else "",
                end_section=arm == ARMS[-1],
            )
    Console(width=160).print(table)


def show_owners(arms: dict[str, dict[str, Any]], title: str) -> None:
    table = Table(title=f"{title}: in use by, MiB")
    table.add_column("")
    for arm in arms:
        table.add_column(arm, justify="right")
    for owner in sorted({owner for result in arms.values() for owner in result["owners_mib"]}):
        sizes = [result["owners_mib"].get(owner, 0.0) for result in arms.values()]
        table.add_row(owner, *(f"{size:.2f}" for size in sizes))
    Console(width=110).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-p", "--ranks", type=int, default=2)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--steps", type=int, default=5, help="before the reading")
    parser.add_argument("--owners", action="store_true", help="say what has mapped the memory")
    parser.add_argument("--json", type=Path, help="write the results there, too")
    args = parser.parse_args()
    keep_freed_blocks()
    print(describe())
    results = {}
    for name in args.models:
        arms = {arm: measure(name, arm, args.steps, args.ranks) for arm in ARMS}
        results[name] = arms
        print(f"  {name}", flush=True)
        if args.owners:
            show_owners(arms, MODELS[name][0])
    show(results, args.ranks)
    verdicts = {name: judge(arms, args.ranks) for name, arms in results.items()}
    if args.json:
        args.json.write_text(json.dumps({"arms": results, "engine": verdicts}, indent=2))
    sys.exit(any(verdict["owned_mib"] > verdict["promised_mib"] for verdict in verdicts.values()))


if __name__ == "__main__":
    main()
