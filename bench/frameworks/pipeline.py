"""A step of a pipeline that averages once, beside one that averages at every micro-batch.

    pydist run -n 4 bench/frameworks/pipeline.py [--width 1024] [--micro-batches 4 8] [--seconds 8]

Two stages, each on half of the ranks, train by torch's 1F1B schedule. pydist's stage takes one
round of all-reduces a step; torch's own, around the same `pydist.DataParallel`, one a micro-batch.
The two take turns in the same processes. A round's time is that of the slowest rank. Ratios are
medians over rounds with the interval that holds them in 95 % of resamplings; above 1, one round a
step is faster.
"""

import argparse
import statistics
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining as torch_pipelining

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from turns import Pair, join, take_turns

import pydist
from pydist.benchmarks import machine
from pydist.benchmarks.noise import is_noisy, ratio_of
from pydist.pipelining import PipelineStage

_STAGES = 2
_LAYERS = 4  # of each stage
_SAMPLES = 8  # of each micro-batch
# Buckets follow the order that the first steps show, and the speed of the link.
_WARM_UP_STEPS = 4


def steps(width: int, micro_batches: int) -> Pair:
    """A step with pydist's stage, and one with torch's."""
    replicas = pydist.world_size() // _STAGES
    position, replica = pydist.rank() % _STAGES, pydist.rank() // _STAGES
    torch.manual_seed(position)
    inputs, targets = torch.randn(2, micro_batches * _SAMPLES, width)

    def step_with(stage_class: Any) -> Any:
        # All ranks make all groups.
        chains = [
            dist.new_group([r * _STAGES + s for s in range(_STAGES)]) for r in range(replicas)
        ]
        peers = [dist.new_group([r * _STAGES + s for r in range(replicas)]) for s in range(_STAGES)]
        layers = [layer for _ in range(_LAYERS) for layer in (nn.Linear(width, width), nn.Tanh())]
        model = pydist.DataParallel(nn.Sequential(*layers), process_group=peers[position])
        stage = stage_class(model, position, _STAGES, torch.device("cpu"), group=chains[replica])
        schedule = torch_pipelining.Schedule1F1B(
            stage, micro_batches, loss_fn=nn.functional.mse_loss
        )

        def step() -> None:
            model.zero_grad()
            if position == 0:
                schedule.step(inputs)
            else:
                schedule.step(target=targets)

        return step

    return Pair(
        step_with(PipelineStage),
        step_with(torch_pipelining.PipelineStage),
        "a round for each micro-batch",
        _WARM_UP_STEPS,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=1024, help="of layers (default: 1024)")
    parser.add_argument(
        "--micro-batches", type=int, nargs="+", default=[4, 8], help="(default: 4 8)"
    )
    parser.add_argument(
        "--seconds", type=float, default=8.0, help="time for each line (default: 8)"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    # That torch's stage averages at every micro-batch is what is measured.
    warnings.filterwarnings("ignore", message=r".* of torch runs a pydist\.DataParallel")
    join()
    if pydist.world_size() % _STAGES:
        raise SystemExit(f"the number of processes must be a multiple of {_STAGES}")
    if pydist.rank() == 0:
        print(machine.describe())
        print(f"{'micro-batches':>13}{'once ms':>10}{'each ms':>10}{'turns':>8}  each/once")
    for micro_batches in arguments.micro_batches:
        times = take_turns(steps, (arguments.width, micro_batches), arguments.seconds)
        if pydist.rank() == 0:
            once, each = times.subject_s, times.reference_s
            print(
                f"{micro_batches:>13}{1e3 * statistics.median(once):>10.2f}"
                f"{1e3 * statistics.median(each):>10.2f}{len(once):>8}  "
                f"{ratio_of(each, once)!s:<22}{'noisy' if is_noisy(once) else ''}",
                flush=True,
            )
    pydist.shutdown()


if __name__ == "__main__":
    main()
