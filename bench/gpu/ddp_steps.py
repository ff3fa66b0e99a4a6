"""Training steps on GPUs beside torch's DDP: python bench/gpu/ddp_steps.py

On every GPU of this host, or with two ranks on the only one (see gpu_pairs.py). A step is forward,
backward and SGD; both wrappers train the same model over the same NCCL, in turns in the same
processes. Beside the ratio of the times stand, of one step of either: the most that lay in torch's
memory on the GPU beyond what lay there before the model was made, and how often the host waited for
the GPU, as CUPTI tells torch's profiler. Exits with 2 where there is no GPU, or torch has no NCCL.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "python"))
import fake_cuda
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

# Calls of CUDA's runtime and driver for which the host waits. A copy from or to ordinary memory
# waits, too, and is one of the first or followed by one of them.
_WAITING_CALLS = (
    *("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cudaMemcpy"),
    *("cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize"),
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
    """A step of a model that is made here, which waits for the GPU at its end."""
    torch.manual_seed(0)
    module, inputs = MODELS[name].make()
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


def peak_bytes(name: str, wrap: Callable[[nn.Module], nn.Module]) -> int | None:
    """What torch's allocator has given out at most."""
    if not gpu_ranks.IS_REAL:
        return None
    gc.collect()
    before = torch.cuda.memory_allocated()
    step = step_of(name, wrap)
    for _ in range(_STEPS_BEFORE):
        step()
    gpu_ranks.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    gpu_ranks.synchronize()
    return torch.cuda.max_memory_allocated() - before


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
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
    # Leaving the block waits for the GPU by itself, once.
    counts = {event.key: event.count for event in profile.key_averages()}
    waits = sum(counts.get(call, 0) for call in _WAITING_CALLS)
    return max(0, waits - 1)


def measure(name: str, seconds: float) -> Found:
    """On each rank."""
    if gpu_pairs.are_sharing() and not pydist.is_initialized():
        gpu_ranks.install()
    pydist.init()
    times = take_turns(pair_of, (name,), seconds)
    return Found(
        name,
        times.subject_s,
        times.reference_s,
        peak_bytes(name, ours),
        peak_bytes(name, ddp),
        waits_of(name, ours),
        waits_of(name, ddp),
    )


def measure_all(names: Sequence[str], seconds: float) -> list[Found]:
    """What rank 0 has found. Each model has processes of its own."""
    found = []
    for name in names:
        with Ranks(gpu_pairs.rank_count(), {"PYDIST_BACKEND": "nccl"}) as ranks:
            found.append(ranks.run(measure, name, seconds, timeout=_LIMIT_S + seconds)[0])
    return found


def table_of(found: Sequence[Found]) -> Table:
    sharing = "that share a GPU" if gpu_pairs.are_sharing() else "with a GPU each"
    table = Table(title=f"a training step, {gpu_pairs.rank_count()} ranks {sharing}")
    for column in ("model", "DDP, ms", "pydist / DDP", "memory / DDP", "waits", "waits of DDP"):
        table.add_column(column, justify="right", no_wrap=True)
    for each in found:
        memory = (
            "?"
            if not each.ours_bytes or not each.ddp_bytes
            else f"{each.ours_bytes / each.ddp_bytes:.2f}"
        )
        table.add_row(
            each.model,
            f"{statistics.median(each.ddp_s) * 1e3:.2f}",
            str(ratio_of(each.ours_s, each.ddp_s)),
            memory,
            str(each.ours_waits),
            str(each.ddp_waits),
        )
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="gpt,resnet,recommender")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each model")
    parser.add_argument("--json", type=Path, help="a file, where it is kept as well")
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
    found = measure_all(names, given.seconds)
    Console().print(table_of(found))
    if given.json is not None:
        machine: dict[str, Any] = {"torch": torch.__version__, "ranks": gpu_pairs.rank_count()}
        if gpu_ranks.IS_REAL:
            machine["gpu"] = torch.cuda.get_device_name()
        kept = {"machine": machine, "models": [asdict(each) for each in found]}
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(kept, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
