"""Keeps what the suite measured, and compares a later run with it.

    python -m pytest bench --benchmark-json=RESULT.json
    python bench/baseline.py save RESULT.json
    python bench/baseline.py compare RESULT.json [--against FILE]

What is kept is not a time but a ratio, subject over reference, both measured in turns in one run,
and the interval that holds it in 95 % of resamplings of the rounds (see `turns.py`). Lower is
better. There is a baseline for each hardware, bench/baselines/<hardware>.json; `--against` takes
another one, or the result of another run.

Note [Beyond noise]
The interval tells how much a ratio varies within a run. Between runs it varies more: processes land
on other memory, and cores meet other neighbours. So a ratio has changed only if the two intervals
do not overlap *and* the medians differ by more than a margin, --margin. Nor has it if it was
measured while other processes were busy, now or then: see `other_processes.py`.

`compare` ends with status 1 where something has regressed, and with 2 where it can't tell: a file
that is not what it should be, or no baseline for this hardware.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from rich.console import Console
from rich.table import Table

BASELINES = Path(__file__).parent / "baselines"
# See Note [Beyond noise].
DEFAULT_MARGIN = 0.25
_MOST_OTHERS = 0.1

# Of what describes a machine, what a baseline keeps: enough to recognise the hardware, and the
# versions that ratios depend on.
_MACHINE_FACTS = ("hardware", "processor", "usable_cpus", "physical_cores", "l3_bytes", "governor")
_VERSIONS = ("pydist", "torch", "python")

Verdict = Literal["regressed", "improved", "noise", "new", "gone"]
_STYLES: dict[Verdict, str] = {"regressed": "bold red", "improved": "green", "noise": "dim"}


class BadInputError(Exception):
    """A file is missing, or is not what it should be; the message says what to do."""


@dataclass(frozen=True)
class Measured:
    """A ratio of times, subject over reference, and its interval.

    Attributes:
        rounds: How many turns it comes from.
        others: What processes other than ours took meanwhile, as a share of all processors.
    """

    ratio: float
    low: float
    high: float
    rounds: int
    others: float

    @property
    def is_disturbed(self) -> bool:
        return self.others > _MOST_OTHERS

    def __str__(self) -> str:
        mark = " *" if self.is_disturbed else ""
        return f"{self.ratio:.3g} ({self.low:.3g} to {self.high:.3g}){mark}"


@dataclass(frozen=True)
class Run:
    """What is kept of a run of the suite.

    Attributes:
        machine: Facts and versions; "hardware" names the baseline's file.
        benchmarks: By name.
    """

    machine: Mapping[str, Any]
    benchmarks: Mapping[str, Measured]

    @property
    def hardware(self) -> str:
        return str(self.machine["hardware"])


@dataclass(frozen=True)
class Change:
    """A benchmark in two runs: None where one of them lacks it."""

    name: str
    now: Measured | None
    then: Measured | None
    verdict: Verdict

    @property
    def share(self) -> float | None:
        """How much the ratio has grown, as a share of what it was."""
        if self.now is None or self.then is None:
            return None
        return self.now.ratio / self.then.ratio - 1


def parse_result(content: Mapping[str, Any]) -> Run:
    """What pytest-benchmark has saved.

    Raises:
        BadInputError: a benchmark lacks its ratio, or two have one name.
    """
    benchmarks: dict[str, Measured] = {}
    for entry in content["benchmarks"]:
        name, info = entry["name"], entry["extra_info"]
        if name in benchmarks:
            raise BadInputError(f"two benchmarks are called {name}; rename one of the functions.")
        if "ratio" not in info:
            raise BadInputError(f"{name} has no ratio; a benchmark hands its times to `record`.")
        benchmarks[name] = Measured(
            info["ratio"], info["low"], info["high"], entry["stats"]["rounds"], info["others"]
        )
    machine = content["machine_info"]
    return Run({key: machine[key] for key in (*_MACHINE_FACTS, *_VERSIONS)}, benchmarks)


def parse_baseline(content: Mapping[str, Any]) -> Run:
    """What `to_json` has made."""
    benchmarks = {name: Measured(**entry) for name, entry in content["benchmarks"].items()}
    return Run(content["machine"], benchmarks)


def to_json(run: Run) -> str:
    """A baseline. Four digits are more than any interval leaves; a line for each benchmark."""
    lines = [
        f"    {json.dumps(name)}: "
        + json.dumps({key: _rounded(value) for key, value in asdict(measured).items()})
        for name, measured in sorted(run.benchmarks.items())
    ]
    machine = json.dumps(dict(run.machine), indent=2).replace("\n", "\n  ")
    return f'{{\n  "machine": {machine},\n  "benchmarks": {{\n' + ",\n".join(lines) + "\n  }\n}\n"


def _rounded(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.4g}")


def load(path: Path) -> Run:
    """A result of pytest-benchmark, or a baseline.

    Raises:
        BadInputError: there is no such file, or it is neither.
    """
    try:
        content = json.loads(path.read_text())
        return parse_result(content) if "machine_info" in content else parse_baseline(content)
    except OSError as error:
        raise BadInputError(f"{path} can't be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInputError(
            f"{path} is neither a result of `pytest bench --benchmark-json=FILE` nor a baseline: "
            f"{type(error).__name__}: {error}"
        ) from error


def judge(now: Measured | None, then: Measured | None, margin: float) -> Verdict:
    """See Note [Beyond noise]."""
    if now is None or then is None:
        return "gone" if now is None else "new"
    if now.is_disturbed or then.is_disturbed:
        return "noise"
    if now.low > then.high and now.ratio > then.ratio * (1 + margin):
        return "regressed"
    if now.high < then.low and now.ratio * (1 + margin) < then.ratio:
        return "improved"
    return "noise"


def compare(now: Run, then: Run, margin: float) -> list[Change]:
    """Every benchmark of either run: in the order of `now`, then those that are gone."""
    names = [*now.benchmarks, *(name for name in then.benchmarks if name not in now.benchmarks)]
    changes = []
    for name in names:
        pair = now.benchmarks.get(name), then.benchmarks.get(name)
        changes.append(Change(name, *pair, judge(*pair, margin)))
    return changes


def differences(now: Run, then: Run) -> list[str]:
    """What else than pydist's sources may have changed a ratio."""
    return [
        f"{fact}: {now.machine.get(fact)} now, {then.machine.get(fact)} then"
        for fact in (*_MACHINE_FACTS, *_VERSIONS)
        if now.machine.get(fact) != then.machine.get(fact)
    ]


def show(changes: Sequence[Change], margin: float) -> None:
    table = Table(title="subject / reference, lower is better")
    for column in ("benchmark", "now", "then", "change", "verdict"):
        table.add_column(column, justify="right" if column == "change" else "left", no_wrap=True)
    for change in changes:
        share = change.share
        table.add_row(
            # Brackets in a name are no markup.
            change.name.removeprefix("bench_").replace("[", r"\["),
            "" if change.now is None else str(change.now),
            "" if change.then is None else str(change.then),
            "" if share is None else f"{share:+.0%}",
            change.verdict,
            style=_STYLES.get(change.verdict, ""),
        )
    console = Console(width=max(120, Console().width))
    console.print(table)
    counts = Counter(change.verdict for change in changes)
    said = ", ".join(f"{counts[verdict]} {verdict}" for verdict in get_args(Verdict))
    print(f"{said}. Changed: the intervals are apart, and the ratios by more than {margin:.0%}.")
    disturbed = sum(change.now is not None and change.now.is_disturbed for change in changes)
    if disturbed:
        print(_disturbed_text(disturbed))


def _disturbed_text(count: int) -> str:
    return (
        f"{count} marked *: other processes took more than {_MOST_OTHERS:.0%} of the processors "
        "meanwhile, so that they tell nothing. Run it again on an idle machine."
    )


def save(result: Path) -> None:
    run = load(result)
    path = BASELINES / f"{run.hardware}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(to_json(run))
    print(f"saved {len(run.benchmarks)} ratios in {path}")
    disturbed = sum(measured.is_disturbed for measured in run.benchmarks.values())
    if disturbed:
        print(_disturbed_text(disturbed))


def find_baseline(hardware: str) -> Path | None:
    path = BASELINES / f"{hardware}.json"
    return path if path.exists() else None


def run_compare(result: Path, against: Path | None, margin: float, allow_missing: bool) -> int:
    """Returns the exit status."""
    now = load(result)
    baseline = against or find_baseline(now.hardware)
    if baseline is None:
        message = (
            f"There is no baseline for this hardware, {now.hardware}, in {BASELINES}. On an idle "
            f"machine, `python bench/baseline.py save {result}` makes one of this run."
        )
        if not allow_missing:
            raise BadInputError(message)
        print(message)
        return 0
    then = load(baseline)
    changes = compare(now, then, margin)
    show(changes, margin)
    for difference in differences(now, then):
        print(f"Not the same as in {baseline.name}: {difference}.")
    return 1 if any(change.verdict == "regressed" for change in changes) else 0


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError
    return value


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    saving = commands.add_parser("save", help="make a result the baseline of its hardware")
    comparing = commands.add_parser("compare", help="with the baseline of its hardware")
    for command in (saving, comparing):
        command.add_argument("result", type=Path, help="what --benchmark-json has written")
    comparing.add_argument("--against", type=Path, help="a baseline or a result, instead")
    comparing.add_argument(
        "--margin",
        type=_share,
        default=DEFAULT_MARGIN,
        help="smaller changes are noise (a share, default %(default)s)",
    )
    comparing.add_argument(
        "--allow-missing", action="store_true", help="it is fine if there is no baseline"
    )
    args = parser.parse_args(argv)
    try:
        if args.command == "save":
            save(args.result)
            return 0
        return run_compare(args.result, args.against, args.margin, args.allow_missing)
    except BadInputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
