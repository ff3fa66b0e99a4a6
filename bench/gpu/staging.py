"""all_reduce of GPU tensors through host memory beside plain copies: python bench/gpu/staging.py

On every GPU of this host, or with two ranks on the only one (see gpu_pairs.py). The copies move the
same bytes to pinned memory and back, in both directions at a time, and add nothing: their share of
the all_reduce's time is the share of the copy bandwidth that the staging reaches. Exits with 2
where there is no GPU.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "python"))
import gpu_figures
import gpu_pairs

from pydist.benchmarks.noise import is_noisy, ratio_of
from pydist.benchmarks.sizes import parse_size, size_text


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="64K,1M,16M,256M")
    parser.add_argument("--backends", default="native,gloo")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each case")
    gpu_figures.add_option(parser)
    args = parser.parse_args(arguments)
    if why_not := gpu_pairs.why_not("native"):
        print(f"The staging was not measured: {why_not}.")
        return 2
    nprocs = gpu_pairs.rank_count()
    kept = gpu_figures.Kept(args.json)
    table = Table(title=f"all_reduce of float32 on {nprocs} ranks, {torch.cuda.get_device_name()}")
    for column in ("size", "backend", "copies, GB/s", "staged, GB/s", "share of the copies", ""):
        table.add_column(column, justify="right", no_wrap=True)
    for backend in args.backends.split(","):
        cases = [
            gpu_pairs.Case(backend, parse_size(size), "float32", gpu_pairs.staging_beside_copies)
            for size in args.sizes.split(",")
        ]
        for case, times in zip(cases, gpu_pairs.measure(cases, nprocs, args.seconds), strict=True):
            ratio = ratio_of(times.reference_s, times.subject_s)
            table.add_row(
                size_text(case.size_bytes),
                backend,
                *(
                    f"{2e-9 * case.size_bytes / statistics.median(each):.2f}"
                    for each in (times.reference_s, times.subject_s)
                ),
                gpu_pairs.keep(kept, f"{size_text(case.size_bytes)} {backend}", times, ratio),
                "noisy" if is_noisy(times.reference_s) else "",
            )
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
