"""`make drills`: performs every drill again and again, and writes the table of docs/failure.md.

The drills take turns, so that whatever else the machine does meets all of them. Those that wait for
a time-out wait together, a few at a time: the others have the machine for themselves. What was
measured is kept (`--results`): a run that was cut off goes on where it ended, and `--write` alone
makes the table from what is there.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "python"), str(Path(__file__).parent)]

from drills import DRILLS  # noqa: E402
from launch import warm_up  # noqa: E402
from launchers import LAUNCHER_DRILLS, RANKS  # noqa: E402
from rehearsal import rehearse, rehearse_launcher  # noqa: E402
from scene import Drill, LauncherDrill, Result  # noqa: E402

PAGE = ROOT / "docs" / "failure.md"
BEGIN = "<!-- begin: written by make drills -->\n"
END = "<!-- end -->\n"


# How many performances that mostly wait run at a time.
AT_A_TIME = 4


@dataclass(frozen=True)
class Performance:
    """A drill on a backend, with so many ranks; a launcher's on none."""

    drill: Drill | LauncherDrill
    backend: str
    size: int

    @property
    def key(self) -> str:
        return f"{self.drill.name}|{self.backend}|{self.size}"

    @property
    def is_idle(self) -> bool:
        return isinstance(self.drill, Drill) and self.drill.is_idle

    @property
    def obstacle(self) -> str:
        return self.drill.obstacle() if isinstance(self.drill, Drill) else ""

    def perform(self) -> Result:
        if isinstance(self.drill, LauncherDrill):
            return rehearse_launcher(self.drill)
        return rehearse(self.drill, self.backend, self.size)


def performances(only: str) -> list[Performance]:
    found = [
        Performance(drill, backend, size)
        for drill in DRILLS
        for backend in drill.backends
        for size in drill.sizes
    ]
    found += [Performance(drill, "any", RANKS) for drill in LAUNCHER_DRILLS]
    return [each for each in found if only in each.key]


def sample(text: str) -> str:
    """A message as a cell of a table, with a pid and a host that are always the same."""
    text = re.sub(r"pid \d+ on host [^\s)]+", "pid 4711 on host a", text)
    return text.replace("|", "\\|")


def table(results: dict[str, Any]) -> str:
    lines = [
        "| drill | backend | ranks | what the others read | known after, p50 | max | of | left |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each in performances(""):
        result = results.get(each.key)
        if not result or not result["seconds"]:
            continue
        times = result["seconds"]
        nothing = (
            each.drill.reads if isinstance(each.drill, LauncherDrill) else "nothing: all goes on"
        )
        read = f"`{sample(result['text'])}`" if result["text"] else nothing
        torchs = each.drill.left_by_torch if isinstance(each.drill, Drill) else ()
        left = [f"{thing} (torch's)" if thing in torchs else thing for thing in result["left"]]
        lines.append(
            f"| {each.drill.name} | {each.backend} | {each.size} | {read} | "
            f"{statistics.median(times):.3f} s | "
            f"{max(times):.3f} s | {len(times)} | {', '.join(left) or 'nothing'} |"
        )
    return "\n".join(lines) + "\n"


def write(results: dict[str, Any]) -> None:
    head, rest = PAGE.read_text().split(BEGIN)
    _, tail = rest.split(END)
    PAGE.write_text(head + BEGIN + table(results) + END + tail)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=55.0, help="when to stop, at the latest")
    parser.add_argument("--only", default="", help="a part of 'drill|backend|ranks'; no table then")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "drills.json")
    parser.add_argument("--write", action="store_true", help="only write the table")
    parser.add_argument("--verbose", action="store_true", help="say what each performance took")
    given = parser.parse_args()
    results: dict[str, Any] = {}
    if given.results.exists():
        results = json.loads(given.results.read_text())
    if not given.write:
        failed = repeat(given, results)
        if failed:
            print("\n".join(failed), file=sys.stderr)
            return 1
    if given.write or not given.only:
        write(results)
    return 0


def repeat(given: argparse.Namespace, results: dict[str, Any]) -> list[str]:
    """Adds to the results; returns what failed."""
    warm_up()
    failed: list[str] = []
    end = time.monotonic() + given.minutes * 60
    given.results.parent.mkdir(parents=True, exist_ok=True)
    every: list[Performance] = []
    for each in performances(given.only):
        if obstacle := each.obstacle:
            print(f"SKIPPED {each.key}: {obstacle}", flush=True)
        else:
            every.append(each)

    def once(each: Performance) -> None:
        if time.monotonic() > end:
            return
        begin = time.monotonic()
        try:
            done = each.perform()
        except (AssertionError, RuntimeError) as error:
            failed.append(f"{each.key}: {error}")
            print(f"FAILED {each.key}", flush=True)
            return
        result = results.setdefault(each.key, {"seconds": [], "text": "", "left": []})
        result["seconds"].append(round(done.seconds, 4))
        result["text"] = result["text"] or done.text
        result["left"] = sorted({*result["left"], *done.left})
        if given.verbose:
            took = time.monotonic() - begin
            print(f"{each.key}: {done.seconds:.3f} s, in all {took:.1f} s", flush=True)

    for number in range(given.repetitions):
        turn = [
            each
            for each in every
            if len(results.get(each.key, {}).get("seconds", [])) <= number < each.drill.repetitions
        ]
        for each in turn:
            if not each.is_idle:
                once(each)
                given.results.write_text(json.dumps(results, indent=1))
        with ThreadPoolExecutor(AT_A_TIME) as together:
            list(together.map(once, [each for each in turn if each.is_idle]))
        given.results.write_text(json.dumps(results, indent=1))
        if time.monotonic() > end:
            print(f"the time is up in round {number + 1}", flush=True)
            break
        print(f"round {number + 1} is done", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
