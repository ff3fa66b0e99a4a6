"""Times of training steps, in turns: without averaging, with torch's DDP, with pydist.

A step is forward and backward. In every round each arm makes one, in the same processes, so that
all meet the same noise; a step's time is that of the slowest rank. What averaging costs is the time
that it adds to a step, the difference of an arm and `alone` within a round.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import pydist
from pydist.benchmarks.machine import unpinned
from pydist.benchmarks.noise import (
    Ratio,
    bootstrap_interval,
    noise_of_steps,
    ratio_of,
)
from pydist.benchmarks.progress import Progress
from pydist.benchmarks.steps import ddp_knobs
from pydist.benchmarks.steps.models import MODELS

T = TypeVar("T")

ALONE, OURS = "alone", "pydist"
# Beside the arms: what pydist's own counters say of its step, and backward's part of `alone`.
EXPOSED = "pydist exposed"
BACKWARD = "backward alone"
# All gradients averaged with nothing else to do. Where the ranks' steps keep all cores busy, no
# overlap hides it: a step takes as much longer than `alone`.
AVERAGING = "averaging alone"

# DDP builds its buckets anew after the first step, pydist may after steps 1, 2 and 4.
_WARM_ROUNDS = 5
_LEAST_ROUNDS = 10

# Of one arm each, in seconds.
Rounds = dict[str, list[float]]


def make_arms(
    model: nn.Module, ddp_arms: Iterable[str] = tuple(ddp_knobs.KNOBS)
) -> dict[str, nn.Module]:
    """Wrappers of copies of a model, by arm: alone, DDP's, pydist's. Every rank calls it.

    Args:
        model: becomes pydist's.
        ddp_arms: some of `ddp_knobs.KNOBS` (default: all).
    """
    with unpinned():
        gloo = dist.new_group(backend="gloo")
    arms: dict[str, nn.Module] = {ALONE: deepcopy(model)}
    for arm in ddp_arms:
        knobs = ddp_knobs.KNOBS[arm]
        arms[arm] = DistributedDataParallel(deepcopy(model), process_group=gloo, **knobs)
    arms[OURS] = pydist.DataParallel(model)
    return arms


def time_step(
    arm: str, model: nn.Module, inputs: tuple[Tensor, ...], slowest: Tensor
) -> dict[str, float]:
    """Times one step of an arm. Every rank calls it.

    Args:
        arm: its name.
        model: of `make_arms`.
        inputs: of the model, this rank's.
        slowest: room for two numbers of float64, the same tensor in every step.

    Returns:
        Seconds of the slowest rank, by arm. Beside pydist's those that its communication was
        exposed, beside `alone` those of backward.
    """
    before_s = model.stats().exposed_s if isinstance(model, pydist.DataParallel) else 0.0
    model.zero_grad()
    pydist.barrier()
    start_s = time.perf_counter()
    loss = model(*inputs).square().mean()
    forward_end_s = time.perf_counter()
    loss.backward()
    end_s = time.perf_counter()
    slowest[0], slowest[1] = end_s - start_s, end_s - forward_end_s
    if isinstance(model, pydist.DataParallel):
        slowest[1] = model.stats().exposed_s - before_s
    pydist.all_reduce(slowest, "max")
    beside = {ALONE: BACKWARD, OURS: EXPOSED}
    taken = {arm: float(slowest[0])}
    return {**taken, beside[arm]: float(slowest[1])} if arm in beside else taken


def in_turns(arms: Mapping[str, T], number: int) -> list[tuple[str, T]]:
    """The arms in the order of a round: A B C, C B A, and so on, so that none follows one alone."""
    order = list(arms.items())
    return order if number % 2 == 0 else order[::-1]


def run_rounds(name: str, seconds: float, journal: str) -> None:
    """On each rank: rounds of a model's steps, as `in_rounds` makes them."""
    torch.manual_seed(0)
    model, inputs = MODELS[name].make()
    arms = make_arms(model)
    slowest = torch.zeros(2, dtype=torch.float64)
    gradients = None
    if not MODELS[name].is_sparse:
        parameters = list(model.parameters())
        count = sum(parameter.numel() for parameter in parameters)
        gradients = pydist.symmetric_empty(count, dtype=parameters[0].dtype).zero_()

    def time_round(number: int) -> dict[str, float]:
        times: dict[str, float] = {}
        for arm, module in in_turns(arms, number):
            times |= time_step(arm, module, inputs, slowest)
        if gradients is not None:
            times[AVERAGING] = slowest_s(partial(pydist.all_reduce, gradients, "mean"))
        return times

    in_rounds(f"{name}: steps", seconds, journal, time_round)


def slowest_s(run: Callable[[], object]) -> float:
    """Seconds that `run` takes on the slowest rank, which all begin together."""
    pydist.barrier()
    start_s = time.perf_counter()
    run()
    slowest = torch.tensor(time.perf_counter() - start_s, dtype=torch.float64)
    pydist.all_reduce(slowest, "max")
    return float(slowest)


def in_rounds(
    what: str, seconds: float, journal: str, time_round: Callable[[int], dict[str, float]]
) -> None:
    """On each rank: rounds for so many seconds, 10 at least.

    Args:
        what: is measured, for people.
        seconds: without those for warming up.
        journal: rank 0 writes each round there as soon as it is over, so that none is lost when
            the run is interrupted.
        time_round: makes the round of a number; returns the seconds of each arm.
    """
    progress = Progress(pydist.rank() == 0)
    progress.phase(f"{what}, warming up")
    for number in range(_WARM_ROUNDS):
        time_round(number)
    progress.phase(what)
    rounds = 0
    start_s = time.perf_counter()
    more = torch.ones(1, dtype=torch.int32)
    with open(journal if pydist.rank() == 0 else "/dev/null", "w") as file:
        while more[0]:
            file.write(json.dumps(time_round(rounds)) + "\n")
            file.flush()
            rounds += 1
            past_s = time.perf_counter() - start_s
            progress.detail(f"round {rounds}, {past_s:.0f} of {seconds:g} s")
            more[0] = rounds < _LEAST_ROUNDS or past_s < seconds
            pydist.broadcast(more, root=0)
    progress.clear()


def read_rounds(journal: Path) -> Rounds:
    """What `in_rounds` has written; a last round that was cut short is left out."""
    rounds: Rounds = {}
    if not journal.exists():
        return rounds
    for line in journal.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            for arm, seconds in json.loads(line).items():
                rounds.setdefault(arm, []).append(seconds)
    return rounds


def _of_all_rounds(
    count: int, statistic: Callable[[Sequence[int]], float]
) -> tuple[float, tuple[float, float]]:
    return statistic(range(count)), bootstrap_interval(count, statistic)


def added_ms(rounds: Rounds, arm: str, picked: Sequence[int]) -> float:
    """The median of what an arm adds to a step in some rounds."""
    return statistics.median((rounds[arm][i] - rounds[ALONE][i]) * 1e3 for i in picked)


def share_of_added(rounds: Rounds, arm: str, base: str) -> Ratio | None:
    """The time that an arm adds to a step over the time that another one adds.

    None where that adds nothing that this run can tell from zero: a ratio would mean nothing.
    """
    count = len(rounds[ALONE])
    low_ms, _ = bootstrap_interval(count, lambda picked: added_ms(rounds, base, picked))
    if low_ms <= 0:
        return None

    def share(picked: Sequence[int]) -> float:
        # A resampling may hit zero even so.
        return added_ms(rounds, arm, picked) / max(added_ms(rounds, base, picked), 1e-6)

    median, interval = _of_all_rounds(count, share)
    return Ratio(median, *interval)


def plain(ratio: Ratio | None) -> dict[str, float] | None:
    """For JSON."""
    return None if ratio is None else asdict(ratio)


def summarize(rounds: Rounds) -> dict[str, Any]:
    """What the rounds tell.

    Args:
        rounds: seconds of each arm, one or more rounds; `alone`, `pydist`, `pydist exposed`, and
            arms of `ddp_knobs`, the default one among them; `averaging alone` may be there.

    Returns:
        For JSON. Milliseconds: medians, and intervals of 95 %. `added_over_ddp` and
        `added_over_best_ddp` are null where DDP adds nothing that can be told from zero, and
        `averaging_alone_ms` is where it was not measured.
    """
    count = len(rounds[ALONE])
    ddp_arms = [arm for arm in ddp_knobs.KNOBS if arm in rounds]
    arms = [ALONE, *ddp_arms, OURS]
    medians = {arm: statistics.median(rounds[arm]) * 1e3 for arm in arms}
    best = min(ddp_arms, key=lambda arm: medians[arm])
    added = {}
    for arm in (ddp_knobs.DEFAULT, best, OURS):
        median_ms, interval = _of_all_rounds(count, lambda i, arm=arm: added_ms(rounds, arm, i))  # type: ignore[misc]
        added[arm] = {"median": median_ms, "interval": interval}
    exposed_ms, interval = _of_all_rounds(
        count, lambda picked: statistics.median(rounds[EXPOSED][i] * 1e3 for i in picked)
    )
    over_ddp, over_best = (share_of_added(rounds, OURS, base) for base in (ddp_knobs.DEFAULT, best))
    warnings = noise_of_steps(rounds[ALONE])
    if over_best is None or not over_best.tells:
        warnings.append(
            "too noisy, or too close, to tell whether pydist or DDP at its best adds less"
        )
    return {
        "rounds": count,
        "median_ms": medians,
        "best_ddp": best,
        "added_ms": added,
        "added_over_ddp": plain(over_ddp),
        "added_over_best_ddp": plain(over_best),
        "step_over_ddp": asdict(ratio_of(rounds[OURS], rounds[ddp_knobs.DEFAULT])),
        "step_over_best_ddp": asdict(ratio_of(rounds[OURS], rounds[best])),
        "exposed_ms": {"median": exposed_ms, "interval": interval},
        "averaging_alone_ms": statistics.median(rounds[AVERAGING]) * 1e3
        if AVERAGING in rounds
        else None,
        "warnings": warnings,
    }
