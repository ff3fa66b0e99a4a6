"""Our ring over NCCL beside NCCL's own all-reduce: python bench/gpu/nccl_ring.py

On every GPU of this host, or with two ranks on the only one (see gpu_pairs.py). The ring is for
what NCCL can't do, and moves as many bytes as NCCL's (in 16-bit types half as many again: they
travel as float32). A ratio below 1 says that `auto` should take it. Exits with 2 where there is no
GPU.
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
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each case")
    gpu_figures.add_option(parser)
    args = parser.parse_args(arguments)
    if why_not := gpu_pairs.why_not("nccl"):
        print(f"The ring was not measured beside NCCL: {why_not}.")
        return 2
    nprocs = gpu_pairs.rank_count()
    cases = [
        gpu_pairs.Case("nccl", parse_size(size), dtype, gpu_pairs.ring_beside_nccl)
        for dtype in args.dtypes.split(",")
        for size in args.sizes.split(",")
    ]
    kept = gpu_figures.Kept(args.json)
    table = Table(title=f"all_reduce on {nprocs} ranks, {torch.cuda.get_device_name()}")
    for column in ("size", "dtype", "NCCL's own, µs", "ring, µs", "ring / NCCL's own", ""):
        table.add_column(column, justify="right", no_wrap=True)
    for case, times in zip(cases, gpu_pairs.measure(cases, nprocs, args.seconds), strict=True):
        ratio = ratio_of(times.subject_s, times.reference_s)
        table.add_row(
            size_text(case.size_bytes),
            case.dtype,
            *(
                f"{statistics.median(each) * 1e6:.1f}"
                for each in (times.reference_s, times.subject_s)
            ),
            gpu_pairs.keep(kept, f"{size_text(case.size_bytes)} {case.dtype}", times, ratio),
            "noisy" if is_noisy(times.reference_s) else "",
        )
    Console().print(table)
    if gpu_pairs.are_sharing():
        print("The ranks share a GPU and talk by sockets: this says nothing of links between GPUs.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
