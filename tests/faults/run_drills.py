"""`make drills`: performs every drill again and again, and writes the table of docs/failure.md.

The drills take turns, so that whatever else the machine does meets all of them. What was measured
is kept (`--results`): a run that was cut off goes on where it ended, and `--write` alone makes the
table from what is there.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "python"), str(Path(__file__).parent)]

from drills import DRILLS  # noqa: E402
from launch import warm_up  # noqa: E402
from rehearsal import FailedDrillError, rehearse  # noqa: E402
from scene import Drill  # noqa: E402

PAGE = ROOT / "docs" / "failure.md"
BEGIN = "<!-- begin: written by make drills -->\n"
END = "<!-- end -->\n"


def performances(only: str) -> Iterator[tuple[str, Drill, str, int]]:
    for drill in DRILLS:
        for backend in drill.backends:
            for size in drill.sizes:
                key = f"{drill.name}|{backend}|{size}"
                if only in key:
                    yield key, drill, backend, size


def sample(text: str) -> str:
    """A message as a cell of a table, with a pid and a host that are always the same."""
    text = re.sub(r"pid \d+ on host [^\s)]+", "pid 4711 on host a", text)
    return text.replace("|", "\\|")


def table(results: dict[str, Any]) -> str:
    lines = [
        "| drill | backend | ranks | what the others read | known after, p50 | max | of | left |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for key, _, backend, size in performances(""):
        result = results.get(key)
        if not result or not result["seconds"]:
            continue
        times = result["seconds"]
        read = f"`{sample(result['text'])}`" if result["text"] else "nothing: all goes on"
        left = ", ".join(result["left"]) or "nothing"
        name = key.partition("|")[0]
        lines.append(
            f"| {name} | {backend} | {size} | {read} | {statistics.median(times):.3f} s | "
            f"{max(times):.3f} s | {len(times)} | {left} |"
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
    parser.add_argument("--only", default="", help="a part of 'drill|backend|ranks'")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "drills.json")
    parser.add_argument("--write", action="store_true", help="only write the table")
    given = parser.parse_args()
    results: dict[str, Any] = {}
    if given.results.exists():
        results = json.loads(given.results.read_text())
    if not given.write:
        failed = repeat(given, results)
        if failed:
            print("\n".join(failed), file=sys.stderr)
            return 1
    write(results)
    return 0


def repeat(given: argparse.Namespace, results: dict[str, Any]) -> list[str]:
    """Adds to the results; returns what failed."""
    warm_up()
    failed: list[str] = []
    end = time.monotonic() + given.minutes * 60
    given.results.parent.mkdir(parents=True, exist_ok=True)
    for number in range(given.repetitions):
        for key, drill, backend, size in performances(given.only):
            result = results.setdefault(key, {"seconds": [], "text": "", "left": []})
            if len(result["seconds"]) > number:
                continue
            if time.monotonic() > end:
                return failed
            try:
                done = rehearse(drill, backend, size)
            except FailedDrillError as error:
                failed.append(str(error))
                print(f"FAILED {key}", flush=True)
                continue
            result["seconds"].append(round(done.seconds, 4))
            result["text"] = result["text"] or done.text
            result["left"] = sorted({*result["left"], *done.left})
            given.results.write_text(json.dumps(results, indent=1))
        print(f"round {number + 1} is done", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
