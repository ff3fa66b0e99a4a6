"""`pydist bench tune`: the native engine's limits, measured on these ranks, as a configuration.

The engine's defaults suit the machines that they were measured on. Here all_reduce is timed on
ordinary tensors with several values of one variable after the other. In every round each value has
a turn at every size, in a job of its own, and its time over that of the first turn, in which the
variable stays as it is, is averaged over the sizes (geometrically). The best value is taken where
the interval of that ratio says that it is faster. In the end all that was taken has turns with
nothing of it: the best of several looks better than it is.

The file is for PYDIST_CONFIG. So `pydist info` prints what is in force, checkpoints keep it, and
results that depend on it stay what they are from run to run: those of reductions where hosts have
several ranks, whose order of sums the limit of one shots decides (docs/numerics.md).
"""

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import pydist
from pydist.benchmarks import machine, subcommand
from pydist.benchmarks.noise import Ratio, ratio_of
from pydist.benchmarks.outputs import require_writable, write_text_whole
from pydist.benchmarks.processes.job import Job, find_job
from pydist.benchmarks.progress import Progress
from pydist.benchmarks.sizes import parse_size, size_text, sweep
from pydist.errors import InvalidUsage
from pydist.topology.placement import placement_of_job

# Of the section "engine", by name.
Settings = dict[str, int]
# Seconds of a call on the slowest rank, by round, choice and size.
Rounds = list[list[list[float]]]

KIB = 1 << 10
NEVER = 1 << 20  # as many hosts as no job has

# What is tried, in this order: a one shot is never larger than a chunk.
CANDIDATES: dict[str, list[int]] = {
    "sockets": [1, 2, 4],
    "chunk_bytes": [128 * KIB, 256 * KIB, 512 * KIB, 1024 * KIB, 2048 * KIB],
    "one_shot_bytes": [16 * KIB, 32 * KIB, 64 * KIB, 128 * KIB, 256 * KIB, 512 * KIB],
    "rounds_from": [2, NEVER],
    "rounds_bytes": [0, 64 * KIB, 256 * KIB, 1024 * KIB],
}
# What makes a difference on so many hosts and more.
_LEAST_HOSTS = {"sockets": 2, "rounds_from": 3, "rounds_bytes": 3}

_LEAST_ROUNDS = 5
# A turn at a size takes about this long, and so many calls at least.
_TURN_S = 5e-3
_LEAST_CALLS = 3


@dataclass(frozen=True)
class Compared:
    """What settings took, over what the same ranks took without them.

    Attributes:
        settings: What was set beside what is set anyway.
        ratio: Of times, over all sizes; below 1 where the settings are faster.
        by_size: Of each size.
    """

    settings: Settings
    ratio: Ratio
    by_size: list[Ratio]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `pydist bench tune`."""
    subcommand.add_ranks_argument(parser)
    parser.add_argument("-b", "--minbytes", default="4K", metavar="SIZE", help="(default: 4K)")
    parser.add_argument("-e", "--maxbytes", default="16M", metavar="SIZE", help="(default: 16M)")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="a configuration in TOML, for PYDIST_CONFIG"
    )
    subcommand.add_output_arguments(parser, 20.0, "variable")


def _count_hosts() -> int:
    """On each rank."""
    hosts: int = placement_of_job().hosts
    return hosts


def _measure(choices: Sequence[Settings], sizes: Sequence[int], seconds: float) -> Rounds:
    """On each rank.

    Args:
        choices: What has turns in each round, in this order.
        sizes: In bytes.
        seconds: For all rounds.
    """
    rounds: Rounds = []
    progress = Progress(pydist.rank() == 0)
    end_s = time.perf_counter() + seconds
    more = True
    while more:
        progress.detail(f"round {len(rounds) + 1}")
        rounds.append([])
        for settings in choices:
            # Limits are read when a job is joined.
            pydist.shutdown()
            pydist.init("native", config={"engine": settings})
            _time_all_reduce(sizes[-1])  # the first calls touch memory that is new
            rounds[-1].append([_time_all_reduce(size) for size in sizes])
        more = len(rounds) < _LEAST_ROUNDS or time.perf_counter() < end_s
        more = bool(_of_slowest(float(more)))
    progress.clear()
    pydist.shutdown()
    pydist.init()
    return rounds


def _of_slowest(value: float) -> float:
    told = torch.tensor(value, dtype=torch.float64)
    pydist.all_reduce(told, op="max")
    return told.item()


def _time_all_reduce(size_bytes: int) -> float:
    tensor = torch.zeros(size_bytes // 4)
    calls = _LEAST_CALLS
    for _ in range(2):  # first, to learn how many calls fill a turn
        pydist.barrier()
        start_s = time.perf_counter()
        for _ in range(calls):
            pydist.all_reduce(tensor)
        taken_s = _of_slowest((time.perf_counter() - start_s) / calls)
        calls = max(_LEAST_CALLS, int(_TURN_S / taken_s))
    return taken_s


def compare(choices: Sequence[Settings], rounds: Rounds) -> list[Compared]:
    """What each choice but the first took, over what the first took.

    Args:
        choices: As for the ranks; the first one is what the others are compared with.
        rounds: What they measured.
    """
    found = []
    for index, settings in enumerate(choices[1:], 1):
        pairs = [(turns[index], turns[0]) for turns in rounds]
        means = [
            math.exp(math.fsum(math.log(a / b) for a, b in zip(own, base, strict=True)) / len(own))
            for own, base in pairs
        ]
        by_size = [
            ratio_of([own[i] for own, _ in pairs], [base[i] for _, base in pairs])
            for i in range(len(pairs[0][0]))
        ]
        found.append(Compared(settings, ratio_of(means, [1.0] * len(means)), by_size))
    return found


def best(compared: Sequence[Compared]) -> Compared | None:
    """The fastest choice, if it is faster than what it was compared with; otherwise None."""
    faster = [each for each in compared if each.ratio.high < 1]
    return min(faster, key=lambda each: each.ratio.median, default=None)


def tune(
    names: Sequence[str],
    measure: Callable[[list[Settings], str], list[Compared]],
    note: Callable[[str, list[Compared]], None],
) -> tuple[Settings, Ratio | None]:
    """Finds the best value of one variable after the other, each with those before it.

    Args:
        names: Of `CANDIDATES`.
        measure: Compares choices with the first of them, saying what for.
        note: Is told what was found for a variable.

    Returns:
        What is faster than what is set anyway, and its time over that; nothing, and None, where
        nothing is.
    """
    taken: Settings = {}
    for name in names:
        if name == "rounds_bytes" and taken.get("rounds_from") == NEVER:
            continue
        most = taken.get("chunk_bytes", math.inf) if name == "one_shot_bytes" else math.inf
        values = [value for value in CANDIDATES[name] if value <= most]
        compared = measure([taken, *({**taken, name: value} for value in values)], name)
        note(name, compared)
        if (found := best(compared)) is not None:
            taken = found.settings
    if not taken:
        return {}, None
    compared = measure([{}, taken], "all together")
    note("all together", compared)
    return (taken, compared[0].ratio) if best(compared) else ({}, None)


def _as_toml(settings: Settings, ratio: Ratio | None, job: Job, hosts: int) -> str:
    where = f"{job.ranks} ranks on {hosts} host{'s' if hosts > 1 else ''}"
    lines = [f"# By `pydist bench tune`: {where}, {machine.describe().hardware}"]
    if ratio is None:
        lines.append("# Nothing is faster than what is set anyway.")
    else:
        lines.append(f"# all_reduce takes {ratio} times what it takes without these.")
    return "\n".join([*lines, "[engine]", *(f"{n} = {v}" for n, v in settings.items()), ""])


def _show_variable(name: str, compared: Sequence[Compared], sizes: Sequence[int]) -> None:
    table = subcommand.make_table(
        f"{name}: time over that without it", ["value"], ["all", *map(size_text, sizes)]
    )
    for each in compared:
        value = each.settings.get(name)
        text = " ".join(f"{k}={v}" for k, v in each.settings.items()) if value is None else value
        ratios = [f"{ratio.median:.2f}" for ratio in each.by_size]
        table.add_row(str(text), str(each.ratio), *ratios)
    Console(width=150).print(table)


def main(options: argparse.Namespace) -> int:
    """Runs `pydist bench tune`.

    Returns:
        The exit status: 0, or 130 after Ctrl-C.

    Raises:
        InvalidUsage: the flags ask for something impossible; nothing has been measured.
    """
    first, last = parse_size(options.minbytes), parse_size(options.maxbytes)
    if first < 4:
        raise InvalidUsage(f"-b {first}: all_reduce of float32 needs 4 bytes or more.")
    sizes = sweep(first, last, 4.0, None)
    job = find_job(options.ranks, pins=options.pin)
    if job.ranks == 1:
        raise InvalidUsage("one rank exchanges nothing that could be tuned: use -p 2 or more.")
    subcommand.check_outputs(options)
    if options.output is not None:
        require_writable(options.output)
    results: dict[str, Any] = {}
    tables: dict[str, list[Compared]] = {}
    progress = Progress(job.leads)

    def in_turns(choices: list[Settings], what: str) -> list[Compared]:
        progress.phase(what)
        return compare(choices, job.run(_measure, choices, sizes, options.seconds)[0])

    def note(name: str, compared: list[Compared]) -> None:
        tables[name] = compared
        results[name] = [asdict(each) for each in compared]

    def measure() -> None:
        hosts = job.run(_count_hosts)[0]
        names = [name for name in CANDIDATES if hosts >= _LEAST_HOSTS.get(name, 1)]
        if job.ranks != hosts:
            names = [name for name in names if name != "rounds_bytes"]  # no data goes in rounds
        settings, ratio = tune(names, in_turns, note)
        results["engine"] = settings
        results["toml"] = _as_toml(settings, ratio, job, hosts)
        if job.leads and options.output is not None:
            write_text_whole(options.output, results["toml"])

    def show() -> None:
        for name, compared in tables.items():
            _show_variable(name, compared, sizes)
        print(results.get("toml", ""), end="")

    return subcommand.measure_and_report(
        "tune",
        options,
        {"ranks": job.ranks, "sizes": sizes},
        results,
        measure,
        show,
        leads=job.leads,
    )
