"""What an epoch of a sampler costs, beside torch's: python bench/sampler.py

Each case is measured in a fresh process, in turns, for one rank of one (the least favourable to
pydist: torch's sampler shuffles the whole epoch on every rank). The columns:

- start: from asking for an iterator to its first index, ms
- index: all indices of an epoch one by one, the start included, divided by their number, ns; of
  more than 10^8 samples, the first 10^7
- memory: the most that the process has grown by in the epoch, MB, beyond what 10^4 samples take

torch's sampler takes 5 to 6 GB at 10^8 samples; lengths that would not fit are left out.
"""

import argparse
import gc
import json
import resource
import statistics
import subprocess
import sys
import time
from collections import deque
from itertools import islice

import psutil
from rich.console import Console
from rich.table import Table
from torch.utils.data import DistributedSampler as TorchSampler

import pydist
from pydist.benchmarks import machine
from pydist.benchmarks.noise import Ratio, ratio_of

# Of torch's: a list of Python integers, the tensor that it is made of, and a slice of it.
_BYTES_AN_INDEX = 60
_MOST_INDICES = 10**7
_ARMS = ("torch", "pydist")


def measure(arm: str, length: int) -> dict[str, float]:
    """One epoch in this process."""
    data = range(length)
    make = pydist.DistributedSampler if arm == "pydist" else TorchSampler
    sampler = make(data, 1, 0)  # type: ignore[arg-type]
    # What both load when they are used for the first time.
    list(pydist.DistributedSampler(range(10_000), 1, 0))
    list(TorchSampler(range(10_000), 1, 0))  # type: ignore[arg-type,var-annotated]
    gc.collect()
    before_kib = peak_kib()
    count = length if length <= 10**8 else _MOST_INDICES
    start_s = time.perf_counter()
    iterator = iter(sampler)
    next(iterator)
    first_s = time.perf_counter()
    deque(islice(iterator, count - 1), maxlen=0)
    end_s = time.perf_counter()
    return {
        "start_ms": (first_s - start_s) * 1e3,
        "index_ns": (end_s - start_s) / count * 1e9,
        "memory_mb": (peak_kib() - before_kib) * 1024 / 1e6,
    }


def peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def in_fresh_process(arm: str, length: int) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, __file__, "--arm", arm, "--length", str(length)],
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    result: dict[str, float] = json.loads(done.stdout)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--lengths", type=float, nargs="+", default=[1e6, 1e8, 1e12])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--arm", choices=_ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--length", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.arm is not None:
        print(json.dumps(measure(arguments.arm, arguments.length)))
        return
    print(machine.describe())
    table = Table(title="one epoch on one rank (medians; the ratio with the middle 95 %)")
    for column in ("samples", "sampler", "start, ms", "index, ns", "memory, MB", "torch / pydist"):
        table.add_column(column, justify="right")
    for length in map(int, arguments.lengths):
        fits = length * _BYTES_AN_INDEX < psutil.virtual_memory().available
        arms = _ARMS if fits else ("pydist",)
        runs = {arm: [] for arm in arms}  # type: dict[str, list[dict[str, float]]]
        for _ in range(arguments.rounds):
            for arm in arms:
                runs[arm].append(in_fresh_process(arm, length))
        ratio: Ratio | None = None
        if fits:
            ratio = ratio_of(*([run["index_ns"] for run in runs[arm]] for arm in arms))
        for arm in arms:
            middle = {key: statistics.median(run[key] for run in runs[arm]) for key in runs[arm][0]}
            table.add_row(
                f"{length:.0e}",
                arm,
                f"{middle['start_ms']:.3f}",
                f"{middle['index_ns']:.1f}",
                f"{middle['memory_mb']:.2f}",
                str(ratio) if arm == "pydist" and ratio is not None else "",
            )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
