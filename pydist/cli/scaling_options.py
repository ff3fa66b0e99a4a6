"""`pydist plan --hosts`: the flags, and where compute times and costs come from."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from pydist.errors import InvalidUsage
from pydist.planning.costs import LINK_BETA, NAMES, Costs, FittedCosts, default_costs
from pydist.planning.scaling_estimate import scaling
from pydist.planning.scaling_plan import ScalingPlan
from pydist.planning.step_measurement import measure_step
from pydist.planning.step_time import Compute

# Of forward and backward together, where only their sum is known: a layer's backward makes two
# products of matrices, for its inputs and its weights, where forward makes one.
_BACKWARD_SHARE = 2 / 3

_ONLY_WITH_HOSTS = ("link", "fitted", "step_ms", "measure_step")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    group = parser.add_argument_group("step time and efficiency on several hosts")
    group.add_argument(
        "--hosts", type=int, metavar="N", help="up to so many, 1 to 1024, each with as many ranks"
    )
    group.add_argument(
        "--link", type=float, metavar="GBIT", help="rate of a host's link in Gbit/s, such as 25"
    )
    group.add_argument(
        "--fitted",
        type=Path,
        metavar="FILE",
        help="costs of messages and bytes that bench/hosts/fit_model.py has fitted; default: "
        "assumptions, which are printed",
    )
    compute = group.add_mutually_exclusive_group()
    compute.add_argument(
        "--step-ms",
        metavar="MS",
        help="what one rank takes to compute a step without communication, or three such numbers: "
        "FORWARD,BACKWARD,OPTIMIZER",
    )
    compute.add_argument(
        "--measure-step",
        action="store_true",
        help="makes the model and times steps of it here, on one process, with --input or --sample",
    )


def ranks_of(options: argparse.Namespace) -> tuple[int, int | None]:
    """The number of ranks, and those of a host if they are known.

    Raises:
        InvalidUsage: They don't agree, or flags need others that are not there.
    """
    if options.hosts is None:
        for name in _ONLY_WITH_HOSTS:
            if getattr(options, name):
                flag = f"--{name.replace('_', '-')}"
                raise InvalidUsage(f"{flag} is for a plan of several hosts: give --hosts, too")
        if options.ranks is None:
            raise InvalidUsage("give --ranks N, or --hosts N (with --ranks-per-host)")
        return options.ranks, options.ranks_per_host
    if options.hosts < 1:
        raise InvalidUsage(f"--hosts {options.hosts}: there is one at least")
    each = options.ranks_per_host
    if each is None:
        each, rest = divmod(options.ranks, options.hosts) if options.ranks else (1, 0)
        if rest or each < 1:
            raise InvalidUsage(
                f"{options.ranks} ranks can't be spread evenly over {options.hosts} hosts: give "
                "--ranks-per-host in place of --ranks"
            )
    if options.ranks not in (None, each * options.hosts):
        raise InvalidUsage(
            f"--ranks {options.ranks} is not {options.hosts} hosts with {each} ranks each: leave "
            "out one of the three"
        )
    return each * options.hosts, each


def scaling_of(
    options: argparse.Namespace,
    model: nn.Module,
    ranks_per_host: int,
    dtype: torch.dtype | None,
    measured: Callable[[], tuple[nn.Module, Any]],
    optimizer: type[Optimizer],
    optimizer_options: Mapping[str, Any],
) -> ScalingPlan:
    """What the flags ask for.

    Args:
        options: With `--hosts`.
        model: On any device.
        ranks_per_host: From `ranks_of`.
        dtype: Of the model.
        measured: Makes the model and a sample with values, for `--measure-step`.
        optimizer: The class.
        optimizer_options: Of the class.

    Raises:
        InvalidUsage: The flags make no sense, or a file can't be read.
    """
    costs, notes = _costs(options)
    if options.ranks_per_host is None and options.ranks is None:
        notes.append("one rank on each host: --ranks-per-host says otherwise")
    compute, shares = None, None
    if options.step_ms is not None:
        compute = _compute(options.step_ms, notes)
    elif options.measure_step:
        real, sample = measured()
        step = measure_step(real, sample, optimizer, optimizer_options)
        compute, shares = step.compute, step.ready_shares
        notes.append(
            f"a step computes {compute.total_s * 1e3:.4g} ms on every rank (forward "
            f"{compute.forward_s * 1e3:.4g}, backward {compute.backward_s * 1e3:.4g}, optimizer "
            f"{compute.optimizer_s * 1e3:.4g}) and gradients come when they did here: median of "
            f"{step.steps} steps on {step.device}, without pydist"
        )
    return scaling(
        model,
        options.hosts,
        ranks_per_host,
        costs,
        compute=compute,
        dtype=dtype,
        bucket_cap_mb=options.bucket_cap_mb,
        ready_shares=shares,
        assumptions=notes,
    )


def _compute(text: str, notes: list[str]) -> Compute:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if len(values) not in (1, 3) or not all(0 <= value < math.inf for value in values):
        raise InvalidUsage(
            f"--step-ms {text}: write milliseconds, such as 120, or FORWARD,BACKWARD,OPTIMIZER, "
            "such as 35,75,10"
        )
    seconds = [value / 1e3 for value in values]
    if len(seconds) == 3:
        notes.append(
            f"every rank computes forward in {values[0]:g} ms, backward in {values[1]:g}, the "
            f"optimizer's step in {values[2]:g}, as given; a sharded optimizer's in a share of that"
        )
        return Compute(*seconds)
    notes.append(
        f"a step computes {values[0]:g} ms on every rank, as given; two thirds of it are backward, "
        "and a sharded optimizer saves none of it: --step-ms FORWARD,BACKWARD,OPTIMIZER says "
        "otherwise"
    )
    backward_s = seconds[0] * _BACKWARD_SHARE
    return Compute(seconds[0] - backward_s, backward_s)


def _costs(options: argparse.Namespace) -> tuple[Costs, list[str]]:
    if options.fitted is not None:
        fitted = FittedCosts.read(options.fitted)
        error = fitted.held_out_error
        accuracy = (
            "never compared with anything else"
            if error is None
            else f"off by up to {error:.0%} on measurements that the fit had not seen"
        )
        notes = [
            f"fitted to {fitted.about or 'measurements'}, {accuracy}; more than {fitted.ranks} "
            f"ranks are extrapolated: {_listed(fitted.costs, fitted.fitted)}"
        ]
        rest = [name for name in NAMES if name not in fitted.fitted]
        costs = fitted.costs
        if options.link is not None:
            costs = costs.at_rate(options.link)
            rest = [name for name in rest if name != LINK_BETA]
            notes.append(f"{_rate(options.link)}, in place of the link that was measured")
        if rest:
            notes.append(f"not fitted, but assumed: {_listed(costs, rest)}")
        return costs, notes
    if options.link is None and options.hosts > 1:
        raise InvalidUsage("--hosts needs the rate of a host's link: --link 25, or --fitted FILE")
    rate = options.link if options.link is not None else 10.0
    costs = default_costs(rate)
    names = [name for name in NAMES if name != LINK_BETA]
    if options.hosts == 1:
        return costs, [f"not measured: {_listed(costs, [n for n in names if 'host' in n])}"]
    return costs, [
        _rate(rate),
        f"not measured: {_listed(costs, names)}; --fitted has measured ones",
    ]


def _rate(gbit_per_s: float) -> str:
    payload = 8e-9 / default_costs(gbit_per_s).link.beta_s_per_byte
    return (
        f"a link of {gbit_per_s:g} Gbit/s carries {payload:.4g} Gbit/s of data each way, both at "
        "once: TCP in Ethernet's frames of 1500 bytes"
    )


_TEXTS = {
    "link.alpha_s": "a message takes {us:.3g} µs from host to host",
    LINK_BETA: "a link carries {gbit:.3g} Gbit/s",
    "link.gamma_s_per_byte": "a rank combines {gb} of what arrives",
    "link.message_s": "it spends {us:.3g} µs on each message it sends and the one it gets",
    "link.rank_s_per_byte": "it sends and receives {rank}",
    "host.alpha_s": "the ranks of a host meet in {us:.3g} µs",
    "host.beta_s_per_byte": "each copies {gb} there",
    "host.gamma_s_per_byte": "and combines {gb}",
}


def _listed(costs: Costs, names: tuple[str, ...] | list[str]) -> str:
    """Costs as people say them."""
    parts = []
    for name in names:
        value = costs.value(name)
        bytes_per_s = 1 / value if value else math.inf
        parts.append(
            _TEXTS[name].format(
                us=value * 1e6,
                gbit=bytes_per_s * 8e-9,
                gb=f"{bytes_per_s / 1e9:.3g} GB/s" if value else "in no time",
                rank=f"{bytes_per_s * 8e-9:.3g} Gbit/s each way" if value else "in no time",
            )
        )
    return ", ".join(parts)
