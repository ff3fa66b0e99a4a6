"""`pydist bench step`: a training step of pydist.DataParallel beside torch's DDP.

Three parts: times of steps, in turns within the same processes (`step_times`); the memory that each
arm takes, in processes of its own (`memory`); and from starting the processes to the end of the
first step, in turns (`fresh_job`). Under a launcher the ranks are its, and only steps are measured:
the other two parts start processes of their own.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from pydist.benchmarks import subcommand
from pydist.benchmarks.noise import ratio_of
from pydist.benchmarks.processes.fresh_job import step_job
from pydist.benchmarks.processes.job import Job, find_job
from pydist.benchmarks.progress import Progress
from pydist.benchmarks.steps import ddp_knobs, step_times
from pydist.benchmarks.steps.memory import engine_share, measure_memory
from pydist.benchmarks.steps.models import DEFAULT_MODELS, MODELS
from pydist.errors import InvalidUsage

ALONE, OURS, DDP = step_times.ALONE, step_times.OURS, ddp_knobs.DEFAULT
PARTS = ("times", "memory", "startup")

_LEAST_STARTS = 3
_WIDTH = 150


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `pydist bench step`."""
    subcommand.add_ranks_argument(parser)
    subcommand.add_models_argument(parser, DEFAULT_MODELS)
    parser.add_argument(
        "--parts",
        nargs="+",
        default=None,
        metavar="PART",
        help=f"what is measured: {', '.join(PARTS)} (default: all; under a launcher: times)",
    )
    subcommand.add_output_arguments(parser, 30.0, "model and part (but memory)")


def _chosen_parts(parts: Sequence[str] | None, job: Job) -> list[str]:
    if parts is None:
        return ["times"] if job.is_launched else list(PARTS)
    for part in parts:
        if part not in PARTS:
            raise InvalidUsage(f"no part '{part}'; use some of: {', '.join(PARTS)}.")
    if job.is_launched and set(parts) != {"times"}:
        raise InvalidUsage(
            "memory and startup are measured in processes of their own: run them without a "
            "launcher, or use --parts times."
        )
    return [part for part in PARTS if part in parts]


def _measure_times(
    result: dict[str, Any], name: str, job: Job, seconds: float, journal: Path
) -> None:
    try:
        job.run(step_times.run_rounds, name, seconds, str(journal))
    finally:
        if job.leads and (rounds := step_times.read_rounds(journal)):
            result["times"] = step_times.summarize(rounds)


def _measure_memory(result: dict[str, Any], name: str, job: Job, progress: Progress) -> None:
    best = result.get("times", {}).get("best_ddp", DDP)
    tuned = ddp_knobs.USUAL_BEST if best == DDP else best
    arms = result.setdefault("memory", {})
    for arm in (ALONE, OURS, DDP, tuned):
        progress.phase(f"{name}: memory, {arm}")
        arms[arm] = measure_memory(name, arm, job.ranks, pins=job.pins)
    if not MODELS[name].is_sparse:
        result["engine_memory"] = engine_share(arms[ALONE], arms[OURS], job.ranks)


def _measure_startup(
    result: dict[str, Any], name: str, job: Job, seconds: float, progress: Progress
) -> None:
    progress.phase(f"{name}: start-up")
    ours: list[float] = []
    ddp: list[float] = []
    start_s = time.monotonic()
    while len(ddp) < _LEAST_STARTS or time.monotonic() - start_s < seconds:
        ours_s, ddp_s = (
            step_job(arm, job.ranks, name, pins=job.pins).first_step_s for arm in ("pydist", "gloo")
        )
        ours.append(ours_s)
        ddp.append(ddp_s)
        result["startup"] = summarize_first_steps(ours, ddp)
        past_s = time.monotonic() - start_s
        progress.detail(f"round {len(ddp)}, {past_s:.0f} of {seconds:g} s")


def summarize_first_steps(ours: Sequence[float], ddp: Sequence[float]) -> dict[str, Any]:
    """What seconds from starting processes to the end of a first step tell, for JSON."""
    return {
        "rounds": len(ours),
        "first_step_s": {OURS: statistics.median(ours), DDP: statistics.median(ddp)},
        "pydist_over_ddp": asdict(ratio_of(ours, ddp)),
    }


def _measure(
    results: dict[str, Any], models: list[str], parts: list[str], job: Job, seconds: float
) -> None:
    progress = Progress(job.leads)
    with tempfile.TemporaryDirectory() as folder:
        for name in models:
            result = results.setdefault(name, {"title": MODELS[name].title})
            if "times" in parts:
                _measure_times(result, name, job, seconds, Path(folder) / f"{name}.jsonl")
            if "memory" in parts:
                _measure_memory(result, name, job, progress)
            if "startup" in parts:
                _measure_startup(result, name, job, seconds, progress)
    progress.clear()


def _added(added: dict[str, Any]) -> str:
    low, high = added["interval"]
    return f"{added['median']:.2f} ({low:.2f} to {high:.2f})"


def _of_part(results: dict[str, Any], part: str) -> list[tuple[str, str, Any]]:
    """Name, title and outcome of the models of which the part was measured."""
    return [
        (name, result["title"], result[part]) for name, result in results.items() if part in result
    ]


def show_times(results: dict[str, Any], ranks: int) -> None:
    """Prints what `step_times.summarize` says of models, by name.

    Args:
        results: of each model, by its name: `title`, and `times` where they were measured.
        ranks: how many trained.
    """
    measured = _of_part(results, "times")
    steps = subcommand.make_table(
        f"forward and backward, {ranks} ranks, ms (medians)",
        ["model"],
        ["rounds", ALONE, "DDP", "DDP, best", "its buckets", OURS, "pydist / DDP, best"],
    )
    adds = subcommand.make_table(
        "time that averaging adds to a step, ms (with the middle 95 %)",
        ["model"],
        [
            "DDP",
            "DDP, best",
            "pydist",
            "exposed, by stats()",
            "averaging alone",
            "pydist / DDP",
            "pydist / DDP, best",
        ],
    )
    for name, title, times in measured:
        medians, best, added = times["median_ms"], times["best_ddp"], times["added_ms"]
        averaging = times["averaging_alone_ms"]
        steps.add_row(
            title,
            str(times["rounds"]),
            *(f"{medians[arm]:.2f}" for arm in (ALONE, DDP, best)),
            best.partition(", ")[2] or "default",
            f"{medians[OURS]:.2f}",
            subcommand.ratio_text(times["step_over_best_ddp"]),
        )
        adds.add_row(
            name,
            *(_added(added[arm]) for arm in (DDP, best, OURS)),
            _added(times["exposed_ms"]),
            "-" if averaging is None else f"{averaging:.2f}",
            subcommand.ratio_text(times["added_over_ddp"]),
            subcommand.ratio_text(times["added_over_best_ddp"]),
        )
    console = Console(width=_WIDTH)
    console.print(steps)
    console.print(adds)
    subcommand.print_warnings({name: times for name, _, times in measured})


def _show_memory(results: dict[str, Any], ranks: int) -> None:
    table = subcommand.make_table(
        f"memory of {ranks} ranks together after backward, MiB",
        ["model", "arm"],
        ["gradients of a rank", "peak", "in use", "beyond alone", "engine's own, a rank"],
    )
    for name, _, arms in _of_part(results, "memory"):
        verdict = results[name].get("engine_memory")
        for arm, memory in arms.items():
            beyond = memory["in_use_mib"] - arms[ALONE]["in_use_mib"]
            is_ours = arm == OURS and verdict is not None
            table.add_row(
                name if arm == ALONE else "",
                arm,
                f"{memory['gradients_mib']:.1f}" if arm == ALONE else "",
                f"{memory['peak_mib']:.1f}",
                f"{memory['in_use_mib']:.1f}",
                "" if arm == ALONE else f"{beyond:+.1f}",
                f"{verdict['owned_mib']:.2f}, promised {verdict['promised_mib']:.1f}"
                if is_ours
                else "",
                end_section=arm == list(arms)[-1],
            )
    Console(width=_WIDTH).print(table)
    for name in _broken_promises(results):
        print(f"warning: {name}: pydist takes more memory than it promises")


def _broken_promises(results: dict[str, Any]) -> list[str]:
    return [
        name
        for name, _, verdict in _of_part(results, "engine_memory")
        if not verdict["keeps_promise"]
    ]


def _show_startup(results: dict[str, Any], ranks: int) -> None:
    table = subcommand.make_table(
        f"from starting {ranks} processes to the end of the first step, s (medians)",
        ["model"],
        ["rounds", "DDP", "pydist", "pydist / DDP"],
    )
    for name, _, startup in _of_part(results, "startup"):
        table.add_row(
            name,
            str(startup["rounds"]),
            *(f"{startup['first_step_s'][arm]:.2f}" for arm in (DDP, OURS)),
            subcommand.ratio_text(startup["pydist_over_ddp"]),
        )
    Console(width=_WIDTH).print(table)


def _show(results: dict[str, Any], ranks: int) -> None:
    for part, show in (
        ("times", show_times),
        ("memory", _show_memory),
        ("startup", _show_startup),
    ):
        if _of_part(results, part):
            show(results, ranks)


def main(options: argparse.Namespace) -> int:
    """Runs `pydist bench step`.

    Returns:
        The exit status: 0, 1 if pydist takes more memory than it promises, 130 after Ctrl-C.

    Raises:
        InvalidUsage: the flags ask for something impossible; nothing has been measured.
    """
    models = subcommand.chosen_models(options.models)
    job = find_job(options.ranks, pins=options.pin)
    parts = _chosen_parts(options.parts, job)
    subcommand.check_outputs(options)
    results: dict[str, Any] = {}
    status = subcommand.measure_and_report(
        "step",
        options,
        {"ranks": job.ranks, "models": models, "parts": parts},
        results,
        lambda: _measure(results, models, parts, job, options.seconds),
        lambda: _show(results, job.ranks),
        leads=job.leads,
    )
    return status or int(bool(_broken_promises(results)))
