"""A training step of pydist.DataParallel beside torch's DDP, in one run: python bench/step.py

A step is forward and backward. The arms take turns step by step, in the same processes, so that
they meet the same noise: `alone` (the plain module, no synchronisation), `ddp N` (torch's
DistributedDataParallel over gloo with its best knobs and buckets of N MiB), `pydist`
(pydist.DataParallel as it comes). A step's time is that of the slowest rank. What counts is the
time that communication adds to a step, `arm - alone`; the interval is the middle 95 % of a
bootstrap over the rounds. One compute thread a rank; all arms use the same malloc settings, which
keep freed blocks in the process.
"""

import argparse
import inspect
import json
import random
import statistics
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from host import describe, keep_freed_blocks, pin
from models import MODELS
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import pydist

DDP_BUCKETS_MB = (1, 5, 25, 50, 200)
# Not in every torch.
NEWER_KNOBS: dict[str, Any] = {
    name: True
    for name in ("batched_grad_copy",)
    if name in inspect.signature(DistributedDataParallel).parameters
}


def make_arms(model: nn.Module) -> dict[str, nn.Module]:
    gloo = dist.new_group(backend="gloo")
    arms: dict[str, nn.Module] = {"alone": deepcopy(model)}
    for cap_mb in DDP_BUCKETS_MB:
        arms[f"ddp {cap_mb}"] = DistributedDataParallel(
            deepcopy(model),
            process_group=gloo,
            bucket_cap_mb=cap_mb,
            gradient_as_bucket_view=True,
            static_graph=True,
            **NEWER_KNOBS,
        )
    arms["pydist"] = pydist.DataParallel(deepcopy(model))
    return arms


def time_step(model: nn.Module, inputs: Tensor, slowest: Tensor) -> float:
    model.zero_grad()
    pydist.barrier()
    start_s = time.perf_counter()
    model(inputs).square().mean().backward()
    slowest[0] = time.perf_counter() - start_s
    pydist.all_reduce(slowest, "max")
    return float(slowest[0])


def run(name: str, seconds: float) -> dict[str, list[float]]:
    """On each rank; rank 0's result counts."""
    pydist.init("native")
    pin(pydist.rank())
    torch.manual_seed(0)
    model, inputs = MODELS[name][1]()
    arms = make_arms(model)
    slowest = torch.zeros(1, dtype=torch.float64)
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    for _ in range(3):
        for module in arms.values():
            time_step(module, inputs, slowest)
    end_s = time.perf_counter() + seconds
    more = torch.ones(1, dtype=torch.int32)
    while more[0]:
        for arm, module in arms.items():
            times[arm].append(time_step(module, inputs, slowest))
        more[0] = len(times["alone"]) < 10 or time.perf_counter() < end_s
        pydist.broadcast(more, root=0)
    pydist.shutdown()
    return times


def added(times: dict[str, list[float]], arm: str, rounds: list[int]) -> float:
    """Seconds that an arm adds to a step."""
    return statistics.median(times[arm][i] for i in rounds) - statistics.median(
        times["alone"][i] for i in rounds
    )


def summarize(times: dict[str, list[float]]) -> dict[str, Any]:
    rounds = list(range(len(times["alone"])))
    medians = {arm: statistics.median(values) * 1e3 for arm, values in times.items()}
    best = min((arm for arm in times if arm.startswith("ddp")), key=lambda arm: medians[arm])
    generator = random.Random(0)
    shares = []
    for _ in range(1000):
        sample = generator.choices(rounds, k=len(rounds))
        shares.append(added(times, "pydist", sample) / max(added(times, best, sample), 1e-9))
    shares.sort()
    return {
        "rounds": len(rounds),
        "median_ms": medians,
        "best_ddp": best,
        "share": added(times, "pydist", rounds) / added(times, best, rounds),
        "share_interval": (shares[25], shares[-26]),
    }


def show(results: dict[str, dict[str, Any]], ranks: int) -> None:
    table = Table(title=f"forward and backward, {ranks} ranks, ms")
    for column in ("model", "alone", "DDP, best", "its MiB", "pydist", "DDP / alone"):
        table.add_column(column, justify="left" if column == "model" else "right")
    table.add_column("pydist / alone", justify="right")
    table.add_column("added by pydist / by DDP", justify="right")
    for name, result in results.items():
        medians, best = result["median_ms"], result["best_ddp"]
        low, high = result["share_interval"]
        table.add_row(
            MODELS[name][0],
            f"{medians['alone']:.1f}",
            f"{medians[best]:.1f}",
            best.split()[1],
            f"{medians['pydist']:.1f}",
            f"{medians[best] / medians['alone']:.2f}",
            f"{medians['pydist'] / medians['alone']:.2f}",
            f"{result['share']:.2f} ({low:.2f} to {high:.2f})",
        )
    Console(width=130).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-p", "--ranks", type=int, default=2)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--seconds", type=float, default=30.0, help="for each model")
    parser.add_argument("--json", type=Path, help="write the results there, too")
    args = parser.parse_args()
    keep_freed_blocks()
    print(describe())
    results = {}
    for name in args.models:
        results[name] = summarize(pydist.spawn(run, (name, args.seconds), nprocs=args.ranks)[0])
        print(f"  {name}: {results[name]['rounds']} rounds", flush=True)
    show(results, args.ranks)
    if args.json:
        args.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
