"""What plain TCP does between two hosts: python bench/hosts/raw_streams.py

The hosts are network namespaces of this machine, so this is the bound of a transport over TCP here:
streams over one or several sockets, one way and both ways at once, with and without a sum of the
floats that arrive, and round trips of 8 bytes by waiters that poll or sleep. One thread a side,
each on a core of its own, does it (streams.c). Cases take turns, round by round; a ratio is the
median of the rounds' ratios, with the interval that holds it in 95 % of a bootstrap.

Needs root, iproute2 and a C compiler (`CC`, by default cc).
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import statistics
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

from on_hosts import (
    BUILD,
    Hosts,
    add_arguments,
    check_output,
    failing_in_one_line,
    make_hosts,
    network_of,
    print_header,
    stop,
)
from rich.console import Console
from rich.table import Table

from pydist.benchmarks import machine
from pydist.benchmarks.noise import Ratio, ratio_of
from pydist.benchmarks.outputs import json_text, write_text_whole

SOURCE = Path(__file__).with_name("streams.c")
HEADER = Path(__file__).with_name("uring.h")
TITLES = {
    "one-way": "one way",
    "one-way-summed": "one way, summed",
    "both-ways": "both ways",
    "both-ways-summed": "both ways, summed",
}
LATENCIES = ("polling", "blocking", "epoll", "io_uring")

# Of each case, seconds of one round after the other.
Times = dict[tuple[str, int], list[float]]


def compile_program() -> Path:
    """The program of streams.c, compiled again where that has changed."""
    program = BUILD / "streams"
    changed = max(source.stat().st_mtime for source in (SOURCE, HEADER))
    if program.exists() and program.stat().st_mtime >= changed:
        return program
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if not compiler or shutil.which(compiler[0]) is None:
        stop("no C compiler is found; install one, or name it in CC", status=2)
    BUILD.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [*compiler, "-std=c11", "-O3", "-march=native", str(SOURCE), "-o", str(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        stop(f"{SOURCE.name} cannot be compiled: {done.stderr.strip()}")
    return program


def measure(
    hosts: Hosts, program: Path, *, mib: int, rounds: int, sockets: str, timeout: float
) -> Times:
    """Runs both sides of the program.

    Args:
        hosts: The first two.
        program: Of `compile_program`.
        mib: A direction.
        rounds: Of all cases.
        sockets: How many, numbers with commas between.
        timeout: Seconds, of each side.
    """
    rest = [str(mib), str(rounds), sockets]
    listen = [str(program), "listen", hosts[1].address, str(machine.cpu_of(1)), *rest]
    with hosts[1].popen(listen, stdout=subprocess.PIPE, text=True) as listener:
        assert listener.stdout is not None
        words = listener.stdout.readline().split()
        if len(words) != 2:
            stop("the listening side has ended before it listened")
        connect = [str(program), "connect", hosts[1].address, words[1], str(machine.cpu_of(0))]
        done = hosts[0].run([*connect, *rest], timeout=timeout)
        if done.returncode != 0:
            listener.kill()
            stop(f"the connecting side has failed: {done.stderr.strip()}")
        if listener.wait(timeout) != 0:
            stop(f"the listening side has failed with status {listener.returncode}")
    times: Times = {}
    for line in done.stdout.splitlines():
        name, sockets, seconds = line.split()
        times.setdefault((name, int(sockets)), []).append(float(seconds))
    return times


def ratios_of(times: Times) -> dict[str, Ratio]:
    """How many times as long the one takes as the other, for each pair that says something."""
    counts = sorted({sockets for name, sockets in times if name == "one-way"})
    found = {}
    for count in counts:
        for name, other in (
            ("one-way-summed", "one-way"),
            ("both-ways", "one-way"),
            ("both-ways-summed", "both-ways"),
        ):
            text = f"{TITLES[name]} / {TITLES[other]}, sockets: {count}"
            found[text] = ratio_of(times[name, count], times[other, count])
    for count in counts[1:]:
        for name in ("one-way", "both-ways-summed"):
            text = f"{TITLES[name]}, sockets: {count} / {counts[0]}"
            found[text] = ratio_of(times[name, count], times[name, counts[0]])
    for name, other in (("blocking", "polling"), ("epoll", "polling"), ("io_uring", "epoll")):
        if (name, 1) in times:
            text = f"round trips, {name} / {other}"
            found[text] = ratio_of(times[name, 1], times[other, 1])
    return found


def gigabits(mib: int, seconds: float) -> float:
    return mib * (1 << 20) * 8 / seconds / 1e9


def show(console: Console, times: Times, ratios: dict[str, Ratio], mib: int) -> None:
    counts = sorted({sockets for name, sockets in times if name == "one-way"})
    table = Table(title=f"{mib} MiB a direction: Gbit/s in each direction, medians")
    table.add_column("sockets", justify="right")
    for title in TITLES.values():
        table.add_column(title, justify="right")
    for count in counts:
        medians = [statistics.median(times[name, count]) for name in TITLES]
        table.add_row(str(count), *(f"{gigabits(mib, each):.2f}" for each in medians))
    console.print(table)
    table = Table(title="8 bytes: half of a round trip, medians")
    there = [name for name in LATENCIES if (name, 1) in times]
    for name in there:
        table.add_column(f"{name}, µs", justify="right")
    table.add_row(*(f"{statistics.median(times[name, 1]) * 1e6:.1f}" for name in there))
    console.print(table)
    table = Table(title="ratios of times")
    for column in ("time of / by that of", "ratio"):
        table.add_column(column, justify="right" if column == "ratio" else "left")
    for text, ratio in ratios.items():
        table.add_row(text, str(ratio))
    console.print(table)


def report(args: argparse.Namespace, times: Times, ratios: dict[str, Ratio]) -> dict[str, Any]:
    return {
        "machine": machine.describe().to_dict(),
        "network": network_of(args),
        "mib": args.mib,
        "times_s": [
            {"case": name, "sockets": sockets, "rounds": rounds}
            for (name, sockets), rounds in times.items()
        ],
        "ratios": {text: asdict(ratio) for text, ratio in ratios.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sockets", default="1,2,4", help="how many; default: 1,2,4")
    parser.add_argument("--mib", type=int, default=64, help="a direction; default: 64")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--timeout", type=float, default=600, help="s, of everything")
    add_arguments(parser)
    args = parser.parse_args()
    counts = args.sockets.split(",")
    if not all(each.isdigit() and 1 <= int(each) <= 64 for each in counts):
        parser.error(f"--sockets {args.sockets}: write numbers from 1 to 64, with commas between")
    if args.mib < 1 or args.rounds < 1:
        parser.error("--mib and --rounds must be 1 or more")
    check_output(args)
    program = compile_program()
    console = Console(width=110)
    print_header(console, args, 2)
    with failing_in_one_line(), make_hosts(args) as hosts:
        if args.rate:
            hosts.shape(args.rate)
        times = measure(
            hosts,
            program,
            mib=args.mib,
            rounds=args.rounds,
            sockets=args.sockets,
            timeout=args.timeout,
        )
    ratios = ratios_of(times)
    show(console, times, ratios, args.mib)
    if args.json:
        write_text_whole(args.json, json_text(report(args, times, ratios)))


if __name__ == "__main__":
    main()
