"""How well backward hides a slow link, beside the best there can be: python bench/overlap.py

Every rank has a link that carries one bucket at a time, in the order in which they come, at a
given bandwidth; by default as much as lets all of them take as long as backward computes. It is
simulated by a communication hook: a thread sleeps until the bucket would be there, so the core is
left to backward as with a network card. What arrives is the bucket itself, which is the mean,
because all ranks have the same samples.

A step is a backward, until everything is averaged, on the slowest rank. Its *ideal* follows from
its own times: each bucket sets out as soon as it is ready and the link is free. What comes on top
is ours: buckets that wait for their turn in the plan, calling the hook, noticing the end, agreeing
with the other ranks. The interval is the middle 95 % of a bootstrap over the steps. `alone` is a
backward without averaging, in the processes of the run before.

That run has no hook: the engine averages, and the plan follows the order of backward, which it does
not with a hook. Its table says when each bucket was ready, and how long it waited for its turn (the
first one, for the round to be opened).
"""

import argparse
import json
import os
import queue
import random
import statistics
import tempfile
import threading
import time
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from host import describe, keep_freed_blocks, pin
from models import MODELS
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import pydist

# Before measuring: the plan may change after steps 1, 2 and 4, and malloc's heap is full by then.
WARM_STEPS = 5

# What each bucket did, in the order of the plan.
Buckets = list[dict[str, Any]]

# Of a table; the rest is left out in the middle.
MOST_ROWS = 16


@dataclass
class Transfer:
    tensor: Tensor
    ends_at_s: float
    future: torch.futures.Future[Tensor]


class Link:
    """One transfer at a time, at a bandwidth, in the order of sending."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at_s = 0.0
        self._sent: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._deliver, name="link", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """A thread that is within torch when the process ends would abort it."""
        self._sent.put(None)
        self._thread.join()

    def send(self, tensor: Tensor) -> torch.futures.Future[Tensor]:
        # The end is settled here, so that a sleep that lasts too long does not delay the next one.
        self._free_at_s = max(self._free_at_s, time.monotonic())
        self._free_at_s += tensor.nbytes / self._bytes_per_s
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        self._sent.put(Transfer(tensor, self._free_at_s, future))
        return future

    def _deliver(self) -> None:
        while (transfer := self._sent.get()) is not None:
            time.sleep(max(0.0, transfer.ends_at_s - time.monotonic()))
            transfer.future.set_result(transfer.tensor)


def send(link: Link, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The communication hook."""
    return link.send(bucket.buffer())


def step(model: nn.Module, inputs: Tensor) -> float:
    """Seconds of its backward."""
    model.zero_grad()
    loss = model(inputs).square().mean()
    pydist.barrier()
    start_s = time.perf_counter()
    loss.backward()
    return time.perf_counter() - start_s


def make(name: str) -> tuple[nn.Module, Tensor]:
    pydist.init("native")
    pin(pydist.rank())
    torch.manual_seed(0)
    return MODELS[name][1]()


def run_on_engine(name: str, steps: int) -> tuple[float, Buckets, Buckets]:
    """On each rank; rank 0's result counts.

    Returns:
        Seconds of a backward without averaging, of the slowest rank, and the buckets of the first
        plan and of the one that was learned.
    """
    model, inputs = make(name)
    alone = deepcopy(model)
    wrapped = pydist.DataParallel(model)
    step(wrapped, inputs)
    first = seen(wrapped)
    for _ in range(WARM_STEPS):
        step(wrapped, inputs)
        step(alone, inputs)
    wrapped.reset_stats()
    times = []
    for _ in range(steps):
        step(wrapped, inputs)
        times.append(step(alone, inputs))
    slowest = torch.tensor([statistics.median(times)], dtype=torch.float64)
    pydist.all_reduce(slowest, "max")
    learned = seen(wrapped)
    pydist.shutdown()
    return float(slowest[0]), first, learned


def seen(model: pydist.DataParallel) -> Buckets:
    """What each bucket did, as means over the steps since the last reset or change of the plan."""
    return [
        {
            "parameters": planned.parameters,
            "bytes": bucket.bytes,
            "ready_s": bucket.ready_s,
            "launched_s": bucket.launched_s,
            "done_s": bucket.done_s,
        }
        for planned, bucket in zip(model.plan.buckets, model.stats().buckets, strict=True)
    ]


def run_on_link(name: str, steps: int, bytes_per_s: float) -> None:
    """On each rank; leaves a trace."""
    module, inputs = make(name)
    model = pydist.DataParallel(module)
    link = Link(bytes_per_s)
    model.register_comm_hook(link, send)
    for _ in range(WARM_STEPS + steps):
        step(model, inputs)
    link.close()
    pydist.shutdown()


@dataclass
class Bucket:
    """Of one round. Seconds on the clock that all ranks share."""

    first_parameter: str = ""
    size_bytes: int = 0
    ready_s: float = 0.0
    launched_s: float = 0.0
    done_s: float = 0.0


@dataclass
class Round:
    """One step of one rank."""

    began_s: float = 0.0
    computed_s: float = 0.0
    ended_s: float = 0.0
    buckets: dict[int, Bucket] = field(default_factory=dict)

    def ideal_end_s(self, bytes_per_s: float) -> float:
        free_at_s = self.began_s
        for bucket in sorted(self.buckets.values(), key=lambda bucket: bucket.ready_s):
            free_at_s = max(free_at_s, bucket.ready_s) + bucket.size_bytes / bytes_per_s
        return max(free_at_s, self.computed_s)


def read_trace(path: Path) -> list[Round]:
    """The rounds of one rank that are past warming up."""
    rounds: dict[int, Round] = {}
    for event in json.loads(path.read_text()):
        if event["ph"] == "M":
            continue
        at_s = event["ts"] * 1e-6
        if event["ph"] == "X":
            this = rounds.setdefault(event["args"]["round"], Round())
            if event["name"] == "backward":
                this.began_s, this.computed_s = at_s, at_s + event["dur"] * 1e-6
            elif event["name"] == "wait for averages":
                this.ended_s = at_s + event["dur"] * 1e-6
            continue
        of_round, number = (int(word) for word in event["id"].split()[-2:])
        bucket = rounds.setdefault(of_round, Round()).buckets.setdefault(number, Bucket())
        is_begin = event["ph"] == "b"
        if event["cat"] == "on its way":
            if is_begin:
                bucket.first_parameter = event["name"].partition("first parameter ")[2]
                bucket.size_bytes = event["args"]["bytes"]
                bucket.launched_s = at_s
                # One that was incomplete to the end has no other.
                bucket.ready_s = bucket.ready_s or at_s
            else:
                bucket.done_s = at_s
        elif is_begin:
            bucket.ready_s = at_s
    return [this for number, this in sorted(rounds.items()) if number > WARM_STEPS]


def judge(ranks: list[list[Round]], bytes_per_s: float) -> dict[str, Any]:
    computing, ideal, serial, taken = [], [], [], []
    transfer_s = sum(bucket.size_bytes for bucket in ranks[0][0].buckets.values()) / bytes_per_s
    for rounds in zip(*ranks, strict=True):
        began_s = min(this.began_s for this in rounds)
        computing.append(max(this.computed_s for this in rounds) - began_s)
        ideal.append(max(this.ideal_end_s(bytes_per_s) for this in rounds) - began_s)
        serial.append(computing[-1] + transfer_s)
        taken.append(max(this.ended_s for this in rounds) - began_s)
    ratios = [step_s / ideal_s for step_s, ideal_s in zip(taken, ideal, strict=True)]
    generator = random.Random(0)
    medians = [statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(1000)]
    medians.sort()
    return {
        "steps": len(ratios),
        "computing_ms": statistics.median(computing) * 1e3,
        "transfer_ms": transfer_s * 1e3,
        "serial_ms": statistics.median(serial) * 1e3,
        "ideal_ms": statistics.median(ideal) * 1e3,
        "step_ms": statistics.median(taken) * 1e3,
        "ratio": statistics.median(ratios),
        "ratio_interval": (medians[25], medians[-26]),
        "buckets": mean_buckets(ranks[0]),
    }


def mean_buckets(rounds: list[Round]) -> Buckets:
    """Of one rank, in seconds since backward began."""
    means = []
    for number in sorted(rounds[0].buckets):
        seen_in = [(this.began_s, this.buckets[number]) for this in rounds]
        means.append(
            {
                "parameters": [seen_in[0][1].first_parameter],
                "bytes": seen_in[0][1].size_bytes,
                "ready_s": statistics.mean(bucket.ready_s - at_s for at_s, bucket in seen_in),
                "launched_s": statistics.mean(bucket.launched_s - at_s for at_s, bucket in seen_in),
                "done_s": statistics.mean(bucket.done_s - at_s for at_s, bucket in seen_in),
            }
        )
    return means


def measure(
    name: str, ranks: int, steps: int, mb_per_s: float | None, trace: Path
) -> dict[str, Any]:
    alone_s, first, learned = pydist.spawn(run_on_engine, (name, steps), nprocs=ranks)[0]
    if mb_per_s is None:
        mb_per_s = sum(bucket["bytes"] for bucket in learned) / alone_s / 1e6
    os.environ["PYDIST_TIMELINE"] = str(trace)
    try:
        pydist.spawn(run_on_link, (name, steps, mb_per_s * 1e6), nprocs=ranks)
    finally:
        del os.environ["PYDIST_TIMELINE"]
    paths = [trace.with_suffix(f".rank{rank}{trace.suffix}") for rank in range(ranks)]
    return {
        "mb_per_s": mb_per_s,
        "alone_ms": alone_s * 1e3,
        **judge([read_trace(path) for path in paths], mb_per_s * 1e6),
        "first_plan": first,
        "learned_plan": learned,
    }


def waited_ms(buckets: Buckets) -> list[float]:
    """For their turn."""
    return [(bucket["launched_s"] - bucket["ready_s"]) * 1e3 for bucket in buckets]


def show_buckets(buckets: Buckets, title: str) -> None:
    table = Table(title=f"{title}; ms since backward began, means of rank 0")
    table.add_column("bucket", justify="right")
    table.add_column("first parameter")
    for column in ("MiB", "ready", "launched", "waited for its turn", "done"):
        table.add_column(column, justify="right")
    left_out = range(MOST_ROWS // 2, max(MOST_ROWS, len(buckets)) - MOST_ROWS // 2)
    for number, (bucket, waited) in enumerate(zip(buckets, waited_ms(buckets), strict=True)):
        if number in left_out:
            if number == left_out[0]:
                table.add_row("...")
            continue
        table.add_row(
            str(number),
            bucket["parameters"][0],
            f"{bucket['bytes'] / (1 << 20):.2f}",
            f"{bucket['ready_s'] * 1e3:.2f}",
            f"{bucket['launched_s'] * 1e3:.2f}",
            f"{waited:.2f}",
            f"{bucket['done_s'] * 1e3:.2f}",
        )
    Console(width=110).print(table)


def show_model(name: str, result: dict[str, Any]) -> None:
    first, learned = result["first_plan"], result["learned_plan"]
    show_buckets(result["buckets"], f"{name} on the link")
    show_buckets(learned, f"{name} on the engine, plan as learned")
    first_names = [bucket["parameters"] for bucket in first]
    moved = sum(bucket["parameters"] not in first_names for bucket in learned)
    print(
        f"  longest wait for a turn: {max(waited_ms(first)):.2f} ms in the first step, "
        f"{max(waited_ms(learned)):.2f} ms with the plan as learned; {moved} of {len(learned)} "
        "buckets are not those of the first plan",
        flush=True,
    )


def show(results: dict[str, dict[str, Any]], ranks: int) -> None:
    table = Table(title=f"backward on a slow link, {ranks} ranks, ms")
    for column in ("model", "MB/s", "alone", "computing", "transfer", "one after the other"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for column in ("ideal", "step", "step / ideal"):
        table.add_column(column, justify="right")
    for name, result in results.items():
        low, high = result["ratio_interval"]
        table.add_row(
            MODELS[name][0],
            f"{result['mb_per_s']:.0f}",
            f"{result['alone_ms']:.1f}",
            f"{result['computing_ms']:.1f}",
            f"{result['transfer_ms']:.1f}",
            f"{result['serial_ms']:.1f}",
            f"{result['ideal_ms']:.1f}",
            f"{result['step_ms']:.1f}",
            f"{result['ratio']:.3f} ({low:.3f} to {high:.3f})",
        )
    Console(width=150).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-p", "--ranks", type=int, default=2)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["gpt", "wide"])
    parser.add_argument("--steps", type=int, default=30, help="that are measured")
    parser.add_argument("--bandwidth", type=float, help="of a rank's link, in MB/s")
    parser.add_argument(
        "--trace", type=Path, help="keep the traces; NAME.json: NAME-gpt.rank0.json"
    )
    parser.add_argument("--json", type=Path, help="write the results there, too")
    args = parser.parse_args()
    keep_freed_blocks()
    print(describe())
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        trace = args.trace or Path(folder) / "trace.json"
        for name in args.models:
            path = trace.with_stem(f"{trace.stem}-{name}")
            results[name] = measure(name, args.ranks, args.steps, args.bandwidth, path)
            show_model(name, results[name])
    show(results, args.ranks)
    if args.json:
        args.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
