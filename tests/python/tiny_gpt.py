"""The GPT of examples/train_gpt.py, small enough for tests, on ranks forked with torch loaded."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from launch import NO_LAUNCHER, run_ranks

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TINY = ("--batch", "8", "--context", "32", "--width", "32", "--layers", "2", "--heads", "2")
TINY += ("--warmup", "4", "--sample-bytes", "20", "--steps", "12")

# Sums in another order: a few units of rounding of float32 in the first losses. Adam divides small
# gradients by their own size, which lets the difference grow from step to step.
ROUNDING = 1e-5


def run_example(name: str, processes: int, *arguments: str, backend: str = "auto") -> None:
    env: dict[str, str | None] = {"PYDIST_BACKEND": backend, "OMP_NUM_THREADS": "1"}
    if processes == 1:
        env.update(NO_LAUNCHER)
    run_ranks(as_a_script, processes, str(EXAMPLES / name), *arguments, timeout=50, env=env)


def as_a_script(*argv: str) -> None:
    sys.argv[:] = argv
    runpy.run_path(argv[0], run_name="__main__")


def train_gpt(folder: Path, processes: int, *arguments: str, backend: str = "auto") -> list[float]:
    run_example(
        "train_gpt.py", processes, "--output", str(folder), *TINY, *arguments, backend=backend
    )
    return losses_in(folder)


def losses_in(folder: Path) -> list[float]:
    losses: list[float] = json.loads((folder / "losses.json").read_text())["losses"]
    return losses


def near(losses: list[float], steps: int) -> Any:
    return pytest.approx(losses[:steps], rel=ROUNDING, abs=ROUNDING)
