"""Strategies that start processes by themselves, without any launcher."""

import importlib.util
import sys
from pathlib import Path

import pytest
from launch import run_command

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None,
    reason="lightning is not installed: make test-frameworks installs it",
)

PROGRAM = Path(__file__).with_name("lightning_program.py")


@pytest.mark.parametrize("strategy", ["pydist", "pydist_spawn", "pydist_notebook"])
def test_a_program_starts_its_processes(strategy: str) -> None:
    path = ":".join(filter(None, sys.path))
    ended = run_command([sys.executable, str(PROGRAM), strategy], env={"PYTHONPATH": path})
    assert ended.returncode == 0, ended.stderr
    said = sorted(line for line in ended.stdout.splitlines() if line.startswith("rank "))
    assert said == [f"rank {rank} of 2 in DataParallel" for rank in range(2)]
