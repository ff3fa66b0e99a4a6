"""What the commands of `pydist bench` that train or start up share: flags, header, outcome."""

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from pydist.benchmarks import machine
from pydist.benchmarks.interruption import INTERRUPTED, ignore_interruptions
from pydist.benchmarks.noise import Ratio
from pydist.benchmarks.outputs import json_text, require_writable, write_text_whole
from pydist.benchmarks.steps.models import MODELS
from pydist.errors import InvalidUsage


def add_output_arguments(parser: argparse.ArgumentParser, seconds: float, each: str) -> None:
    """Adds the flags of all commands but for the number of ranks."""
    parser.add_argument(
        "--seconds",
        type=float,
        default=seconds,
        metavar="S",
        help=f"time for each {each} (default: {seconds:g})",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, too")
    parser.add_argument(
        "--no-pin",
        dest="pin",
        action="store_false",
        help="leave it to the system where ranks run (default: each on a core of its own)",
    )


def add_ranks_argument(parser: argparse.ArgumentParser) -> None:
    """Adds `-p`."""
    parser.add_argument(
        "-p",
        "--ranks",
        type=int,
        metavar="N",
        help="how many (default: 2, or as many as a launcher has started)",
    )


def add_models_argument(parser: argparse.ArgumentParser, default: Sequence[str]) -> None:
    """Adds `--models`."""
    parser.add_argument(
        "--models",
        nargs="+",
        default=list(default),
        metavar="NAME",
        help=f"some of {', '.join(MODELS)} (default: {' '.join(default)})",
    )


def chosen_models(names: Sequence[str]) -> list[str]:
    """The models asked for, each once.

    Raises:
        InvalidUsage: there is no such model.
    """
    for name in names:
        if name not in MODELS:
            raise InvalidUsage(f"no model '{name}'; use some of: {', '.join(MODELS)}.")
    return list(dict.fromkeys(names))


def check_outputs(options: argparse.Namespace) -> None:
    """Refuses what can't be done before anything is measured.

    Raises:
        InvalidUsage: the time is no time, or the file can't be written.
    """
    if not (options.seconds > 0 and math.isfinite(options.seconds)):
        raise InvalidUsage(f"--seconds {options.seconds:g} is not valid; use more than 0.")
    if options.json is not None:
        require_writable(options.json)


def make_table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    """A table without rows; columns that are aligned to the left come first."""
    table = Table(title=title)
    for column in left:
        table.add_column(column)
    for column in right:
        table.add_column(column, justify="right")
    return table


def ratio_text(plain: dict[str, float] | None) -> str:
    """A ratio that was made plain for JSON, for a table."""
    return "-" if plain is None else str(Ratio(**plain))


def print_warnings(results: dict[str, Any], what: str = "") -> None:
    """Prints the warnings of each result under its name, with what such names are behind it."""
    for name, result in results.items():
        for warning in result["warnings"]:
            print(f"warning: {name}{what}: {warning}")


def measure_and_report(
    command: str,
    options: argparse.Namespace,
    settings: dict[str, Any],
    results: dict[str, Any],
    measure: Callable[[], None],
    show: Callable[[], None],
    *,
    leads: bool,
) -> int:
    """Measures, and reports what there is, however measuring ended.

    Args:
        command: its name, for the file.
        options: the flags of `add_output_arguments`.
        settings: what else the results depend on beside the machine.
        results: what `measure` fills as it goes on, so that what is there outlives an interruption.
        measure: measures.
        show: prints the results.
        leads: whether this process is the one that says something.

    Returns:
        The exit status: 0, or 130 after Ctrl-C. What `measure` raises otherwise is raised again,
        once what there is has been reported.
    """
    host = machine.describe()
    if leads:
        print(host, flush=True)
    is_complete = False
    try:
        measure()
        is_complete = True
    except KeyboardInterrupt:
        ignore_interruptions()
        return INTERRUPTED
    finally:
        if leads:
            if not is_complete:
                print("Not everything was measured; this is what there is.")
            show()
            if options.json is not None:
                report = {
                    "command": command,
                    "complete": is_complete,
                    "machine": host.to_dict(),
                    "settings": {**settings, "seconds": options.seconds, "pin": options.pin},
                    "results": results,
                }
                write_text_whole(options.json, json_text(report))
    return 0
