"""Whether `pydist bench` says what a script of a few lines says: python bench/agreement.py

Both run in turns as whole programs. The times of a program differ from run to run (by where its
memory happens to lie, for one), so they agree where their ratio's interval meets that of what the
script's own runs differ by.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pydist.benchmarks import machine
from pydist.benchmarks.noise import percentile, ratio_of
from pydist.benchmarks.sizes import size_text

PYDIST = [sys.executable, "-m", "pydist"]
SCRIPT = Path(__file__).with_name("independent.py")
SIZES = (8, 16 << 10, 1 << 20, 16 << 20)
Times = dict[tuple[str, int], float]


def of_script() -> Times:
    command = [*PYDIST, "run", "-n", "2", str(SCRIPT)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    lines = [line.split() for line in printed.splitlines()]
    return {(arm, int(size)): float(time_us) for arm, size, time_us in lines}


def of_pydist_bench(seconds: float) -> Times:
    times: Times = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.json"
        for size in SIZES:
            flags = ["-b", str(size), "-e", str(size), "--seconds", str(seconds)]
            command = [*PYDIST, "bench", "all_reduce", "-p", "2", *flags, "--compare", "gloo"]
            subprocess.run([*command, "-J", str(file)], check=True, capture_output=True)
            for row in json.loads(file.read_text())["rows"]:
                if row["place"] == "in" and row["arm"] in ("pydist", "gloo"):
                    times[row["arm"], size] = row["time_us"]
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=1.0, help="of pydist bench, a size")
    args = parser.parse_args()
    print(machine.describe())
    # The script takes the n-th of the CPUs that it may use: leave it one of each core.
    os.sched_setaffinity(0, {machine.cpu_of(rank) for rank in range(2)})
    script: list[Times] = []
    ours: list[Times] = []
    for turn in range(args.rounds):
        print(f"round {turn + 1} of {args.rounds}", file=sys.stderr)
        script.append(of_script())
        ours.append(of_pydist_bench(args.seconds))
    apart: list[str] = []
    table = Table(title="time of all_reduce: pydist bench / bench/independent.py")
    for column in ("size", "arm", "ratio", "the script's next run / this one"):
        table.add_column(column, justify="right", no_wrap=True)
    for size in SIZES:
        for arm in ("pydist", "gloo"):
            simple = [one[arm, size] for one in script]
            ratio = ratio_of([one[arm, size] for one in ours], simple)
            steps = [after / before for before, after in pairwise(simple)]
            low, high = percentile(steps, 0.05), percentile(steps, 0.95)
            table.add_row(size_text(size), arm, str(ratio), f"{low:.2f} to {high:.2f}")
            if ratio.high < low or ratio.low > high:
                apart.append(f"{arm} at {size_text(size)}")
    Console().print(table)
    if apart:
        print(f"They disagree beyond noise: {', '.join(apart)}.")
        sys.exit(1)
    print("They agree within noise.")


if __name__ == "__main__":
    main()
