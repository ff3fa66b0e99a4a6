"""`pydist bench overlap`: how well backward hides a slow link, beside the best there can be.

Every rank has a link (`slow_link`) that carries one bucket at a time, in the order in which they
come; by default it takes as long for all of them as backward computes.

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
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

import pydist
from pydist.benchmarks import subcommand
from pydist.benchmarks.noise import Ratio, is_noisy, ratio_of
from pydist.benchmarks.outputs import require_writable
from pydist.benchmarks.processes.job import Job, find_job
from pydist.benchmarks.progress import Progress
from pydist.benchmarks.steps.models import MODELS
from pydist.benchmarks.steps.slow_link import Link, Round, read_trace, send
from pydist.errors import InvalidUsage
from pydist.job.launchers import read_placement
from pydist.parallel.bucket_planner import PlannedParameter

# Before measuring: the plan may change after steps 1, 2 and 4, and malloc's heap is full by then.
_WARM_STEPS = 5
_LEAST_STEPS = 5

# Of a table; the rest is left out in the middle.
_MOST_ROWS = 16
_WIDTH = 150

# What each bucket did, in the order of the plan.
Buckets = list[dict[str, Any]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `pydist bench overlap`."""
    subcommand.add_ranks_argument(parser)
    subcommand.add_models_argument(parser, ["gpt", "wide"])
    parser.add_argument("--bandwidth", type=float, metavar="MB/S", help="of a rank's link")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="keep the traces; NAME.json: NAME-gpt.rank0.json, ...",
    )
    subcommand.add_output_arguments(parser, 30.0, "model")


def _step(model: nn.Module, inputs: tuple[Tensor, ...]) -> float:
    """Seconds of its backward."""
    model.zero_grad()
    loss = model(*inputs).square().mean()
    pydist.barrier()
    start_s = time.perf_counter()
    loss.backward()
    return time.perf_counter() - start_s


def _make(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return MODELS[name].make()


class _Clock:
    """Lets all ranks go on equally long: rank 0's clock counts."""

    def __init__(self, what: str, seconds: float) -> None:
        self._progress = Progress(pydist.rank() == 0)
        self._progress.phase(what)
        self._seconds = seconds
        self._start_s = time.perf_counter()
        self._steps = 0

    def goes_on(self) -> bool:
        past_s = time.perf_counter() - self._start_s
        self._progress.detail(f"step {self._steps}, {past_s:.0f} of {self._seconds:g} s")
        more = torch.tensor([self._steps < _LEAST_STEPS or past_s < self._seconds])
        pydist.broadcast(more, root=0)
        self._steps += 1
        if not more[0]:
            self._progress.clear()
        return bool(more[0])


def _run_on_engine(name: str, seconds: float) -> tuple[float, Buckets, Buckets]:
    """On each rank.

    Returns:
        Seconds of a backward without averaging, and the buckets of the first plan and of the one
        that was learned.
    """
    model, inputs = _make(name)
    alone = deepcopy(model)
    wrapped = pydist.DataParallel(model)
    _step(wrapped, inputs)
    first = _seen(wrapped)
    for _ in range(_WARM_STEPS):
        _step(wrapped, inputs)
        _step(alone, inputs)
    wrapped.reset_stats()
    times = []
    clock = _Clock(f"{name}: on the engine", seconds)
    while clock.goes_on():
        _step(wrapped, inputs)
        times.append(_step(alone, inputs))
    return statistics.median(times), first, _seen(wrapped)


def _seen(model: pydist.DataParallel) -> Buckets:
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


class _WithOwnBuckets(pydist.DataParallel):
    """Has no buckets of torch's, though a hook stands for its link."""

    def plan_buckets(
        self, parameters: Sequence[PlannedParameter], bucket_cap_bytes: int
    ) -> list[list[int]]:
        return super().plan_buckets(parameters, bucket_cap_bytes)


def _run_on_link(name: str, seconds: float, bytes_per_s: float, trace: str) -> list[Round]:
    """On each rank: what it did in each step past warming up."""
    module, inputs = _make(name)
    before = os.environ.get("PYDIST_TIMELINE")
    os.environ["PYDIST_TIMELINE"] = trace
    try:
        model = _WithOwnBuckets(module)
    finally:
        if before is None:
            del os.environ["PYDIST_TIMELINE"]
        else:
            os.environ["PYDIST_TIMELINE"] = before
    link = Link(bytes_per_s)
    model.register_comm_hook(link, send)
    try:
        for _ in range(_WARM_STEPS):
            _step(model, inputs)
        clock = _Clock(f"{name}: on a link of {bytes_per_s / 1e6:.0f} MB/s", seconds)
        while clock.goes_on():
            _step(model, inputs)
    finally:
        link.close()
    path = Path(trace)
    rounds = read_trace(path.with_suffix(f".rank{pydist.rank()}{path.suffix}"))
    return rounds[_WARM_STEPS:]


def summarize(ranks: Sequence[Sequence[Round]], bytes_per_s: float) -> dict[str, Any]:
    """What the steps of all ranks tell, for JSON.

    Args:
        ranks: of each rank, the same number of steps.
        bytes_per_s: bandwidth of a link.
    """
    computing, ideal, serial, taken = [], [], [], []
    transfer_s = sum(bucket.size_bytes for bucket in ranks[0][0].buckets.values()) / bytes_per_s
    for rounds in zip(*ranks, strict=True):
        began_s = min(this.began_s for this in rounds)
        computing.append(max(this.computed_s for this in rounds) - began_s)
        ideal.append(max(this.ideal_end_s(bytes_per_s) for this in rounds) - began_s)
        serial.append(computing[-1] + transfer_s)
        taken.append(max(this.ended_s for this in rounds) - began_s)
    return {
        "steps": len(taken),
        "computing_ms": statistics.median(computing) * 1e3,
        "transfer_ms": transfer_s * 1e3,
        "serial_ms": statistics.median(serial) * 1e3,
        "ideal_ms": statistics.median(ideal) * 1e3,
        "step_ms": statistics.median(taken) * 1e3,
        "step_over_ideal": asdict(ratio_of(taken, ideal)),
        "buckets": _mean_buckets(ranks[0]),
        "warnings": ["computing took very different times: something else runs here"]
        if is_noisy(computing)
        else [],
    }


def _mean_buckets(rounds: Sequence[Round]) -> Buckets:
    """The mean times of one rank's buckets, in seconds since backward began."""
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


def _measure_model(
    name: str, job: Job, seconds: float, mb_per_s: float | None, trace: Path
) -> dict[str, Any]:
    on_engine = job.run(_run_on_engine, name, seconds / 2)
    alone_s = max(rank_alone_s for rank_alone_s, _, _ in on_engine)
    _, first, learned = on_engine[0]
    if mb_per_s is None:
        mb_per_s = sum(bucket["bytes"] for bucket in learned) / alone_s / 1e6
    on_link = job.run(_run_on_link, name, seconds / 2, mb_per_s * 1e6, str(trace))
    return {
        "title": MODELS[name].title,
        "mb_per_s": mb_per_s,
        "alone_ms": alone_s * 1e3,
        **summarize(on_link, mb_per_s * 1e6),
        "first_plan": first,
        "learned_plan": learned,
    }


def _waited_ms(buckets: Buckets) -> list[float]:
    """For their turn."""
    return [(bucket["launched_s"] - bucket["ready_s"]) * 1e3 for bucket in buckets]


def _show_buckets(buckets: Buckets, title: str) -> None:
    table = subcommand.make_table(
        f"{title}; ms since backward began, means of rank 0",
        ["bucket", "first parameter"],
        ["MiB", "ready", "launched", "waited for its turn", "done"],
    )
    table.columns[0].justify = "right"
    left_out = range(_MOST_ROWS // 2, max(_MOST_ROWS, len(buckets)) - _MOST_ROWS // 2)
    for number, (bucket, waited) in enumerate(zip(buckets, _waited_ms(buckets), strict=True)):
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


def _show_model(name: str, result: dict[str, Any]) -> None:
    first, learned = result["first_plan"], result["learned_plan"]
    _show_buckets(result["buckets"], f"{name} on the link")
    _show_buckets(learned, f"{name} on the engine, plan as learned")
    first_names = [bucket["parameters"] for bucket in first]
    moved = sum(bucket["parameters"] not in first_names for bucket in learned)
    print(
        f"  longest wait for a turn: {max(_waited_ms(first)):.2f} ms in the first step, "
        f"{max(_waited_ms(learned)):.2f} ms with the plan as learned; {moved} of {len(learned)} "
        "buckets are not those of the first plan"
    )


def _show(results: dict[str, Any], ranks: int) -> None:
    for name, result in results.items():
        _show_model(name, result)
    table = subcommand.make_table(
        f"backward on a slow link, {ranks} ranks, ms",
        ["model"],
        [
            *("MB/s", "alone", "computing", "transfer", "one after the other"),
            *("ideal", "step", "step / ideal"),
        ],
    )
    for result in results.values():
        ratio = Ratio(**result["step_over_ideal"])
        table.add_row(
            result["title"],
            f"{result['mb_per_s']:.0f}",
            f"{result['alone_ms']:.1f}",
            f"{result['computing_ms']:.1f}",
            f"{result['transfer_ms']:.1f}",
            f"{result['serial_ms']:.1f}",
            f"{result['ideal_ms']:.1f}",
            f"{result['step_ms']:.1f}",
            f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})",
        )
    if results:
        Console(width=_WIDTH).print(table)
    subcommand.print_warnings(results)


def _require_suitable(models: list[str], options: argparse.Namespace) -> None:
    for name in models:
        if MODELS[name].is_sparse:
            raise InvalidUsage(
                f"'{name}' has sparse gradients, which do not pass through communication hooks, "
                "of which the slow link is one; use other models."
            )
    if options.bandwidth is not None and not options.bandwidth > 0:
        raise InvalidUsage(f"--bandwidth {options.bandwidth:g} is not valid; use more than 0.")
    if options.trace is not None:
        require_writable(options.trace)
    placement = read_placement()
    if placement.local_world_size not in (None, placement.world_size):
        raise InvalidUsage("overlap compares clocks of ranks, which must all be on one host.")


def main(options: argparse.Namespace) -> int:
    """Runs `pydist bench overlap`.

    Returns:
        The exit status: 0, or 130 after Ctrl-C.

    Raises:
        InvalidUsage: the flags ask for something impossible; nothing has been measured.
    """
    models = subcommand.chosen_models(options.models)
    _require_suitable(models, options)
    job = find_job(options.ranks, pins=options.pin)
    subcommand.check_outputs(options)
    results: dict[str, Any] = {}

    def measure() -> None:
        with tempfile.TemporaryDirectory() as folder:
            trace = options.trace or Path(folder) / "trace.json"
            for name in models:
                path = trace.with_stem(f"{trace.stem}-{name}")
                results[name] = _measure_model(name, job, options.seconds, options.bandwidth, path)

    return subcommand.measure_and_report(
        "overlap",
        options,
        {"ranks": job.ranks, "models": models, "bandwidth_mb_per_s": options.bandwidth},
        results,
        measure,
        lambda: _show(results, job.ranks),
        leads=job.leads,
    )
