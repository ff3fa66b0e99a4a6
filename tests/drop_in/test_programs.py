"""Every program of this folder, on every arm, beside its reference."""

from typing import Any

import pytest
from arms import ALONE, DDP, LIMIT_S, PYDIST, Arm, Arms
from comparison import require_drop_in, require_same_as_one_process
from gpu_ranks import needs_gpu_ranks
from harness import Program, load_programs

# What `make test` runs: two ranks on pydist's own engine, and what they are compared with.
EVERYDAY = (ALONE, DDP[2], PYDIST[1])

# A program may have to run on three arms: its own, under torch's DDP, and in one process.
pytestmark = pytest.mark.timeout(4 * LIMIT_S)


def pairs(*arms: Arm) -> list[Any]:
    """Each arm with each program that it runs."""
    found = []
    for arm in arms:
        for program in load_programs():
            on_gpu = arm.backend == "nccl"
            if (
                (on_gpu and not program.on_gpu)
                or (arm in DDP.values() and program.without_ddp)
                or (arm == ALONE and program.reference != "one process")
            ):
                continue
            name = f"{arm.name}-{program.name}"
            marks = [needs_gpu_ranks] if on_gpu else []
            if arm not in EVERYDAY:
                marks.append(pytest.mark.thorough)
            found.append(pytest.param(arm, program, id=name, marks=marks))
    return found


@pytest.mark.parametrize(("arm", "program"), pairs(ALONE, *DDP.values()))
def test_references(arms: Arms, arm: Arm, program: Program) -> None:
    """Torch itself does what a program expects; where it can, the same on any number of ranks."""
    found = arms.result(arm, program).recordings
    assert found[0].steps, "the program has recorded nothing"
    if program.reference == "one process":
        alone = arms.result(ALONE, program).recordings[0]
        require_same_as_one_process(alone, found, program.tolerance, what="beside one process")


@pytest.mark.parametrize(("arm", "program"), pairs(*PYDIST))
def test_pydist(arms: Arms, arm: Arm, program: Program) -> None:
    """pydist does what the reference does, or refuses as the program says."""
    require_drop_in(arms, arm, program)
