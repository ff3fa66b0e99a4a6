"""8 bytes between two hosts, beside UCX over TCP: python bench/hosts/latency.py

The hosts are network namespaces of this machine, with one rank each. In every round, UCX's
`ucx_perftest -t tag_lat` and pydist have one turn each, one after the other; the order changes from
round to round. Each turn makes the same number of calls.

- A message: half a round trip, in which a rank sends 8 bytes and waits for the 8 bytes of the
  answer. Both ways take the same time, so half of it is what a message takes one way, from
  `pydist.send` on the one rank to the end of `pydist.recv` on the other. UCX counts alike.
- all_reduce: a call with 8 bytes (two elements of float32), on the rank that takes longer. It ends
  when what the other rank has sent is there, so it can't take less than a message does.

A turn's time is the median of its single calls (of UCX, of its last 2048). A ratio is the median of
the rounds' ratios, with the interval that holds it in 95 % of a bootstrap over the rounds. Below 1
pydist is faster.

Needs root and iproute2; for UCX: python bench/peers/install.py ucx.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# First, for what it sets before torch is imported.
from on_hosts import (
    ROOT,
    add_arguments,
    check_output,
    failing_in_one_line,
    make_hosts,
    network_of,
    print_header,
    rank_environment,
    stop,
)

# isort: split
import joining
import latency_turns
import ucx_on_hosts
from latency_turns import Latencies
from ranks_on import RanksOn
from rich.console import Console
from rich.table import Table
from ucx_on_hosts import OneWay, Ucx

from pydist.benchmarks import machine
from pydist.benchmarks.noise import Ratio, ratio_of
from pydist.benchmarks.outputs import json_text, write_text_whole

SIZE_BYTES = 8


@dataclass
class Rounds:
    """What the rounds have found, one of each for every round. UCX may be left out."""

    pydist: list[Latencies] = field(default_factory=list)
    ucx: list[OneWay] = field(default_factory=list)

    def medians_s(self) -> dict[str, list[float]]:
        """The times of all rounds, by what was measured; UCX's come first."""
        found = {
            "pydist, a message": [each.message_median_s for each in self.pydist],
            "pydist, all_reduce": [each.all_reduce_median_s for each in self.pydist],
        }
        return {"UCX, a message": [each.median_s for each in self.ucx], **found}

    def beside_ucx(self) -> dict[str, Ratio]:
        """How many times as long as UCX's message each of pydist's takes."""
        reference, *names = (times := self.medians_s())
        if not times[reference]:
            return {}
        return {name: ratio_of(times[name], times[reference]) for name in names}


def measure(args: argparse.Namespace, ucx: Ucx | None, console: Console) -> Rounds:
    rounds = Rounds()
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(make_hosts(args))
        if args.rate:
            hosts.shape(args.rate)
        ranks = stack.enter_context(RanksOn(hosts, [1, 1], rank_environment(hosts)))
        backend = ranks.run(joining.join, timeout=args.timeout)[0]
        console.print(f"pydist on {backend}", highlight=False)

        def measure_ucx() -> None:
            if ucx is not None:
                rounds.ucx.append(ucx.tag_lat(hosts, SIZE_BYTES, args.calls, args.timeout))

        def measure_pydist() -> None:
            call = (latency_turns.measure, SIZE_BYTES, args.calls)
            rounds.pydist.append(ranks.run(*call, timeout=args.timeout)[0])

        turns = [measure_ucx, measure_pydist]
        for number in range(args.rounds):
            print(f"round {number + 1} of {args.rounds}", file=sys.stderr)
            for turn in turns if number % 2 == 0 else turns[::-1]:
                turn()
    return rounds


def show(console: Console, rounds: Rounds) -> None:
    table = Table(title=f"{SIZE_BYTES} bytes, medians; below 1: pydist is faster")
    table.add_column("")
    for column in ("µs", "time / UCX's of a message"):
        table.add_column(column, justify="right", no_wrap=True)
    ratios = rounds.beside_ucx()
    for name, times in rounds.medians_s().items():
        if times:
            ratio = str(ratios[name]) if name in ratios else ""
            table.add_row(name, f"{statistics.median(times) * 1e6:.1f}", ratio)
    console.print(table)


def report(args: argparse.Namespace, rounds: Rounds) -> dict[str, Any]:
    return {
        "machine": machine.describe().to_dict(),
        "network": network_of(args),
        "size_bytes": SIZE_BYTES,
        "calls": args.calls,
        "rounds": {
            "pydist": [asdict(each) for each in rounds.pydist],
            "ucx": [asdict(each) for each in rounds.ucx],
        },
        "time / UCX's of a message": {
            name: asdict(ratio) for name, ratio in rounds.beside_ucx().items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--rounds", type=int, default=15, help="of UCX and of pydist (default: 15)")
    add("--calls", type=int, default=10000, help="of each kind in a round (default: 10000)")
    add("--timeout", type=float, default=120, help="s, of each turn")
    add("--peers", type=Path, default=ROOT / "build" / "peers", help="that install.py filled")
    add("--no-ucx", action="store_true", help="without UCX")
    add_arguments(parser)
    args = parser.parse_args()
    if args.rounds < 1 or args.calls < 1:
        parser.error("--rounds and --calls must be 1 or more")
    check_output(args)
    ucx = None if args.no_ucx else ucx_on_hosts.find(args.peers)
    if ucx is None and not args.no_ucx:
        stop(
            f"UCX is not in {args.peers}; install it by: python bench/peers/install.py ucx --into "
            f"{args.peers}, or leave it out by --no-ucx",
            status=2,
        )
    console = Console(width=110)
    print_header(console, args, 2)
    with failing_in_one_line():
        rounds = measure(args, ucx, console)
    show(console, rounds)
    if 1 < args.rounds < 5:
        console.print("[yellow]Warning:[/] intervals of fewer than 5 rounds mean little.")
    if args.json:
        write_text_whole(args.json, json_text(report(args, rounds)))


if __name__ == "__main__":
    main()
