"""A training step over several hosts, beside torch's DDP: python bench/hosts/train_step.py

The hosts are network namespaces of this machine; `--rate 1gbit` makes the links between them as
slow as real ones. One model is trained by pydist.DataParallel, by torch's DistributedDataParallel
on gloo, as it comes and with its best knobs, and by each rank alone. They take turns, step by step,
in the same processes. pydist runs on what PYDIST_BACKEND says, as any variable PYDIST_* reaches its
ranks.

What is compared is exposed communication: the time that averaging adds to a step, which is the
difference of an arm's step and the step alone within a round. A ratio is pydist's over DDP's, with
the interval that holds it in 95 % of a bootstrap over the rounds. Below 1 pydist adds less.

How much can be hidden depends on how long backward takes beside the transfer. So each round
measures two more things by themselves: backward, in the step alone, and the transfer, an all_reduce
by pydist of as many bytes as the gradients have. `--batch 4` makes backward longer (four times the
model's batch), and leaves the transfer as it is.

Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# First, for what it sets before torch is imported.
from on_hosts import (
    add_arguments,
    add_ranks_argument,
    check_output,
    failing_in_one_line,
    make_hosts,
    network_of,
    print_header,
    rank_environment,
)

# isort: split
import joining
import step_turns
import torch
from ranks_on import RanksOn
from rich.console import Console

from pydist.benchmarks import machine
from pydist.benchmarks.noise import Ratio, ratio_of
from pydist.benchmarks.outputs import json_text, write_text_whole
from pydist.benchmarks.steps import ddp_knobs, step_times
from pydist.benchmarks.steps.models import MODELS
from pydist.benchmarks.steps.step import show_times

# Of the transfer, which backward covers or does not: both cases are promised something else.
HALF = 0.5


@dataclass(frozen=True)
class Covering:
    """What backward could cover of the transfer."""

    gradient_bytes: int
    # Medians.
    backward_ms: float
    transfer_ms: float
    # Backward's time over the transfer's, of the same round.
    share: Ratio

    def __str__(self) -> str:
        if self.share.low < HALF <= self.share.high:
            case = "about half of it: this run can't tell whether less"
        else:
            case = "half of it or more" if self.share.median >= HALF else "less than half of it"
        return (
            f"backward alone {self.backward_ms:.1f} ms, transfer alone {self.transfer_ms:.1f} ms "
            f"({self.gradient_bytes / (1 << 20):.1f} MiB); {self.share} of the transfer: backward "
            f"can cover {case}"
        )


def covering_of(rounds: step_times.Rounds, gradient_bytes: int) -> Covering:
    backward_s, transfer_s = rounds[step_times.BACKWARD], rounds[step_turns.TRANSFER]
    return Covering(
        gradient_bytes,
        statistics.median(backward_s) * 1e3,
        statistics.median(transfer_s) * 1e3,
        ratio_of(backward_s, transfer_s),
    )


def measure(args: argparse.Namespace, console: Console) -> step_times.Rounds:
    with tempfile.TemporaryDirectory() as folder, make_hosts(args, len(args.ranks)) as hosts:
        if args.rate:
            hosts.shape(args.rate)
        journal = Path(folder) / "rounds.jsonl"
        with RanksOn(hosts, args.ranks, rank_environment(hosts)) as ranks:
            backend = ranks.run(joining.join, timeout=args.timeout)[0]
            console.print(f"pydist on {backend}, ranks on the hosts: {args.ranks}", highlight=False)
            ddp_arms = [ddp_knobs.DEFAULT, *(ddp_knobs.arm_of(each) for each in args.buckets)]
            train = (args.model, args.batch, ddp_arms, args.seconds, str(journal))
            ranks.run(step_turns.run_rounds, *train, timeout=args.timeout)
        return step_times.read_rounds(journal)


def report(
    args: argparse.Namespace,
    rounds: step_times.Rounds,
    times: dict[str, Any],
    covering: Covering,
) -> dict[str, Any]:
    return {
        "machine": machine.describe().to_dict(),
        "network": network_of(args),
        "ranks_per_host": args.ranks,
        "model": args.model,
        "batch": args.batch,
        "times": times,
        "backward / transfer": asdict(covering),
        "rounds_s": rounds,
    }


def parse_buckets(text: str) -> list[int]:
    """The bucket sizes of --buckets, in MiB."""
    known = [str(each) for each in ddp_knobs.BUCKETS_MB]
    words = text.split(",")
    if not set(words) <= set(known):
        raise argparse.ArgumentTypeError(f"{text}: some of {', '.join(known)}")
    return [int(word) for word in dict.fromkeys(words)]


def main() -> None:
    dense = [name for name, model in MODELS.items() if not model.is_sparse]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add_ranks_argument(parser, "2,2")
    add("--model", choices=dense, default="resnet", help="default: resnet")
    add("--batch", type=int, default=1, help="times the model's own batch (default: 1)")
    buckets = ",".join(str(each) for each in ddp_knobs.BUCKETS_MB)
    add("--buckets", type=parse_buckets, default=[25], help=f"MiB, of DDP at its best: {buckets}")
    add("--seconds", type=float, default=60, help="of all rounds, which are 10 at least")
    add("--timeout", type=float, default=1800, help="s, of everything")
    add_arguments(parser)
    args = parser.parse_args()
    if args.batch < 1:
        parser.error("--batch must be 1 or more")
    if not (args.seconds > 0 and math.isfinite(args.seconds)):
        parser.error("--seconds must be more than 0")
    check_output(args)
    console = Console(width=120)
    print_header(console, args, sum(args.ranks))
    with failing_in_one_line():
        rounds = measure(args, console)
    with torch.device("meta"):
        model, _ = MODELS[args.model].make()
    times = step_times.summarize(rounds)
    covering = covering_of(rounds, step_turns.gradient_bytes(model))
    title = MODELS[args.model].title
    if args.batch > 1:
        title += f", {args.batch} times"
    show_times({args.model: {"title": title, "times": times}}, sum(args.ranks))
    console.print(str(covering), highlight=False)
    if args.json:
        write_text_whole(args.json, json_text(report(args, rounds, times, covering)))


if __name__ == "__main__":
    main()
