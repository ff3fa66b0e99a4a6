"""Small all-reduces on NCCL, beside torch's ProcessGroupNCCL: python bench/gpu/gpu_latency.py

On every GPU of this host, or with two ranks on the only one (see gpu_pairs.py). Both call the same
NCCL, one after the other in the same processes, and each call waits for the GPU: the ratio is what
pydist's launch costs beside torch's. Exits with 2 where there is no GPU, or torch has no NCCL.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
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
    parser.add_argument("--sizes", default="8,64,512,4K,16K,64K")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each case")
    gpu_figures.add_option(parser)
    args = parser.parse_args(arguments)
    why_not = gpu_pairs.why_not("nccl")
    if not why_not and not dist.is_nccl_available():
        why_not = "this torch has no NCCL to compare with"
    if why_not:
        print(f"The latency on NCCL was not measured: {why_not}.")
        return 2
    nprocs = gpu_pairs.rank_count()
    cases = [
        gpu_pairs.Case("nccl", parse_size(size), args.dtype, gpu_pairs.beside_torchs_nccl)
        for size in args.sizes.split(",")
    ]
    sharing = "that share a GPU" if gpu_pairs.are_sharing() else "with a GPU each"
    kept = gpu_figures.Kept(args.json)
    table = Table(title=f"all_reduce of {args.dtype}, {nprocs} ranks {sharing}")
    for column in ("size", "torch, µs", "pydist, µs", "pydist / torch", ""):
        table.add_column(column, justify="right", no_wrap=True)
    for case, times in zip(cases, gpu_pairs.measure(cases, nprocs, args.seconds), strict=True):
        ratio = ratio_of(times.subject_s, times.reference_s)
        table.add_row(
            size_text(case.size_bytes),
            *(
                f"{statistics.median(each) * 1e6:.1f}"
                for each in (times.reference_s, times.subject_s)
            ),
            gpu_pairs.keep(kept, size_text(case.size_bytes), times, ratio),
            "noisy" if is_noisy(times.reference_s) else "",
        )
    Console().print(table)
    if torch.cuda.is_available():
        print(torch.cuda.get_device_name(), "NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
