"""The tests hold where they are started in the background, with SIGINT ignored."""

import sys
from pathlib import Path

import pytest
from launch import run_command

ROOT = Path(__file__).resolve().parents[3]

# Interrupts a rank, and a command that a test starts.
INTERRUPTING = "ctrl_c_ends_an_allocation or rank_0_that_is_not_there"


@pytest.mark.timeout(120)
def test_ctrl_c_reaches_ranks_and_commands() -> None:
    tests = ["-m", "pytest", "-p", "no:cacheprovider", "tests/python/job/test_interruption.py"]
    done = run_command(
        ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", sys.executable, *tests, "-k", INTERRUPTING],
        cwd=ROOT,
        timeout=100,
    )
    assert "2 passed" in done.stdout, done.stdout
