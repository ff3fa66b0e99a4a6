"""`pydist bench sharded --offload`: the three flows of a step whose state is on the host.

Gradients go to the host, the host steps, parameters come back. In a training step they overlap, so
the slowest bounds it. Here each runs by itself, of all buckets, on all ranks at the same time, as
they share the bus and the host's memory; a flow's time is that of the slowest rank. Beside them:
whole steps, in which they overlap with each other and with forward and backward.
"""

import statistics
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

import pydist
from pydist.benchmarks import subcommand
from pydist.benchmarks.machine import unpinned
from pydist.benchmarks.processes.job import Job
from pydist.benchmarks.steps.models import MODELS
from pydist.benchmarks.steps.step_times import Rounds, in_rounds, read_rounds, slowest_s
from pydist.errors import InvalidUsage

FLOWS = ("to host", "step", "to device")
WHOLE_STEP = "whole step"
_WIDTH = 110


def require_gpu() -> None:
    """Raises InvalidUsage where there is nothing to copy from."""
    if not torch.cuda.is_available():
        raise InvalidUsage(
            "--offload measures copies between GPUs and the host, and torch sees no GPU here: run "
            "it where one is"
        )


def _wait_for_device(device: torch.device) -> None:
    done = torch.Event(device)
    done.record()
    done.synchronize()


def _train(model: nn.Module, optimizer: pydist.ShardedOptimizer, inputs: list[Tensor]) -> None:
    optimizer.zero_grad()
    model(*inputs).square().mean().backward()
    optimizer.step()
    optimizer.finish()
    _wait_for_device(inputs[0].device)


def _run_rounds(name: str, seconds: float, journal: str) -> dict[str, Any]:
    """On each rank: rounds of the flows and a whole step. Returns what does not change in them."""
    torch.manual_seed(0)
    made, given = MODELS[name].make()
    inputs = [tensor.to("cuda") for tensor in given]
    model = pydist.DataParallel(made.to("cuda"))
    with unpinned():  # the threads that step run on any core
        optimizer = pydist.ShardedOptimizer(model, torch.optim.AdamW, lr=1e-5, offload="cpu")
    offload = optimizer.offloaded
    assert offload is not None
    _train(model, optimizer, inputs)
    flows = offload.flows()

    def time_round(_number: int) -> dict[str, float]:
        times = {WHOLE_STEP: slowest_s(lambda: _train(model, optimizer, inputs))}
        return times | {flow: slowest_s(flows[flow].run) for flow in FLOWS}

    in_rounds(f"{name}: flows of a step on the host", seconds, journal, time_round)
    return {
        "bytes": {flow: flows[flow].size_bytes for flow in FLOWS},
        "threads": offload.thread_count,
        "pinned_bytes": offload.pinned_bytes,
    }


def summarize(rounds: Rounds, sizes_bytes: dict[str, int]) -> dict[str, Any]:
    """What the rounds tell, for JSON.

    Args:
        rounds: Seconds of each flow, and of whole steps.
        sizes_bytes: Of each flow, on a rank.
    """
    median_s = {name: statistics.median(rounds[name]) for name in (*FLOWS, WHOLE_STEP)}
    return {
        "rounds": len(rounds[WHOLE_STEP]),
        "median_ms": {name: seconds * 1e3 for name, seconds in median_s.items()},
        "gb_per_s": {flow: sizes_bytes[flow] / median_s[flow] * 1e-9 for flow in FLOWS},
        "bound_by": max(FLOWS, key=lambda flow: median_s[flow]),
        "warnings": [],
    }


def measure(job: Job, name: str, seconds: float, journal: Path, results: dict[str, Any]) -> None:
    """Adds what a model's flows are to the results."""
    known = job.run(_run_rounds, name, seconds, str(journal))[0]
    if job.leads and (rounds := read_rounds(journal)):
        summary = summarize(rounds, known["bytes"])
        results[name] = {"title": MODELS[name].title, **known, **summary}


def show(results: dict[str, Any], ranks: int) -> None:
    """Prints a table."""
    table = subcommand.make_table(
        f"AdamW with its state on the host, {ranks} ranks: the flows of a step, each by itself",
        ["model", "flow"],
        ["MB a rank", "ms", "GB/s a rank", "bounds the step"],
    )
    for result in results.values():
        for flow in FLOWS:
            table.add_row(
                f"{result['title']}" if flow == FLOWS[0] else "",
                flow,
                f"{result['bytes'][flow] * 1e-6:.1f}",
                f"{result['median_ms'][flow]:.2f}",
                f"{result['gb_per_s'][flow]:.2f}",
                "yes" if flow == result["bound_by"] else "",
            )
        table.add_row(
            f"{result['threads']} threads a rank",
            WHOLE_STEP,
            "",
            f"{result['median_ms'][WHOLE_STEP]:.2f}",
            "",
            "",
            end_section=True,
        )
    Console(width=_WIDTH).print(table)
