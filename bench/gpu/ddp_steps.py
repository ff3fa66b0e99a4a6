"""Training steps on GPUs beside torch's DDP: python bench/gpu/ddp_steps.py

On every GPU of this host, or with two ranks on the only one (see gpu_pairs.py), or with as many as
`--ranks` says. A step is forward, backward and SGD; both wrappers train the same model, in turns in
the same processes: over the same NCCL or, with `--backend native`, pydist staged through the host's
shared memory and DDP over gloo. The recommender's tables have dense gradients: torch's NCCL reduces
no sparse ones.

Beside the ratio of the times stand the memory of the GPU that a model takes with its wrapper and
the wrapper's communicator, all ranks of the GPU together, and on NCCL how often the host waits for
the GPU in a step, as CUPTI tells torch's profiler of CUDA's runtime. What pydist's engine asks of
the driver is not among that; the stand-in counts it. (What is staged is waited for on threads of
its own, which the profiler would count, too.) Exits with 1 where a model fails, or the host waits
in a step of pydist's; with 2 where there is no GPU, or torch has no NCCL.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "python"))
import gpu_figures
import gpu_pairs
import gpu_ranks
from host_waits import host_waits_of
from launch import Ranks
from turns import Pair, take_turns

import pydist
from pydist.benchmarks.noise import ratio_of
from pydist.benchmarks.steps.models import MODELS

Step = Callable[[], None]

# After so many steps the plan of the buckets is settled, and buffers are known.
_STEPS_BEFORE = 6


@dataclass
class Found:
    """Of one model. The bytes are None on a stand-in, and the waits of what is staged."""

    model: str
    ours_s: list[float]
    ddp_s: list[float]
    ours_bytes: int | None
    ddp_bytes: int | None
    ours_waits: int | None
    ddp_waits: int | None


def ours(module: nn.Module) -> nn.Module:
    return pydist.DataParallel(module)


def ddp(module: nn.Module) -> nn.Module:
    if not gpu_ranks.IS_REAL:  # which torch's DDP cannot time
        return ours(module)
    backend = "nccl" if pydist.backend() == "nccl" else "gloo"
    group = gpu_pairs.torchs_group(backend)
    return nn.parallel.DistributedDataParallel(module, process_group=group)


def step_of(name: str, wrap: Callable[[nn.Module], nn.Module]) -> Step:
    """A step of a model that is made here; returns before the GPU has done it."""
    torch.manual_seed(0)
    module, inputs = MODELS[name].make()
    for table in module.modules():
        if isinstance(table, nn.EmbeddingBag):
            table.sparse = False
    model = wrap(module.to("cuda"))
    on_gpu = [each.to("cuda") for each in inputs]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        model(*on_gpu).square().mean().backward()
        optimizer.step()

    return step


def and_wait(step: Step) -> Step:
    def both() -> None:
        step()
        gpu_ranks.synchronize()

    return both


def pair_of(name: str) -> Pair:
    return Pair(
        and_wait(step_of(name, ours)),
        and_wait(step_of(name, ddp)),
        "torch's DDP",
        warm_up_calls=_STEPS_BEFORE,
    )


def memory_of(name: str, wrap: Callable[[nn.Module], nn.Module]) -> int | None:
    """What the driver has given out for it, torch's cache and NCCL's buffers among it."""
    if not gpu_ranks.IS_REAL:
        return None
    gc.collect()
    torch.cuda.empty_cache()
    pydist.barrier()
    before, _ = torch.cuda.mem_get_info()
    pydist.barrier()
    step = step_of(name, wrap)
    for _ in range(_STEPS_BEFORE):
        step()
    gpu_ranks.synchronize()
    pydist.barrier()
    after, _ = torch.cuda.mem_get_info()
    pydist.barrier()
    return before - after


def waits_of(name: str, wrap: Callable[[nn.Module], nn.Module]) -> int | None:
    """How often the host waits in one step, once everything is settled."""
    if pydist.backend() != "nccl":
        return None
    step = step_of(name, wrap)
    for _ in range(_STEPS_BEFORE):
        step()
    return len(host_waits_of(step))


def measure(name: str, is_sharing: bool, seconds: float) -> Found:
    """On each rank."""
    gpu_pairs.join(is_sharing, os.environ["PYDIST_BACKEND"])
    # What the first step of a process takes, of cuBLAS and of kernels, is of neither.
    step_of(name, lambda module: module)()
    # DDP first: what pydist frees of NCCL's memory may be given back later.
    ddp_bytes, ours_bytes = memory_of(name, ddp), memory_of(name, ours)
    ddp_waits, ours_waits = waits_of(name, ddp), waits_of(name, ours)
    times = take_turns(pair_of, (name,), seconds)
    return Found(
        name, times.subject_s, times.reference_s, ours_bytes, ddp_bytes, ours_waits, ddp_waits
    )


def measure_alone(name: str, given: argparse.Namespace) -> Found:
    """What rank 0 has found, in processes of the model's own."""
    is_sharing = gpu_pairs.are_sharing(given.ranks)
    with Ranks(given.ranks, {"PYDIST_BACKEND": given.backend}) as ranks:
        limit_s = given.limit + given.seconds
        found: Found = ranks.run(measure, name, is_sharing, given.seconds, timeout=limit_s)[0]
    return found


def memory_text(found: Found) -> str:
    if not found.ours_bytes or not found.ddp_bytes:
        return "?"
    return f"{found.ours_bytes / found.ddp_bytes:.2f}"


def waits_text(waits: int | None) -> str:
    return "?" if waits is None else str(waits)


def table_of(found: Sequence[Found], ranks: int, backend: str) -> Table:
    sharing = "that share a GPU" if gpu_pairs.are_sharing(ranks) else "with a GPU each"
    table = Table(title=f"a training step on {backend}, {ranks} ranks {sharing}")
    for column in ("model", "DDP, ms", "pydist / DDP", "memory / DDP", "waits", "waits of DDP"):
        table.add_column(column, justify="right", no_wrap=True)
    for each in found:
        table.add_row(
            each.model,
            f"{statistics.median(each.ddp_s) * 1e3:.2f}",
            str(ratio_of(each.ours_s, each.ddp_s)),
            memory_text(each),
            waits_text(each.ours_waits),
            waits_text(each.ddp_waits),
        )
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="gpt,resnet,recommender")
    parser.add_argument("--ranks", type=int, default=gpu_pairs.rank_count())
    parser.add_argument("--backend", choices=["nccl", "native"], default="nccl")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each model")
    parser.add_argument(
        "--limit",
        type=float,
        default=75.0,
        help="seconds that a model may take beside these: NCCL takes some to join, cuDNN to choose",
    )
    gpu_figures.add_option(parser)
    given = parser.parse_args(arguments)
    names = given.models.split(",")
    if unknown := [name for name in names if name not in MODELS]:
        parser.error(f"there is no model {unknown[0]}, but {', '.join(MODELS)}")
    why_not = gpu_pairs.why_not(given.backend)
    if not why_not and given.backend == "nccl" and not dist.is_nccl_available():
        why_not = "this torch has no NCCL to compare with"
    if why_not:
        print(f"No step was measured: {why_not}.")
        return 2
    found: list[Found] = []
    kept = gpu_figures.Kept(given.json)
    for name in names:
        try:
            found.append(measure_alone(name, given))
        except AssertionError as error:
            print(f"{name} was not measured: {error}")
        else:
            keep(kept, found[-1])
    Console().print(table_of(found, given.ranks, given.backend))
    waiting = [each.model for each in found if each.ours_waits]
    if waiting:
        print(f"The host waits for the GPU in a step of {', '.join(waiting)}; it should not.")
    return 1 if waiting or len(found) < len(names) else 0


def keep(kept: gpu_figures.Kept, found: Found) -> None:
    waits = f"waits {waits_text(found.ours_waits)}, of DDP {waits_text(found.ddp_waits)}"
    ratio = ratio_of(found.ours_s, found.ddp_s)
    kept.add(found.model, f"{ratio} of DDP, memory {memory_text(found)}, {waits}", **asdict(found))


if __name__ == "__main__":
    sys.exit(main())
