"""Whether this build got slower than another: python bench/beside_build.py CHECKOUT WORK ...

CHECKOUT is a folder with another commit, in which `make build` has been run. WORK is `step:MODEL`
(forward and backward), `sharded:MODEL` (with a sharded AdamW) or `all_reduce:BYTES`. A job of each
build runs, on the same cores, and they take turns: the job that waits sleeps. What is printed is
the time of this build over that of the other, the median of all turns with the interval that holds
it in 95 % of resamplings. The checkout of this file itself as CHECKOUT tells what noise alone does.
"""

import argparse
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from pydist.benchmarks import machine, models
from pydist.benchmarks.noise import Ratio, ratio_of
from pydist.benchmarks.processes.ranks import StartedRanks, start_job

RANK = Path(__file__).with_name("timed_rank.py")
# pydist plans its buckets anew after steps 1, 2 and 4.
WARM_CALLS = 10
# A turn is long enough to wake the job that slept.
TURN_S = 0.1


def start(python: Path, work: str, ranks: int) -> StartedRanks:
    command = [str(python), str(RANK), models.__file__, work]
    return start_job(f"the job of {python}", [work], ranks, command)


def seconds_of(job: StartedRanks, calls: int) -> float:
    job.ask(1 + calls // 10)  # wakes the ranks, and fills the caches that the other job used
    return max(job.ask(calls))


def compare(this: StartedRanks, other: StartedRanks, seconds: float) -> tuple[Ratio, int]:
    jobs = [this, other]
    for job in jobs:
        job.ask(WARM_CALLS)
    calls = max(1, round(TURN_S / (seconds_of(other, WARM_CALLS) / WARM_CALLS)))
    times: dict[StartedRanks, list[float]] = {job: [] for job in jobs}
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s or len(times[this]) < 10:
        for job in jobs:
            times[job].append(seconds_of(job, calls))
        jobs.reverse()
    return ratio_of(times[this], times[other]), len(times[this])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, help="a folder where `make build` has been run")
    parser.add_argument("work", nargs="*", default=["step:gpt", "step:deep", "step:resnet"])
    parser.add_argument("-p", "--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each work (default: 60)")
    options = parser.parse_args()
    python = options.checkout.resolve() / ".venv/bin/python"
    if not python.exists():
        parser.error(f"there is no {python}: run `make build` in {options.checkout} first.")
    table = Table("work", "this build over the other", "95 %", "turns", title="times of calls")
    for work in track(options.work, console=Console(stderr=True), transient=True):
        this = start(Path(sys.executable), work, options.ranks)
        try:
            other = start(python, work, options.ranks)
            try:
                ratio, turns = compare(this, other, options.seconds)
            finally:
                other.close()
        finally:
            this.close()
        table.add_row(
            work, f"{ratio.median:.3f}", f"{ratio.low:.3f} to {ratio.high:.3f}", str(turns)
        )
    console = Console()
    console.print(table)
    console.print(f"{options.ranks} ranks, {machine.describe().hardware}")


if __name__ == "__main__":
    main()
