"""`pydist info --tuning`: what earlier jobs have found to be fastest here, and what there is to
choose from."""

import json
import os
from dataclasses import asdict
from typing import Any

from rich.table import Table

from pydist import _native
from pydist.benchmarks.sizes import size_text
from pydist.benchmarks.tuned import Tuned, Way, times_text, tuned_of, way_text
from pydist.cli.printing import print_whole
from pydist.config import tuning_file

__all__ = ["show_tuning"]

# From the smallest class that is tuned to sizes at which nothing changes any more.
_CLASSES = tuple(1 << power for power in range(14, 27))


def show_tuning(*, as_json: bool) -> int:
    """Prints what the file for this machine says, and the candidates under the variables as set.

    Args:
        as_json: whether to print it for programs.

    Returns:
        0.

    Raises:
        InvalidUsage: a variable is not valid.
    """
    mode = _native.read_environment().tuning
    known: list[Tuned] = []
    problem = ""
    if mode == "on":
        try:
            known = [tuned_of(each) for each in tuning_file.read()]
        except (tuning_file.Unusable, OSError) as error:
            problem = str(error)
    ranks = max(2, len(os.sched_getaffinity(0)))
    candidates = {
        size: _native.tuning_candidates("all_reduce", "ordinary", ranks, size) for size in _CLASSES
    }
    if as_json:
        print(json.dumps(_report(mode, known, problem, ranks, candidates), indent=2))
        return 0
    print_whole(f"PYDIST_TUNING={mode}: {_meaning(mode, problem, has_any=bool(known))}")
    if known:
        print_whole(_known_table(known))
    if mode != "off":
        print_whole(_candidates_table(ranks, candidates))
    return 0


def _report(
    mode: str,
    known: list[Tuned],
    problem: str,
    ranks: int,
    candidates: dict[int, list[Way]],
) -> dict[str, Any]:
    return {
        "tuning": mode,
        "file": str(tuning_file.path()),
        "problem": problem or None,
        "known": [asdict(each) for each in known],
        "candidates": [
            {"kind": "all_reduce", "ranks": ranks, "bytes": size, "ways": ways}
            for size, ways in candidates.items()
        ],
    }


def _meaning(mode: str, problem: str, *, has_any: bool) -> str:
    if mode == "off":
        return "everything goes the usual way."
    if mode == "uncached":
        return "ranks time what there is to choose from, and begin with nothing."
    if problem:
        return f"{tuning_file.path()} is not used: {problem}."
    if not has_any:
        return f"nothing has been found yet that {tuning_file.path()} would tell."
    return f"ranks begin with what {tuning_file.path()} tells."


def _known_table(known: list[Tuned]) -> Table:
    table = Table(title="\nFastest so far", title_justify="left", box=None, pad_edge=False)
    for column in ("kind", "memory", "ranks", "up to", "way", "us", "others"):
        is_number = column in ("ranks", "up to", "us")
        table.add_column(column, justify="right" if is_number else "left", no_wrap=True)
    for each in known:
        times = dict(each.times_us)
        own = times.pop(each.way, None)
        table.add_row(
            each.name,
            each.memory,
            str(each.ranks),
            size_text(each.bytes),
            way_text(each.way, each.memory),
            "" if own is None else f"{own:.4g}",
            times_text(times.items(), each.memory),
        )
    return table


def _candidates_table(ranks: int, candidates: dict[int, list[Way]]) -> Table:
    title = f"\nCandidates of all_reduce between {ranks} ranks, the usual way first"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("up to", justify="right", no_wrap=True)
    table.add_column("ways", no_wrap=True)
    for size, ways in candidates.items():
        table.add_row(size_text(size), "; ".join(way_text(way, "ordinary") for way in ways))
    return table
