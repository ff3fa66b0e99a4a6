"""What the parts have found, kept as JSON: the newest of each part.

`results.json` in the folder of reports is written after every step. Its table is printed at the
end, and docs/gpu.md says by it on which machine each part was run, and which commit.
"""

import datetime
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

from gpu_parts import Step
from part_report import Report

# The table of parts in docs/gpu.md, a row of which ends with where the part was run.
_ROW = re.compile(r"^\| (\d+) \| ([^|]*) \| [^|]* \|$", re.MULTILINE)
_NOT_YET = "not yet"

Results = dict[str, dict[str, Any]]


def read(folder: Path) -> Results:
    file = folder / "results.json"
    found: Results = json.loads(file.read_text()) if file.exists() else {}
    return found


def keep(folder: Path, number: int, report: Report) -> None:
    """Puts a part's results in the place of older ones of the same part."""
    found = read(folder)
    found[str(number)] = {
        "what": report.title,
        "machine": report.machine,
        "commit": commit(),
        "day": datetime.date.today().isoformat(),
        "steps": [
            {
                "what": step.what,
                "command": step.command,
                "result": ended.how,
                "seconds": round(ended.took_s, 1),
                "tests": ended.counts,
                "found": _found(folder, step),
            }
            for step, ended in report.rows
        ],
    }
    # Whole or not at all, on a machine that may be gone at any moment.
    new = folder / "results.json.new"
    new.write_text(json.dumps(found, indent=1) + "\n")
    os.replace(new, folder / "results.json")


def forget(folder: Path, step: Step) -> None:
    """Removes what a benchmark has left in the folder before."""
    if file := _left_by(folder, step):
        file.unlink(missing_ok=True)


def _found(folder: Path, step: Step) -> Any:
    """What a benchmark has left in the folder, if it has left anything."""
    file = _left_by(folder, step)
    try:
        return None if file is None else json.loads(file.read_text())
    except (FileNotFoundError, ValueError):  # it was ended while it wrote
        return None


def _left_by(folder: Path, step: Step) -> Path | None:
    named = re.search(r"--json \$REPORTS/(\S+)", step.command)
    return folder / named[1] if named else None


def commit() -> str:
    """The one that is checked out, if git knows."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
        )
    except OSError:  # there is no git
        return "an unknown commit"
    return done.stdout.strip() or "an unknown commit"


def table(found: Results) -> str:
    """One row for each step of each part."""
    lines = ["| part | step | result | seconds | found |", "|---|---|---|---|---|"]
    for number, part in sorted(found.items(), key=lambda item: int(item[0])):
        for step in part["steps"]:
            found_it = _measured(step.get("found") or {}) or step["tests"]
            cells = (number, step["what"], step["result"], str(step["seconds"]), found_it)
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _measured(found: dict[str, Any]) -> str:
    """What a benchmark has found, in a line: one of bench/gpu, or `pydist bench sharded`."""
    texts = [f"{each['of']}: {each['shown']}" for each in found.get("figures", ())]
    for name, result in found.get("results", {}).items():
        flows = [f"{flow} {rate:.1f} GB/s" for flow, rate in result.get("gb_per_s", {}).items()]
        if flows:
            texts.append(f"{name}: {', '.join(flows)}, bound by {result['bound_by']}")
    return "; ".join(texts)


def fill_column(page: str, found: Results) -> str:
    """The page with the column "run on" of its table of parts as `found` says."""

    def row(match: re.Match[str]) -> str:
        number, what = match.groups()
        part = found.get(number)
        where = _NOT_YET
        if part is not None:
            bad = sum(step["result"] != "passed" for step in part["steps"])
            outcome = "all passed" if bad == 0 else f"{bad} of {len(part['steps'])} steps failed"
            where = f"{part['machine']}, {part['commit']}, {part['day']}: {outcome}"
        return f"| {number} | {what} | {where} |"

    return _ROW.sub(row, page)
