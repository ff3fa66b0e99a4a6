"""Fits the model of `pydist plan --hosts` to measured collectives, and shows what it predicts:

    python bench/hosts/fit_model.py MEASURED.json ... --link 1 --hold-out 4x2 --out fit.json

A part of the measurements is kept from the fit: every third size, and the shapes of `--hold-out`.
For those, predicted times stand beside measured ones. Exits with 1 where one of them is off by more
than `--within`. `pydist plan --fitted fit.json` uses the result.

MEASURED.json is what `bench/hosts/all_reduce.py --json` or, on one host, `pydist bench all_reduce
--json` has written, or holds

    {"measurements": [{"hosts": 2, "ranks_per_host": 1, "size_bytes": 1024, "seconds": 1e-4}, ...]}

where each may also have "collective" (all_reduce), "way" (of an all-reduce, such as "ring"; auto),
"ranks_per_core" (1) and "burst_bytes" (0).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.table import Table

from pydist.benchmarks.collective_cases import IN_PLACE
from pydist.benchmarks.outputs import require_writable, write_text_whole
from pydist.benchmarks.sizes import parse_size, size_text
from pydist.errors import InvalidUsage
from pydist.planning.cost_fit import Measurement, fit_what_shows
from pydist.planning.costs import LINK_BETA, FittedCosts, default_costs
from pydist.planning.exchange_time import Collective

# The first are fitted first, and with doubt the last are left as they are assumed. What a rank's
# processor takes for a byte is fitted only where it is asked for: on a slow link, a fit would put
# there whatever else is slow, and a plan for a fast link would take it for the limit.
LINK_NAMES = (LINK_BETA, "link.alpha_s", "link.message_s")
HOST_NAMES = ("host.alpha_s", "host.gamma_s_per_byte", "host.beta_s_per_byte")

# `pydist bench` measures ordinary tensors, unless with -R 2.
_WAYS_OF_ARMS = {"pydist": "host pipelined", "symmetric": "host symmetric"}
_INLINE_BYTES = 256


def read(path: Path) -> list[Measurement]:
    """The measurements of a file.

    Raises:
        InvalidUsage: It can't be read, or holds none.
    """
    try:
        saved = json.loads(path.read_text())
        if "measurements" in saved:
            return [Measurement(**each) for each in saved["measurements"]]
        if "sizes" in saved:
            return _of_hosts(saved)
        return _of_bench(saved)
    except OSError as error:
        raise InvalidUsage(f"{path} can't be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidUsage(f"{path} holds no measurements of collectives: {error!r}") from error


def _of_hosts(saved: dict[str, Any]) -> list[Measurement]:
    """Hosts that are namespaces of one machine, and share its cores."""
    counts = saved["ranks_per_host"]
    if len(set(counts)) != 1:
        raise InvalidUsage(f"the model has hosts with as many ranks each, and not {counts}")
    crowd = max(1.0, sum(counts) / saved["machine"]["usable_cpus"])
    return [
        Measurement(
            len(counts),
            counts[0],
            int(size),
            statistics.median(row["pydist_s"]),
            ranks_per_core=crowd,
        )
        for size, row in saved["sizes"].items()
    ]


def _of_bench(saved: dict[str, Any]) -> list[Measurement]:
    """Ranks of one host, each on a core of its own where there are as many."""
    cores = saved["machine"]["usable_cpus"]
    arms = list(saved["arms"])
    found = []
    for row in saved["rows"]:
        is_known = row["collective"] in get_args(Collective) and row["arm"] == arms[0]
        # Gradients and parameters are in place.
        is_known = is_known and row["place"] == IN_PLACE
        if not is_known or row["time_us"] is None or not row["size_bytes"]:
            continue
        way = "auto"
        if row["collective"] == "all_reduce":
            way = _WAYS_OF_ARMS.get(row["arm"], "auto")
            way = "host inline" if row["size_bytes"] <= _INLINE_BYTES else way
        found.append(
            Measurement(
                1,
                saved["ranks"],
                row["size_bytes"],
                row["time_us"] * 1e-6,
                row["collective"],
                way,
                max(1.0, saved["ranks"] / cores),
            )
        )
    return found


def divide(
    measurements: Sequence[Measurement], shapes: Sequence[str]
) -> tuple[list[Measurement], list[Measurement]]:
    """What is fitted, and what is held out: the shapes, and every third size of the others."""
    sizes = sorted({m.size_bytes for m in measurements})
    kept_from = set(sizes[1::3])
    held_out = [m for m in measurements if str(m.shape) in shapes or m.size_bytes in kept_from]
    return [m for m in measurements if m not in held_out], held_out


def default_names(measurements: Sequence[Measurement]) -> list[str]:
    """Of the numbers that such measurements are likely to show."""
    between = LINK_NAMES if any(m.hosts > 1 for m in measurements) else ()
    within = HOST_NAMES if any(m.hosts == 1 for m in measurements) else ()
    return [*between, *within]


def show(title: str, measurements: Sequence[Measurement], costs: Any) -> None:
    table = Table(title=title)
    for column in ("collective", "hosts x ranks", "size", "measured", "predicted", "error"):
        table.add_column(column, justify="left" if column == "collective" else "right")
    for m in sorted(measurements, key=lambda m: (m.collective, str(m.shape), m.size_bytes)):
        table.add_row(
            m.collective if m.way == "auto" else f"{m.collective}, {m.way}",
            str(m.shape),
            size_text(m.size_bytes),
            f"{m.seconds * 1e6:,.1f} µs",
            f"{m.predicted_s(costs) * 1e6:,.1f} µs",
            f"{m.error(costs):+.1%}",
        )
    Console().print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+", metavar="MEASURED")
    parser.add_argument("--link", type=float, default=10.0, help="Gbit/s: where the fit begins")
    parser.add_argument("--hold-out", default="", metavar="SHAPES", help="such as 4x1,2x2")
    parser.add_argument(
        "--names",
        metavar="NAMES",
        help=f"of what is fitted, such as {LINK_BETA},link.alpha_s (default: between hosts "
        f"{', '.join(LINK_NAMES)}; of one host {', '.join(HOST_NAMES)})",
    )
    parser.add_argument(
        "--burst-bytes", type=int, default=0, help="that links let pass at full speed (default: 0)"
    )
    parser.add_argument("--smallest", type=parse_size, default=0, metavar="SIZE")
    parser.add_argument("--largest", type=parse_size, default=1 << 62, metavar="SIZE")
    parser.add_argument("--within", type=float, default=0.15, help="relative (default: 0.15)")
    parser.add_argument("--about", default="", help="what was measured, for people")
    parser.add_argument("--out", type=Path, metavar="FILE", help="for pydist plan --fitted")
    args = parser.parse_args(arguments)
    if args.out is not None:
        require_writable(args.out)
    measurements = [
        each
        for path in args.files
        for each in read(path)
        if args.smallest <= each.size_bytes <= args.largest
    ]
    if args.burst_bytes:
        measurements = [replace(each, burst_bytes=args.burst_bytes) for each in measurements]
    fitted, held_out = divide(measurements, args.hold_out.split(","))
    names = args.names.split(",") if args.names else default_names(fitted)
    found, refused = fit_what_shows(fitted, default_costs(args.link), names)
    show("fitted", fitted, found.costs)
    show("held out", held_out, found.costs)
    for name, doubt in zip(found.fitted, found.doubt, strict=True):
        print(f"{name} = {found.costs.value(name):.4g} s, standard error {doubt:.0%}")
    for sentence in refused:
        print(sentence)
    worst = max((abs(m.error(found.costs)) for m in held_out), default=None)
    if args.out is not None:
        ranks = max(m.shape.ranks for m in measurements)
        about = args.about or ", ".join(str(path) for path in args.files)
        kept = FittedCosts(found.costs, found.fitted, ranks, worst, about)
        write_text_whole(args.out, kept.as_json())
    if worst is None:
        print("nothing was held out: there are fewer than two sizes")
        return 0
    print(f"held out: {len(held_out)} of {len(measurements)}, the worst is off by {worst:.1%}")
    return int(worst > args.within)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InvalidUsage as error:
        sys.exit(f"fit_model.py: {error}")
