"""Whether this build got slower than another: python bench/beside_build.py CHECKOUT WORK ...

CHECKOUT is a folder with another commit, in which `make build` has been run. WORK is `step:MODEL`
(forward and backward), `sharded:MODEL` (with a sharded AdamW), `all_reduce:BYTES`, or messages:
`ping_pong:BYTES`, `exchange:BYTES` (two ranks send to each other at once). A job of each build
runs, on the same cores, and they take turns: the job that waits sleeps. Two jobs of one and the
same build differ by a few percent for as long as they live, by where their memory happens to lie,
so pairs of jobs are started again and again. What is printed is the time of this build over that of
the other: the median of a pair's turns, its mean over the pairs, and the interval that holds this
mean in 95 % of resamplings of the pairs. The checkout of this file itself as CHECKOUT tells what
noise alone does.
"""

import argparse
import contextlib
import os
import statistics
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from pydist.benchmarks import machine
from pydist.benchmarks.noise import bootstrap_interval
from pydist.benchmarks.processes.ranks import StartedRanks, start_job
from pydist.benchmarks.steps import models

RANK = Path(__file__).with_name("timed_rank.py")
# pydist plans its buckets anew after steps 1, 2 and 4.
WARM_CALLS = 10
# A turn is long enough to wake the job that slept.
TURN_S = 0.1
# glibc keeps the memory that is freed. By its defaults it gives some back and asks for it again, or
# not, by what happens to lie at the end of the heap: 15 or 120 page faults in a step of one model.
KEEP_FREED_MEMORY = {
    "MALLOC_TRIM_THRESHOLD_": str(2**32),
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TOP_PAD_": str(2**26),
}


def start(python: Path, work: str, ranks: int) -> StartedRanks:
    command = [str(python), str(RANK), models.__file__, work]
    return start_job(f"the job of {python}", [work], ranks, command)


def seconds_of(job: StartedRanks, calls: int) -> float:
    job.ask(1 + calls // 10)  # wakes the ranks, and fills the caches that the other job used
    return max(job.ask(calls))


def ratio_of_turns(this: StartedRanks, other: StartedRanks, seconds: float) -> float:
    jobs = [this, other]
    for job in jobs:
        job.ask(WARM_CALLS)
    calls = max(1, round(TURN_S / (seconds_of(other, WARM_CALLS) / WARM_CALLS)))
    ratios: list[float] = []
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s or len(ratios) < 10:
        times = {job: seconds_of(job, calls) for job in jobs}
        ratios.append(times[this] / times[other])
        jobs.reverse()
    return statistics.median(ratios)


def ratio_of_pair(pythons: dict[str, Path], work: str, options: argparse.Namespace) -> float:
    """Of fresh jobs, which start in the order of `pythons`."""
    with contextlib.ExitStack() as running:
        jobs = {}
        for name, python in pythons.items():
            jobs[name] = start(python, work, options.ranks)
            running.callback(jobs[name].close)
        return ratio_of_turns(jobs["this"], jobs["other"], options.seconds / options.pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, help="a folder where `make build` has been run")
    parser.add_argument("work", nargs="*", default=["step:gpt", "step:deep", "step:resnet"])
    parser.add_argument("-p", "--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=120.0, help="for each work (default: 120)")
    parser.add_argument("--pairs", type=int, default=10, help="of jobs a work (default: 10)")
    options = parser.parse_args()
    python = options.checkout.resolve() / ".venv/bin/python"
    if not python.exists():
        parser.error(f"there is no {python}: run `make build` in {options.checkout} first.")
    os.environ.update(KEEP_FREED_MEMORY)
    table = Table("work", "this build over the other", "95 %", title="times of calls")
    steps = [work for work in options.work for _ in range(options.pairs)]
    ratios: dict[str, list[float]] = {work: [] for work in options.work}
    for number, work in enumerate(track(steps, console=Console(stderr=True), transient=True)):
        pythons = {"this": Path(sys.executable), "other": python}
        if number % 2 == 1:
            pythons = dict(reversed(pythons.items()))
        ratios[work].append(ratio_of_pair(pythons, work, options))
    for work, of_pairs in ratios.items():
        low, high = bootstrap_interval(
            len(of_pairs), lambda pairs, of=of_pairs: statistics.fmean(of[i] for i in pairs)
        )
        table.add_row(work, f"{statistics.fmean(of_pairs):.3f}", f"{low:.3f} to {high:.3f}")
    console = Console()
    console.print(table)
    console.print(f"{options.ranks} ranks, {machine.describe().hardware}")


if __name__ == "__main__":
    main()
