"""Runs what one NVIDIA GPU can show of pydist: `make test-gpu`, `make test-gpu PART=2`.

Every part ends within nine minutes, the build included, whatever fails or hangs in it, and leaves
part-N.md and part-N.log in the folder of reports. The newest results of each part are kept in
results.json there, with what was measured, and printed as one table at the end. Exits with 1 where
anything has failed.

With `--dry-run` it needs no GPU, and uses none: pytest shows the tests that each step selects and
runs none, and benchmarks find that there is nothing to measure. What else there is is left out.
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import gpu_build
import kept_results
from gpu_parts import BUILD_S, PART_S, PARTS, Part, Step
from limited_command import Ended, run
from part_report import Report

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "gpu"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    numbers = range(1, len(PARTS) + 1)
    parser.add_argument(
        "parts", nargs="*", type=int, metavar="PART", help="all, where none is named"
    )
    parser.add_argument("--reports", type=Path, default=BUILD / "reports", help="a folder")
    parser.add_argument(
        "--wheels", type=Path, default=BUILD / "wheels", help="what Python lacks here"
    )
    parser.add_argument("--list", action="store_true", help="say what each part runs, and no more")
    parser.add_argument("--dry-run", action="store_true", help="find out whether all is there")
    parser.add_argument(
        "--into", type=Path, metavar="PAGE", help="fill the page's column `run on`, and no more"
    )
    given = parser.parse_args()
    if given.into is not None:
        found = kept_results.read(given.reports)
        given.into.write_text(kept_results.fill_column(given.into.read_text(), found))
        return 0
    if unknown := set(given.parts) - set(numbers):
        parser.error(f"there are parts 1 to {len(PARTS)}, not {sorted(unknown)}")
    if given.list:
        list_parts()
        return 0
    variables = gpu_build.make_environment(BUILD / "venv")
    preparation = [
        Step("build", command, BUILD_S)
        for command in gpu_build.build_commands(BUILD / "dev", given.wheels)
    ]
    parts = {number: PARTS[number - 1] for number in given.parts or numbers}
    folder = given.reports
    if given.dry_run:  # whose results are none
        folder /= "dry-run"
        parts = {number: rehearsed(part) for number, part in parts.items()}
    good = [
        run_part(number, part, preparation, folder, variables) for number, part in parts.items()
    ]
    print(kept_results.table(kept_results.read(folder)))
    return 0 if all(good) else 1


def rehearsed(part: Part) -> Part:
    """A part without what takes a GPU."""
    steps = []
    for step in part.steps:
        if step.command.startswith("python -m pytest"):
            steps.append(replace(step, command=f"{step.command} --collect-only --quiet"))
        elif "python bench/gpu/" in step.command:  # which ends with 2 where there is no GPU
            command = step.command.removeprefix("CUDA_VISIBLE_DEVICES=0 ")
            command = f"CUDA_VISIBLE_DEVICES= {command} || test $? = 2"
            steps.append(replace(step, command=command))
        elif step.command == "pydist info":
            steps.append(step)
    return replace(part, steps=tuple(steps))


def list_parts() -> None:
    for number, part in enumerate(PARTS, 1):
        print(f"{number}. {part.what}")
        for step in part.steps:
            print(f"   {step.command}")


def run_part(
    number: int,
    part: Part,
    preparation: Sequence[Step],
    folder: Path,
    variables: Mapping[str, str],
    part_s: float = PART_S,
) -> bool:
    """Runs the preparation, which the part's steps need, and these; whether all have passed."""
    deadline = time.monotonic() + part_s
    folder.mkdir(parents=True, exist_ok=True)
    log_file = folder / f"part-{number}.log"
    report = Report(folder / f"part-{number}.md", f"Part {number}: {part.what}", log_file)
    variables = {**variables, "REPORTS": str(folder.resolve())}
    is_prepared = True
    for step in part.steps:
        kept_results.forget(folder, step)
    with log_file.open("wb", buffering=0) as log:
        for step in (*preparation, *part.steps):
            left_s = deadline - time.monotonic()
            if not is_prepared:
                ended = Ended("not run: what it needs has failed")
            elif left_s <= 0:
                ended = Ended("not run: the part's time was up")
            else:
                print(f"part {number}: {step.command}", flush=True)
                limit_s = min(step.limit_s, left_s)
                ended = run(step.command, limit_s=limit_s, log=log, folder=ROOT, env=variables)
                print(f"part {number}: {ended.how}  {ended.counts}", flush=True)
            if step in preparation:
                is_prepared = is_prepared and ended.is_good
            report.add(step, ended)
            kept_results.keep(folder, number, report)
    print(f"part {number}: see {report.file}", flush=True)
    return report.is_good


if __name__ == "__main__":
    sys.exit(main())
