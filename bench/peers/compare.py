"""The engine's collectives in C++ beside an MPI's in C: python bench/peers/compare.py

Sizes take turns, and at each size the programs: bench_engine, then the C program of each library,
each started anew. So what the machine does for some seconds falls on all of them alike. A ratio is
the median, over the rounds, of the library's time by the engine's of the same round; its interval
is the middle 95 % of a bootstrap over the rounds. Above 1 the engine is faster. The library's time
is that of its better arm (in place or out of place); the engine's is in place (all_to_all: out of
place), on ordinary and on symmetric memory.

A hypervisor may move a machine's cores together and apart, for seconds or minutes: then the same
calls take up to twice as long. So before, between and after the programs of a size it is measured
how far the cores are from each other. A size at which they were moved is measured once more, and
there is a table for each of the two states that were met; what was moved at every try does not
count.

Before: python bench/peers/install.py, and bench_engine built (CMake's PYDIST_BUILD_BENCH=ON).
"""

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from peer_programs import FOLDER, PROGRAM, ROOT, stop
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pydist.benchmarks import machine
from pydist.benchmarks.noise import Ratio, are_of_two_places, ratio_of
from pydist.benchmarks.outputs import json_text, require_writable, write_text_whole
from pydist.benchmarks.processes.peers import PEERS, Installation
from pydist.benchmarks.sizes import size_text
from pydist.errors import InvalidUsage

ENGINE = "engine"
ENGINE_ARMS = ("ordinary", "symmetric")
PEER_ARMS = ("in place", "out of place")
KINDS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")
ELEMENT_BYTES = 4  # of a float32
# An interval wider than this, relative to its ratio, says more about the machine than about the
# libraries.
NOISY = 0.5
# Of which an interval means something.
FEWEST_ROUNDS = 5


@dataclass
class Program:
    """Prints a line a size: bytes, then a time in µs for each arm, then what is not read."""

    title: str
    # Before and after the kind.
    command: list[str]
    arguments: list[str]
    arms: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    times: dict[str, dict[int, dict[str, list[float]]]] = field(default_factory=dict)
    """Of each kind, size and arm, a round after the other."""

    def run(self, kind: str, size: int, seconds: float, timeout_s: float) -> dict[str, float]:
        """The time of each arm."""
        measure = [kind, *self.arguments, str(size), str(size), str(seconds)]
        try:
            result = subprocess.run(
                [*self.command, *measure],
                env={**os.environ, **self.environment},
                capture_output=True,
                text=True,
                check=False,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired:
            stop(f"{self.title}: not done after {timeout_s:.0f} s; a hang, or --timeout is short")
        except OSError as error:
            stop(f"{self.title} cannot be started: {error}")
        if result.returncode != 0:
            said = (result.stderr or result.stdout).strip().splitlines()
            stop(f"{self.title}: exit code {result.returncode}: {said[0] if said else 'silent'}")
        times: dict[str, float] = {}
        for line in result.stdout.splitlines():
            words = line.split()
            if line.startswith("# "):
                version = line[2:].split(", package")[0].replace("Version:", "")
                self.title = " ".join(version.split())
            elif words and words[0] == str(size):
                times = dict(zip(self.arms, map(float, words[1:]), strict=False))
        if not times:
            stop(f"{self.title}: says nothing of {size} bytes")
        return times

    def note(self, kind: str, size: int, times: dict[str, float]) -> None:
        """Keeps the times of a round."""
        arms = self.times.setdefault(kind, {}).setdefault(size, {arm: [] for arm in self.arms})
        for arm, time_us in times.items():
            arms[arm].append(time_us)


class Cores:
    """How far the cores are from each other, and what was measured when."""

    def __init__(self, engine: Path, ranks: int) -> None:
        self._command = [str(engine), "handover", str(ranks)]
        # Nanoseconds that a cache line took in each round, by kind and size.
        self.distances: dict[tuple[str, int], list[float]] = {}
        # Rounds of a size in which the cores were moved, whenever they were tried.
        self.moved = 0

    def measure_ns(self) -> float:
        try:
            done = subprocess.run(
                self._command, capture_output=True, text=True, check=True, timeout=60
            )
            return float(done.stdout)
        except subprocess.CalledProcessError as error:
            stop(f"bench_engine: exit code {error.returncode}: {error.stderr.strip()}")
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            stop(f"bench_engine handover: {error}")

    @property
    def border_ns(self) -> float | None:
        """Between the cores' two places; None where they were in one all the time."""
        seen = [each for of_case in self.distances.values() for each in of_case]
        return (min(seen) * max(seen)) ** 0.5 if are_of_two_places(seen) else None

    def rounds(self, kind: str, size: int, state: str) -> list[int]:
        """Those that met a state: "near", "apart", or "" for all."""
        border = self.border_ns
        distances = self.distances.get((kind, size), [])
        if border is None or not state:
            return list(range(len(distances)))
        return [i for i, each in enumerate(distances) if (each < border) == (state == "near")]

    @property
    def states(self) -> list[str]:
        return [""] if self.border_ns is None else ["near", "apart"]

    def describe(self, state: str) -> str:
        seen = [
            of_case[i]
            for (kind, size), of_case in self.distances.items()
            for i in self.rounds(kind, size, state)
        ]
        near = {"near": "near each other: ", "apart": "apart: "}.get(state, "")
        return f"cores {near}{min(seen):.0f} to {max(seen):.0f} ns for a cache line"


def verdict(ratio: Ratio, rounds: int) -> str:
    if rounds < FEWEST_ROUNDS:
        return "unknown"
    if ratio.low > 1:
        return "faster"
    return "slower" if ratio.high < 1 else "unclear"


STYLES = {"faster": "green", "slower": "bold red", "unclear": "yellow", "unknown": "dim"}


def ratio_text(ratio: Ratio, rounds: int) -> Text:
    return Text(str(ratio), style=STYLES[verdict(ratio, rounds)])


def is_noisy(ratio: Ratio) -> bool:
    return ratio.high - ratio.low > NOISY * ratio.median


def compare(
    engine: Program, peer: Program, kind: str, rounds_of: Callable[[str, int], list[int]]
) -> dict[int, dict[str, Any]]:
    """By size: the peer's better arm, the medians in µs, the ratios to the engine's arms."""
    rows = {}
    for size, own_times in engine.times.get(kind, {}).items():
        rounds = rounds_of(kind, size)
        if not rounds:
            continue
        own = {arm: [own_times[arm][i] for i in rounds] for arm in engine.arms}
        peers = {arm: [peer.times[kind][size][arm][i] for i in rounds] for arm in peer.arms}
        best = min(peers, key=lambda arm: statistics.median(peers[arm]))
        rows[size] = {
            "arm": best,
            "rounds": len(rounds),
            "peer_us": statistics.median(peers[best]),
            "engine_us": {arm: statistics.median(times) for arm, times in own.items()},
            "ratio": {arm: ratio_of(peers[best], times) for arm, times in own.items()},
        }
    return rows


def show(console: Console, title: str, rows: dict[int, dict[str, Any]]) -> None:
    table = Table(title=f"{title} beside the engine; a ratio above 1: the engine is faster")
    columns = (
        "bytes",
        "rounds",
        "its µs",
        "its arm",
        "ordinary µs",
        "ratio",
        "symmetric µs",
        "ratio",
    )
    for column in columns:
        table.add_column(column, justify="left" if column == "its arm" else "right")
    for size, row in rows.items():
        table.add_row(
            size_text(size),
            str(row["rounds"]),
            f"{row['peer_us']:.2f}",
            row["arm"],
            *(
                cell
                for own in ENGINE_ARMS
                for cell in (
                    f"{row['engine_us'][own]:.2f}",
                    ratio_text(row["ratio"][own], row["rounds"]),
                )
            ),
        )
    console.print(table)
    for own in ENGINE_ARMS:
        for word, said in (("slower", "is slower"), ("unclear", "may be as fast or slower")):
            sizes = [
                size_text(size)
                for size, row in rows.items()
                if verdict(row["ratio"][own], row["rounds"]) == word
            ]
            if sizes:
                console.print(f"The engine on {own} memory {said} at {', '.join(sizes)}.")
    few = [size_text(size) for size, row in rows.items() if row["rounds"] < FEWEST_ROUNDS]
    if few:
        console.print(f"Too few rounds to tell who is faster at {', '.join(few)}.")
    noisy = [size_text(s) for s, r in rows.items() if any(map(is_noisy, r["ratio"].values()))]
    if noisy:
        console.print(
            f"[yellow]Warning:[/] too noisy to say how much at {', '.join(noisy)}: the interval is "
            f"wider than {NOISY:.0%} of the ratio. Use an idle machine or more --rounds."
        )


def as_json(rows: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return {
        size: {**row, "ratio": {own: asdict(ratio) for own, ratio in row["ratio"].items()}}
        for size, row in rows.items()
    }


def find_engine() -> Path:
    engine = ROOT / "build" / "bench" / "bench" / "bench_engine"
    if not engine.exists():
        stop(
            "bench_engine is not built: cmake -S . -B build/bench -DPYDIST_BUILD_PYTHON=OFF "
            "-DPYDIST_BUILD_BENCH=ON && cmake --build build/bench --target bench_engine",
            status=2,
        )
    return engine


def make_programs(args: argparse.Namespace) -> dict[str, Program]:
    engine = args.engine or find_engine()
    programs = {ENGINE: Program("engine", [str(engine)], [str(args.ranks)], ENGINE_ARMS)}
    for name in args.peers or [name for name in PEERS if (args.folder / name).exists()]:
        installation = Installation(name, args.folder.resolve() / name)
        program = installation.folder / "bin" / PROGRAM
        if not program.exists():
            stop(f"{program} is missing: python bench/peers/install.py {name}", status=2)
        programs[name] = Program(
            installation.peer.title,
            [*installation.command(args.ranks), str(program)],
            [],
            PEER_ARMS,
            installation.variables,
        )
    if len(programs) == 1:
        stop("no MPI library is installed: python bench/peers/install.py", status=2)
    return programs


def sizes_of(kind: str, args: argparse.Namespace) -> list[int]:
    """Powers of 2, of which each rank's block has an element at least."""
    blocks = 1 if kind in ("all_reduce", "broadcast") else args.ranks
    size = args.smallest
    sizes = []
    while size <= args.largest:
        if size >= ELEMENT_BYTES * blocks:
            sizes.append(size)
        size *= args.factor
    return sizes


def measure_case(
    turns: Sequence[Program], cores: Cores, kind: str, size: int, args: argparse.Namespace
) -> None:
    """A turn of each program, once more where the cores were moved meanwhile."""
    for _ in range(1 + args.retries):
        distances = [cores.measure_ns()]
        times = []
        for program in turns:
            times.append(program.run(kind, size, args.seconds, args.timeout))
            distances.append(cores.measure_ns())
        if not are_of_two_places(distances):
            break
    else:
        cores.moved += 1
        return
    cores.distances.setdefault((kind, size), []).append(statistics.median(distances))
    for program, of_program in zip(turns, times, strict=True):
        program.note(kind, size, of_program)


def number(least: float, kind: Callable[[str], float]) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = kind(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least:g}")
        return value

    parse.__name__ = kind.__name__
    return parse


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("peers", nargs="*", metavar="NAME", help="by default all installed ones")
    parser.add_argument("-p", "--ranks", type=number(2, int), default=2)
    parser.add_argument("--kinds", default=",".join(KINDS), help="with commas between them")
    parser.add_argument("--smallest", type=number(8, int), default=8, help="bytes")
    parser.add_argument("--largest", type=number(8, int), default=256 << 20, help="bytes")
    parser.add_argument("-f", "--factor", type=number(2, int), default=4, help="from size to size")
    parser.add_argument("--seconds", type=number(0, float), default=0.2, help="a size and program")
    parser.add_argument("--rounds", type=number(1, int), default=7)
    parser.add_argument(
        "--retries", type=number(0, int), default=4, help="of a size at which the cores moved"
    )
    parser.add_argument("--timeout", type=number(1, float), default=60, help="s, of a program")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="that install.py filled")
    parser.add_argument("--engine", type=Path, help="bench_engine; build/bench's by default")
    parser.add_argument("--json", type=Path, help="write all times and ratios there, too")
    args = parser.parse_args()
    for name in args.peers:
        if name not in PEERS:
            parser.error(f"no such library: {name} (there are {', '.join(PEERS)})")
    kinds = args.kinds.split(",")
    for kind in kinds:
        if kind not in KINDS:
            parser.error(f"no such kind: {kind!r} (there are {', '.join(KINDS)})")
        if not sizes_of(kind, args):
            parser.error(f"{kind} has no size of {args.smallest} to {args.largest} bytes")
    programs = make_programs(args)
    cores = Cores(args.engine or find_engine(), args.ranks)
    if args.json:
        try:
            require_writable(args.json)
        except InvalidUsage as error:
            stop(str(error), status=2)
    header = f"{machine.describe()}\n{args.ranks} ranks, float32"
    console = Console(width=130)
    console.print(header, highlight=False)
    # The programs take the n-th of the CPUs that they may use: leave them one of each core.
    os.sched_setaffinity(0, {machine.cpu_of(rank) for rank in range(args.ranks)})
    cases = [(kind, size) for kind in kinds for size in sizes_of(kind, args)]
    for turn in range(args.rounds):
        print(f"round {turn + 1} of {args.rounds}", file=sys.stderr)
        for index, (kind, size) in enumerate(cases):
            # There and back, so that no program always comes after the same other one.
            turns = list(programs.values())
            if (turn + index) % 2:
                turns.reverse()
            measure_case(turns, cores, kind, size, args)
    engine = programs.pop(ENGINE)
    results = {
        (state, kind): {
            name: compare(engine, program, kind, partial(cores.rounds, state=state))
            for name, program in programs.items()
        }
        for state in cores.states
        for kind in kinds
    }
    for (state, kind), peers in results.items():
        for name, rows in peers.items():
            if rows:
                show(console, f"{kind}, {cores.describe(state)}: {programs[name].title}", rows)
    if cores.moved:
        console.print(
            f"[yellow]Warning:[/] {cores.moved} rounds of a size don't count: the cores were moved "
            "each time."
        )
    if args.json:
        written = {
            "hardware": header,
            "engine": engine.times,
            "core_to_core_ns": {
                kind: {size: cores.distances.get((kind, size)) for size in sizes_of(kind, args)}
                for kind in kinds
            },
            "peers": {
                name: {
                    "version": program.title,
                    "times_us": program.times,
                    "states": {
                        state or "all": {
                            kind: as_json(results[state, kind][name]) for kind in kinds
                        }
                        for state in cores.states
                    },
                }
                for name, program in programs.items()
            },
        }
        write_text_whole(args.json, json_text(written))


if __name__ == "__main__":
    main()
