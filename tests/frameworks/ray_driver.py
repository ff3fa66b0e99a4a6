"""Runs a driver of Ray in a process of its own, and sees to it that nothing of Ray outlives it."""

import contextlib
import json
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
from launch import run_command

PROGRAM = Path(__file__).with_name("ray_program.py")

# How long Ray's processes may take to end once the driver has.
_ENDING_S = 20.0


def results_of(scenario: str, folder: Path, *, limit_s: float) -> Any:
    """What a function of `ray_program.py` returns.

    Args:
        scenario: The function's name.
        folder: An empty one.
        limit_s: Seconds that the driver may take, with Ray's start and end.
    """
    path = ":".join(filter(None, sys.path))
    # Ray's sockets lie there, whose paths can't be long.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as own:
        mark = uuid.uuid4().hex
        environment = {
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
            "RAY_TEST_FOLDER": own,
            "RAY_TEST_MARK": mark,
            "RAY_USAGE_STATS_ENABLED": "0",
            # Otherwise `import torch` tells of backend "pydist", and not `PydistConfig` alone.
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        }
        with _nothing_left(mark):
            ended = run_command(
                [sys.executable, str(PROGRAM), scenario, str(folder)],
                timeout=limit_s,
                env=environment,
            )
    assert ended.returncode == 0, f"{ended.stdout[-6000:]}\n{ended.stderr[-6000:]}"
    return json.loads((folder / "results.json").read_text())


@contextlib.contextmanager
def _nothing_left(mark: str) -> Iterator[None]:
    """Ends what has the mark in its environment, and fails if that did not end by itself."""
    try:
        yield
    finally:
        # Ray's processes leave the driver's family, so a mark that they inherit tells them.
        _, late = psutil.wait_procs(list(_marked(mark)), timeout=_ENDING_S)
        said = [f"{process.pid} {' '.join(process.cmdline())[:200]}" for process in late]
        for process in late:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(late, timeout=5)
    assert said == [], "these outlived the driver"


def _marked(mark: str) -> Iterator[Any]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("RAY_TEST_MARK") == mark:
                yield process
