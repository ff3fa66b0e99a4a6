"""`pydist bench startup`: what importing pydist takes, and joining a job, beside torch's gloo.

Every round starts a job of new processes for each arm, in turns. `import pydist` is timed on top of
`import torch`, within the same process. Joining (`pydist.init()`, `init_process_group("gloo")`) is
timed on the slowest rank, from where all ranks have imported everything; the store that they meet
at is there, as torchrun's agent has it.
"""

import argparse
import statistics
import time
from dataclasses import asdict
from typing import Any

from rich.console import Console

from pydist.benchmarks import subcommand
from pydist.benchmarks.noise import is_noisy, ratio_of
from pydist.benchmarks.processes.fresh_job import FreshJob, join_job
from pydist.benchmarks.processes.job import require_room
from pydist.benchmarks.progress import Progress
from pydist.errors import InvalidUsage
from pydist.job.launchers import read_placement

_ARMS = ("pydist", "gloo")
_LEAST_ROUNDS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `pydist bench startup`."""
    parser.add_argument(
        "-p",
        "--ranks",
        type=int,
        nargs="+",
        default=[1, 2, 4],
        metavar="N",
        help="numbers of ranks (default: 1 2 4)",
    )
    subcommand.add_output_arguments(parser, 20.0, "number of ranks")


def summarize(jobs: dict[str, list[FreshJob]]) -> dict[str, Any]:
    """What the jobs tell.

    Args:
        jobs: of `pydist` and `gloo`, as many of each.

    Returns:
        For JSON. Milliseconds are medians; the intervals of ratios hold 95 %.
    """
    ours, gloo = jobs["pydist"], jobs["gloo"]
    torch_s, pydist_s = zip(*(job.import_s for job in ours), strict=True)
    join_s = {arm: [job.join_s for job in jobs[arm]] for arm in _ARMS}
    noisy = is_noisy(torch_s)
    join_ratio = ratio_of(join_s["pydist"], join_s["gloo"])
    warnings = []
    if noisy:
        warnings.append("importing torch took very different times: something else runs here")
    if not join_ratio.tells:
        warnings.append("too noisy, or too close, to tell whether pydist or gloo joins faster")
    return {
        "rounds": len(gloo),
        "import_torch_ms": statistics.median(torch_s) * 1e3,
        "import_pydist_ms": statistics.median(pydist_s) * 1e3,
        "import_pydist_over_torch": asdict(ratio_of(pydist_s, torch_s)),
        "join_ms": {arm: statistics.median(times) * 1e3 for arm, times in join_s.items()},
        "join_pydist_over_gloo": asdict(join_ratio),
        "warnings": warnings,
    }


def _measure(results: dict[str, Any], counts: list[int], seconds: float, pins: bool) -> None:
    progress = Progress()
    # The first start reads files from the disk, which no arm's time should contain.
    progress.phase("warming up")
    for arm in _ARMS:
        join_job(arm, 1, pins=pins)
    for ranks in counts:
        progress.phase(f"{ranks} ranks")
        jobs: dict[str, list[FreshJob]] = {arm: [] for arm in _ARMS}
        start_s = time.monotonic()
        while len(jobs["gloo"]) < _LEAST_ROUNDS or time.monotonic() - start_s < seconds:
            one_round = {arm: join_job(arm, ranks, pins=pins) for arm in _ARMS}
            for arm, job in one_round.items():
                jobs[arm].append(job)
            results[str(ranks)] = summarize(jobs)
            past_s = time.monotonic() - start_s
            progress.detail(f"round {len(jobs['gloo'])}, {past_s:.0f} of {seconds:g} s")
    progress.clear()


def _show(results: dict[str, Any]) -> None:
    table = subcommand.make_table(
        "starting up, ms (medians; ratios with the middle 95 %)",
        [],
        [
            *("ranks", "rounds", "import torch", "import pydist on top", "pydist / torch"),
            *("join, gloo", "join, pydist", "pydist / gloo"),
        ],
    )
    for ranks, result in results.items():
        table.add_row(
            ranks,
            str(result["rounds"]),
            f"{result['import_torch_ms']:.0f}",
            f"{result['import_pydist_ms']:.0f}",
            subcommand.ratio_text(result["import_pydist_over_torch"]),
            f"{result['join_ms']['gloo']:.1f}",
            f"{result['join_ms']['pydist']:.1f}",
            subcommand.ratio_text(result["join_pydist_over_gloo"]),
        )
    if results:
        Console(width=130).print(table)
    subcommand.print_warnings(results, " ranks")


def main(options: argparse.Namespace) -> int:
    """Runs `pydist bench startup`.

    Returns:
        The exit status: 0, or 130 after Ctrl-C.

    Raises:
        InvalidUsage: the flags ask for something impossible; nothing has been measured.
    """
    if read_placement().launcher != "no launcher":
        raise InvalidUsage("startup starts processes of its own: run it without a launcher.")
    counts = list(dict.fromkeys(options.ranks))
    for ranks in counts:
        require_room(ranks)
    subcommand.check_outputs(options)
    results: dict[str, Any] = {}
    return subcommand.measure_and_report(
        "startup",
        options,
        {"ranks": counts},
        results,
        lambda: _measure(results, counts, options.seconds, options.pin),
        lambda: _show(results),
        leads=True,
    )
