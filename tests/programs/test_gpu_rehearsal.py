"""The commands of `make test-gpu`, on the stand-ins: what a GPU's minutes must not be lost to."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import run_parts
from gpu_parts import PARTS, Part, Step
from time_limit import PATIENCE

# Where they run: with the Python that runs the tests first.
HERE = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def rehearse(steps: list[Step], folder: Path) -> bool:
    patient = tuple(replace(step, limit_s=100 * PATIENCE) for step in steps)
    return run_parts.run_part(1, Part("", patient), [], folder, HERE)


def test_a_dry_run_of_what_is_no_test(tmp_path: Path) -> None:
    """What the others select, test_documented_commands.py looks at."""
    commands = [step for part in PARTS for step in run_parts.rehearsed(part).steps]
    others = [step for step in commands if "-m pytest" not in step.command]
    assert len(others) > 5
    assert rehearse(others, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.what)
def test_a_dry_run(part: Part, tmp_path: Path) -> None:
    assert rehearse(list(run_parts.rehearsed(part).steps), tmp_path)
