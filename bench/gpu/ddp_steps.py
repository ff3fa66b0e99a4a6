"""Training steps on GPUs beside torch's DDP: python bench/gpu/ddp_steps.py

On every GPU of this host, or with two ranks on the only one (see gpu_pairs.py). A step is forward,
backward and SGD; both wrappers train the same model over the same NCCL, in turns in the same
processes. The recommender's tables have dense gradients: torch's NCCL reduces no sparse ones.

Beside the ratio of the times stand the memory of the GPU that a model takes with its wrapper, all
ranks of the GPU together, and how often the host waits for the GPU in a step, as CUPTI tells
torch's profiler of CUDA's runtime. What pydist's engine asks of the driver is not among that; the
stand-in counts it. Exits with 1 where a model fails, or the host waits in a step of pydist's; with
2 where there is no GPU, or torch has no NCCL.
"""

from __future__ import annotations

import argparse
import gc
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
import fake_cuda
import gpu_figures
import gpu_pairs
import gpu_ranks
from launch import Ranks
from turns import Pair, take_turns

import pydist
from pydist.benchmarks.noise import ratio_of
from pydist.benchmarks.steps.models import MODELS

Step = Callable[[], None]

# Of one model, beside the seconds that it is given: NCCL takes some to join, cuDNN to choose.
_LIMIT_S = 150.0
# After so many steps the plan of the buckets is settled, and buffers are known.
_STEPS_BEFORE = 6

# Calls of CUDA's runtime for which the host waits; torch's copies from or to ordinary memory end
# with the first.
_WAITING_CALLS = (
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "cudaDeviceSynchronize",
    "cudaMemcpy",
)


@dataclass
class Found:
    """Of one model. The bytes are None on a stand-in."""

    model: str
    ours_s: list[float]
    ddp_s: list[float]
    ours_bytes: int | None
    ddp_bytes: int | None
    ours_waits: int
    ddp_waits: int


def ours(module: nn.Module) -> nn.Module:
    return pydist.DataParallel(module)


def ddp(module: nn.Module) -> nn.Module:
    if not gpu_ranks.IS_REAL:  # which torch's DDP cannot time
        return ours(module)
    return nn.parallel.DistributedDataParallel(module, process_group=gpu_pairs.torchs_group())


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


def waits_of(name: str, wrap: Callable[[nn.Module], nn.Module]) -> int:
    """How often the host waits in one step, once everything is settled."""
    step = step_of(name, wrap)
    for _ in range(_STEPS_BEFORE):
        step()
    gpu_ranks.synchronize()
    if not gpu_ranks.IS_REAL:
        fake_cuda.take_host_waits()
        step()
        return len(fake_cuda.take_host_waits())
    # Leaving the profiler waits for the GPU by itself.
    return max(0, profiled_waits(step) - profiled_waits(lambda: None))


def profiled_waits(act: Callable[[], None]) -> int:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        act()
    counts = {event.key: event.count for event in profile.key_averages()}
    return sum(counts.get(call, 0) for call in _WAITING_CALLS)


def measure(name: str, seconds: float) -> Found:
    """On each rank."""
    if gpu_pairs.are_sharing() and not pydist.is_initialized():
        gpu_ranks.install()
    pydist.init()
    # DDP first: what pydist frees of NCCL's memory may be given back later.
    ddp_bytes, ours_bytes = memory_of(name, ddp), memory_of(name, ours)
    ddp_waits, ours_waits = waits_of(name, ddp), waits_of(name, ours)
    times = take_turns(pair_of, (name,), seconds)
    return Found(
        name, times.subject_s, times.reference_s, ours_bytes, ddp_bytes, ours_waits, ddp_waits
    )


def measure_alone(name: str, seconds: float) -> Found:
    """What rank 0 has found, in processes of the model's own."""
    with Ranks(gpu_pairs.rank_count(), {"PYDIST_BACKEND": "nccl"}) as ranks:
        found: Found = ranks.run(measure, name, seconds, timeout=_LIMIT_S + seconds)[0]
    return found


def memory_text(found: Found) -> str:
    if not found.ours_bytes or not found.ddp_bytes:
        return "?"
    return f"{found.ours_bytes / found.ddp_bytes:.2f}"


def table_of(found: Sequence[Found]) -> Table:
    sharing = "that share a GPU" if gpu_pairs.are_sharing() else "with a GPU each"
    table = Table(title=f"a training step, {gpu_pairs.rank_count()} ranks {sharing}")
    for column in ("model", "DDP, ms", "pydist / DDP", "memory / DDP", "waits", "waits of DDP"):
        table.add_column(column, justify="right", no_wrap=True)
    for each in found:
        table.add_row(
            each.model,
            f"{statistics.median(each.ddp_s) * 1e3:.2f}",
            str(ratio_of(each.ours_s, each.ddp_s)),
            memory_text(each),
            str(each.ours_waits),
            str(each.ddp_waits),
        )
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="gpt,resnet,recommender")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each model")
    gpu_figures.add_option(parser)
    given = parser.parse_args(arguments)
    names = given.models.split(",")
    if unknown := [name for name in names if name not in MODELS]:
        parser.error(f"there is no model {unknown[0]}, but {', '.join(MODELS)}")
    why_not = gpu_pairs.why_not("nccl")
    if not why_not and not dist.is_nccl_available():
        why_not = "this torch has no NCCL to compare with"
    if why_not:
        print(f"No step was measured: {why_not}.")
        return 2
    found: list[Found] = []
    for name in names:
        try:
            found.append(measure_alone(name, given.seconds))
        except AssertionError as error:
            print(f"{name} was not measured: {error}")
        gpu_figures.keep(given.json, [figure_of(each) for each in found])
    Console().print(table_of(found))
    waiting = [each.model for each in found if each.ours_waits]
    if waiting:
        print(f"The host waits for the GPU in a step of {', '.join(waiting)}; it should not.")
    return 1 if waiting or len(found) < len(names) else 0


def figure_of(found: Found) -> gpu_figures.Figure:
    waits = f"waits {found.ours_waits}, of DDP {found.ddp_waits}"
    shown = f"{ratio_of(found.ours_s, found.ddp_s)} of DDP, memory {memory_text(found)}, {waits}"
    return gpu_figures.figure(found.model, shown, ranks=gpu_pairs.rank_count(), **asdict(found))


if __name__ == "__main__":
    sys.exit(main())
