"""`pydist bench sharded`: whole training steps with sharded optimizers.

A step is zeroing gradients, forward, backward, and an update by AdamW with `fused=True`, until all
ranks have all parameters: what `pydist.ShardedOptimizer` would leave for the next forward counts,
too. Its update is by pydist's kernels, that of all other arms by torch's. In every round each arm
makes one, in the same processes, so that all meet the same noise; a step's time is that of the
slowest rank. What is compared is what comes on top of a forward and backward without any
synchronisation, `alone`.

The peer is torch's ZeroRedundancyOptimizer under its DDP, at several knobs, the best of which
counts; and pydist's own DataParallel with the whole optimizer on every rank.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import pydist
from pydist.benchmarks import subcommand
from pydist.benchmarks.machine import unpinned
from pydist.benchmarks.noise import noise_of_steps
from pydist.benchmarks.processes.job import find_job
from pydist.benchmarks.steps import ddp_knobs, offload
from pydist.benchmarks.steps.models import MODELS
from pydist.benchmarks.steps.step_times import (
    ALONE,
    Rounds,
    added_ms,
    in_rounds,
    in_turns,
    plain,
    read_rounds,
    share_of_added,
    slowest_s,
)
from pydist.errors import InvalidUsage

WHOLE = "pydist, whole"
SHARDED = ("pydist, stage 1", "pydist, stage 2", "pydist, one copy")
# By arm: DDP's knobs. With all but the default ones, ZeRO's parameters are views of its buckets.
ZERO = {knobs.replace("DDP", "ZeRO"): knobs for knobs in ddp_knobs.KNOBS}

_DEFAULT_MODELS = ("gpt", "wide", "resnet")
_WIDTH = 150
_OPTIONS: dict[str, Any] = {"lr": 1e-5, "fused": True}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `pydist bench sharded`."""
    subcommand.add_ranks_argument(parser)
    subcommand.add_models_argument(parser, _DEFAULT_MODELS)
    parser.add_argument(
        "--offload",
        action="store_true",
        help="instead: the flows of a step with the optimizer's state on the host, on GPUs",
    )
    subcommand.add_output_arguments(parser, 30.0, "model")


def _arm(model: nn.Module, optimizer: Any, inputs: tuple[Tensor, ...]) -> Callable[[], None]:
    def step() -> None:
        if optimizer is None:
            model.zero_grad()
        else:
            optimizer.zero_grad()
        model(*inputs).square().mean().backward()
        if optimizer is not None:
            optimizer.step()
        if isinstance(optimizer, pydist.ShardedOptimizer):
            optimizer.finish()

    return step


def _make_arms(model: nn.Module, inputs: tuple[Tensor, ...]) -> dict[str, Callable[[], None]]:
    with unpinned():
        gloo = dist.new_group(backend="gloo")
    adamw = torch.optim.AdamW
    arms = {ALONE: _arm(deepcopy(model), None, inputs)}
    for arm, knobs in ZERO.items():
        ddp = DistributedDataParallel(deepcopy(model), process_group=gloo, **ddp_knobs.KNOBS[knobs])
        zero = ZeroRedundancyOptimizer(
            ddp.parameters(),
            adamw,
            process_group=gloo,
            parameters_as_bucket_view=knobs != ddp_knobs.DEFAULT,
            **_OPTIONS,
        )
        arms[arm] = _arm(ddp, zero, inputs)
    whole = pydist.DataParallel(deepcopy(model))
    arms[WHOLE] = _arm(whole, adamw(whole.parameters(), **_OPTIONS), inputs)
    for arm in SHARDED:
        sharded = pydist.DataParallel(deepcopy(model))
        optimizer = pydist.ShardedOptimizer(
            sharded,
            adamw,
            stage=2 if arm == SHARDED[1] else 1,
            share_parameters=arm == SHARDED[2],
            **_OPTIONS,
        )
        arms[arm] = _arm(sharded, optimizer, inputs)
    return arms


def _run_rounds(name: str, seconds: float, journal: str) -> None:
    """On each rank: rounds of a model's steps, as `in_rounds` makes them."""
    torch.manual_seed(0)
    model, inputs = MODELS[name].make()
    arms = _make_arms(model, inputs)

    def time_round(number: int) -> dict[str, float]:
        return {arm: slowest_s(step) for arm, step in in_turns(arms, number)}

    in_rounds(f"{name}: steps with optimizers", seconds, journal, time_round)


def summarize(rounds: Rounds) -> dict[str, Any]:
    """What the rounds tell.

    Args:
        rounds: seconds of each arm.

    Returns:
        For JSON. Milliseconds are medians; ratios are of what is added to `alone` within a round,
        with intervals of 95 %; `null` where the divisor can't be told from zero.
    """
    every = range(len(rounds[ALONE]))
    best = min(ZERO, key=lambda arm: added_ms(rounds, arm, every))
    return {
        "rounds": len(every),
        "median_ms": {arm: statistics.median(rounds[arm]) * 1e3 for arm in rounds},
        "added_ms": {arm: added_ms(rounds, arm, every) for arm in rounds if arm != ALONE},
        "best_zero": best,
        "over_best_zero": {arm: plain(share_of_added(rounds, arm, best)) for arm in SHARDED},
        "over_whole": {arm: plain(share_of_added(rounds, arm, WHOLE)) for arm in SHARDED},
        "warnings": noise_of_steps(rounds[ALONE]),
    }


def _show(results: dict[str, Any], ranks: int) -> None:
    table = subcommand.make_table(
        f"whole steps with fused AdamW, {ranks} ranks: ms on top of forward and backward",
        ["model"],
        ["rounds", ALONE, "arm", "added", "/ ZeRO at its best", "/ pydist, whole"],
    )
    table.columns[3].justify = "left"
    for result in results.values():
        arms = [result["best_zero"], WHOLE, *SHARDED]
        for arm in arms:
            is_first = arm == arms[0]
            table.add_row(
                result["title"] if is_first else "",
                str(result["rounds"]) if is_first else "",
                f"{result['median_ms'][ALONE]:.2f}" if is_first else "",
                arm,
                f"{result['added_ms'][arm]:.2f}",
                subcommand.ratio_text(result["over_best_zero"][arm]) if arm in SHARDED else "",
                subcommand.ratio_text(result["over_whole"][arm]) if arm in SHARDED else "",
                end_section=arm == arms[-1],
            )
    Console(width=_WIDTH).print(table)
    subcommand.print_warnings(results)


def main(options: argparse.Namespace) -> int:
    """Runs `pydist bench sharded`.

    Returns:
        The exit status: 0, or 130 after Ctrl-C.

    Raises:
        InvalidUsage: the flags ask for something impossible; nothing has been measured.
    """
    models = subcommand.chosen_models(options.models)
    for name in models:
        if MODELS[name].is_sparse:
            raise InvalidUsage(
                f"'{name}' has sparse gradients, which no optimizer shards; use other models."
            )
    if options.offload:
        offload.require_gpu()
    job = find_job(options.ranks, pins=options.pin)
    subcommand.check_outputs(options)
    results: dict[str, Any] = {}

    def measure() -> None:
        with tempfile.TemporaryDirectory() as folder:
            for name in models:
                journal = Path(folder) / f"{name}.jsonl"
                if options.offload:
                    offload.measure(job, name, options.seconds, journal, results)
                    continue
                try:
                    job.run(_run_rounds, name, options.seconds, str(journal))
                finally:
                    if job.leads and (rounds := read_rounds(journal)):
                        results[name] = {"title": MODELS[name].title, **summarize(rounds)}

    return subcommand.measure_and_report(
        "sharded",
        options,
        {"ranks": job.ranks, "models": models, "offload": options.offload},
        results,
        measure,
        lambda: (offload.show if options.offload else _show)(results, job.ranks),
        leads=job.leads,
    )
