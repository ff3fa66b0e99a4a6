"""all_reduce of pydist beside torch's gloo, in one run: python bench/collectives.py

The same buffers, the same processes; the arms take turns call by call, so that they meet the same
noise. A call's time is that of the slowest rank. The ratio is the median of the ratios of
neighbouring calls, with the range that holds the middle 80 % of them.

Arms: `gloo` (torch.distributed.all_reduce on a gloo group), `ordinary` (pydist.all_reduce on an
ordinary tensor), `symmetric` (on a pydist.symmetric_empty tensor). Ranks are pinned to cores, round
robin, and use one compute thread each.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from host import describe, pin
from rich.console import Console
from rich.table import Table

import pydist

ARMS = ("gloo", "ordinary", "symmetric")

# Bytes; the first and the last are where the claims of the README are made.
SIZES = (8, 1 << 10, 16 << 10, 128 << 10, 1 << 20, 4 << 20, 25 << 20, 64 << 20, 256 << 20)


def time_call(call: Callable[[], object], repeat: int, slowest: torch.Tensor) -> float:
    """Seconds for one call, on the slowest rank."""
    pydist.barrier()
    start_s = time.perf_counter()
    for _ in range(repeat):
        call()
    slowest[0] = (time.perf_counter() - start_s) / repeat
    pydist.all_reduce(slowest, "max")
    return float(slowest[0])


def measure_size(
    size_bytes: int,
    dtype: torch.dtype,
    heap: torch.Tensor,
    gloo: dist.ProcessGroup,
    budget_s: float,
) -> dict[str, list[float]]:
    count = size_bytes // dtype.itemsize
    ordinary = torch.zeros(count, dtype=dtype)
    symmetric = heap[:count]
    calls: dict[str, Callable[[], object]] = {
        "gloo": lambda: dist.all_reduce(ordinary, group=gloo),
        "ordinary": lambda: pydist.all_reduce(ordinary),
        "symmetric": lambda: pydist.all_reduce(symmetric),
    }
    slowest = torch.zeros(1, dtype=torch.float64)
    times: dict[str, list[float]] = {arm: [] for arm in ARMS}
    # A clock reading costs as much as a small call: time those in batches.
    repeats = dict.fromkeys(ARMS, 1)
    for arm, call in calls.items():
        call()
        once_s = time_call(call, 3, slowest)
        repeats[arm] = max(1, min(1000, int(2e-3 / once_s)))
    end_s = time.perf_counter() + budget_s
    more = torch.ones(1, dtype=torch.int32)
    while True:
        for arm, call in calls.items():
            times[arm].append(time_call(call, repeats[arm], slowest))
        more[0] = len(times["gloo"]) < 5 or time.perf_counter() < end_s
        pydist.broadcast(more, root=0)
        if not more[0]:
            return times


def run(sizes: tuple[int, ...], dtype_name: str, budget_s: float) -> list[dict[str, Any]]:
    """On each rank; rank 0's result counts."""
    dtype = getattr(torch, dtype_name)
    pydist.init("native")
    pin(pydist.rank())
    gloo = dist.new_group(backend="gloo")
    heap = pydist.symmetric_empty(max(sizes) // dtype.itemsize, dtype=dtype)
    heap.zero_()
    results = []
    for size_bytes in sizes:
        times = measure_size(size_bytes, dtype, heap, gloo, budget_s)
        results.append(summarize(size_bytes, times))
        if pydist.rank() == 0:
            print(f"  {size_bytes} bytes: {len(times['gloo'])} rounds", flush=True)
    pydist.shutdown()
    return results


def summarize(size_bytes: int, times: dict[str, list[float]]) -> dict[str, Any]:
    result: dict[str, Any] = {"bytes": size_bytes, "rounds": len(times["gloo"])}
    for arm in ARMS:
        result[f"{arm}_us"] = statistics.median(times[arm]) * 1e6
    for arm in ARMS[1:]:
        ratios = sorted(g / t for g, t in zip(times["gloo"], times[arm], strict=True))
        tenth = len(ratios) // 10
        result[f"{arm}_ratio"] = statistics.median(ratios)
        result[f"{arm}_range"] = (ratios[tenth], ratios[-1 - tenth])
    return result


def size_text(size_bytes: int) -> str:
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:g} {unit}"
    return f"{size_bytes} B"


def show(results: list[dict[str, Any]], title: str) -> None:
    table = Table(title=title)
    for column in ("size", "gloo µs", "ordinary µs", "symmetric µs", "gloo / ordinary"):
        table.add_column(column, justify="right")
    table.add_column("gloo / symmetric", justify="right")
    for result in results:
        ratios = []
        for arm in ARMS[1:]:
            low, high = result[f"{arm}_range"]
            ratios.append(f"{result[f'{arm}_ratio']:.1f} ({low:.1f} to {high:.1f})")
        table.add_row(
            size_text(result["bytes"]), *(f"{result[f'{arm}_us']:.1f}" for arm in ARMS), *ratios
        )
    Console(width=110).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-p", "--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="bytes")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float64"])
    parser.add_argument("--seconds", type=float, default=2.0, help="for each size")
    parser.add_argument("--json", type=Path, help="write the results there, too")
    args = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    print(describe())
    everything = {}
    for ranks in args.ranks:
        sizes = tuple(args.sizes)
        results = pydist.spawn(run, (sizes, args.dtype, args.seconds), nprocs=ranks)[0]
        show(results, f"all_reduce, {args.dtype}, {ranks} ranks on {cores} cores")
        everything[ranks] = results
    if args.json:
        args.json.write_text(json.dumps(everything, indent=2))


if __name__ == "__main__":
    main()
