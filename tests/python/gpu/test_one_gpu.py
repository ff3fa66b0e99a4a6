"""`make test-gpu`: its parts hold their time, go on after failures, and leave a report."""

import datetime
import json
import os
import sys
import time
from pathlib import Path

import kept_results
import psutil  # type: ignore[import-untyped]
import pytest
import run_parts
from gpu_build import make_environment
from gpu_parts import BUILD_S, PART_S, PARTS, Part, Step

# Where the commands of these tests run: with the Python that runs the tests first.
HERE = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}

HANGING = """
import time

def test_passes():
    pass

def test_hangs():
    time.sleep(1000)
"""


def steps(*commands: str, limit_s: float = 30.0) -> tuple[Step, ...]:
    return tuple(Step(f"step {command}", command, limit_s) for command in commands)


def results(folder: Path) -> list[str]:
    """The column of results in the report of part 1."""
    rows = [line for line in (folder / "part-1.md").read_text().splitlines() if "| step " in line]
    return [row.split("|")[2].strip() for row in rows[1:]]


def test_a_part_goes_on_after_failures(tmp_path: Path) -> None:
    part = Part("failures", steps("echo one", "echo two; exit 3", "no-such-program", "echo four"))
    assert not run_parts.run_part(1, part, [], tmp_path, HERE)
    assert results(tmp_path) == [
        "passed",
        "failed with status 3",
        "failed with status 127",
        "passed",
    ]
    report = (tmp_path / "part-1.md").read_text()
    assert report.startswith("# Part 1: failures\n")
    assert "\n    two\n" in report
    assert "no-such-program: command not found" in report
    assert "four" in (tmp_path / "part-1.log").read_text()


def test_a_part_in_which_all_pass(tmp_path: Path) -> None:
    assert run_parts.run_part(1, Part("", steps("true")), steps("echo"), tmp_path, HERE)
    assert results(tmp_path) == ["passed", "passed"]


def test_a_step_that_hangs_is_stopped_and_says_what_it_has_found(tmp_path: Path) -> None:
    (tmp_path / "test_hanging.py").write_text(HANGING)
    pytest_of_it = f"python -m pytest -p no:cacheprovider --rootdir {tmp_path} {tmp_path}"
    part = Part("", steps(pytest_of_it, limit_s=8.0) + steps("true"))
    assert not run_parts.run_part(1, part, [], tmp_path, HERE)
    assert results(tmp_path) == ["stopped after 8 s", "passed"]
    report = (tmp_path / "part-1.md").read_text()
    assert "| 1 passed |" in report
    assert "in test_hangs" in report or "test_hanging.py" in report


def test_what_a_stopped_step_has_started_ends_with_it(tmp_path: Path) -> None:
    background = f"sleep 1000 & echo $! >{tmp_path}/pid; wait"
    run_parts.run_part(1, Part("", steps(background, limit_s=1.0)), [], tmp_path, HERE)
    pid = int((tmp_path / "pid").read_text())
    gone_by = time.monotonic() + 10.0
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < gone_by
        time.sleep(0.05)


def test_a_part_ends_in_time(tmp_path: Path) -> None:
    began = time.monotonic()
    part = Part("", steps("sleep 1000", "true"))
    assert not run_parts.run_part(1, part, [], tmp_path, HERE, part_s=1.0)
    assert time.monotonic() - began < 25.0
    assert results(tmp_path) == ["stopped after 1 s", "not run: the part's time was up"]


def test_nothing_runs_without_what_it_needs(tmp_path: Path) -> None:
    assert not run_parts.run_part(1, Part("", steps("true")), steps("false"), tmp_path, HERE)
    assert results(tmp_path) == ["failed with status 1", "not run: what it needs has failed"]


def test_results_are_kept_until_the_part_runs_again(tmp_path: Path) -> None:
    says = Step("build", "echo Python 3.12.1, torch 2.11.0, NVIDIA H200", 9.0)
    for number, last in ((1, "false"), (10, "true"), (1, "true"), (2, "false")):
        part = Part("a part", steps("true", last))
        run_parts.run_part(number, part, [says], tmp_path, HERE)
    found = kept_results.read(tmp_path)
    assert list(found) == ["1", "10", "2"]
    rows = kept_results.table(found).splitlines()[2:]
    assert [row.split("|")[1].strip() for row in rows] == ["1"] * 3 + ["2"] * 3 + ["10"] * 3
    assert "failed with status 1" in rows[5]
    assert "failed" not in "".join(rows[:5])
    where = "Python 3.12.1, torch 2.11.0, NVIDIA H200, "
    where += f"{kept_results.commit()}, {datetime.date.today()}"
    page = "| part | what | run on |\n|---|---|---|\n| 1 | one | not yet |\n| 2 | two | old |\n"
    page += "| 3 | three | somewhere |\n\n| 1 | of another table |\n"
    filled = kept_results.fill_column(page, found).splitlines()
    assert filled[2:5] == [
        f"| 1 | one | {where}: all passed |",
        f"| 2 | two | {where}: 1 of 3 steps failed |",
        "| 3 | three | not yet |",
    ]
    assert filled[6] == "| 1 | of another table |"


def test_the_page_lists_the_parts() -> None:
    page = (Path(run_parts.ROOT) / "docs" / "gpu.md").read_text()
    rows = kept_results.fill_column(page, {}).splitlines()
    assert sum(row.endswith("| not yet |") for row in rows) == len(PARTS)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.what)
def test_every_step_gets_its_time(part: Part) -> None:
    assert BUILD_S + sum(step.limit_s for step in part.steps) <= PART_S <= 9 * 60


def test_the_environment_finds_what_the_python_below_it_has(tmp_path: Path) -> None:
    command = 'python -c "import sys, torch; print(sys.prefix)"'
    variables = make_environment(tmp_path / "venv")
    assert run_parts.run_part(1, Part("", steps(command)), [], tmp_path, variables)
    assert f"    {tmp_path / 'venv'}\n" in (tmp_path / "part-1.md").read_text()


def test_what_benchmarks_leave_is_kept(tmp_path: Path) -> None:
    figures = '{"figures": [{"of": "copy", "shown": "3 TB/s"}, {"of": "sum", "shown": "90%"}]}'
    flows = '{"results": {"gpt": {"gb_per_s": {"to the host": 24.96}, "bound_by": "the step"}}}'
    for name in ("old", "broken"):
        (tmp_path / f"{name}.json").write_text(figures)
    part = Part(
        "",
        steps(
            f"echo '{figures}' >$REPORTS/new.json; : --json $REPORTS/new.json",
            f"echo '{flows}' >$REPORTS/flows.json; : --json $REPORTS/flows.json",
            "echo '{' >$REPORTS/broken.json; : --json $REPORTS/broken.json",
            ": --json $REPORTS/old.json",
        ),
    )
    assert run_parts.run_part(1, part, [], tmp_path, HERE)
    found = kept_results.read(tmp_path)
    kept = [step["found"] for step in found["1"]["steps"]]
    assert kept == [json.loads(figures), json.loads(flows), None, None]
    cells = [row.split("|")[5].strip() for row in kept_results.table(found).splitlines()[2:]]
    assert cells == [
        "copy: 3 TB/s; sum: 90%",
        "gpt: to the host 25.0 GB/s, bound by the step",
        "",
        "",
    ]
