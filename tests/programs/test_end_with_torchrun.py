"""Ranks that torchrun has started end with it, and no others."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
from launch import clean_environment
from time_limit import PATIENCE

from pydist.job import processes

pytestmark = pytest.mark.timeout(120)

# An agent starts a process in a session of its own. This one ties itself to the agent, by way of a
# shell where that is asked for, as `torchrun --no-python` does.
RANK = """
import os, sys, time
from pathlib import Path
from pydist.job.processes import end_with_torchrun
end_with_torchrun()
Path(sys.argv[1]).write_text(str(os.getpid()))
time.sleep(100)
"""
AGENT = """
import os, subprocess, sys, time
command = [sys.executable, "-c", sys.argv[2], sys.argv[1]]
if sys.argv[3] == "shell":
    command = ["sh", "-c", '"$@"; true', "sh", *command]
env = {**os.environ, **({} if sys.argv[3] == "by hand" else {"TORCHELASTIC_RUN_ID": "7"})}
subprocess.Popen(command, env=env, start_new_session=True)
time.sleep(100)
"""


@pytest.mark.parametrize(
    ("how", "ends"),
    [
        pytest.param("directly", True, marks=pytest.mark.thorough),  # as one that is stopped, too
        ("stopped", True),
        ("shell", True),
        ("by hand", False),
    ],
)
def test_a_rank_ends_with_the_agent_that_has_started_it(
    tmp_path: Path, how: str, ends: bool
) -> None:
    seen = tmp_path / "pid"
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, str(seen), RANK, how], env=clean_environment()
    )
    rank = None
    try:
        deadline = time.monotonic() + 60 * PATIENCE
        while not (seen.exists() and seen.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        rank = psutil.Process(int(seen.read_text()))
        if how == "stopped":
            rank.suspend()
        agent.send_signal(signal.SIGKILL)
        agent.wait()
        gone, alive = psutil.wait_procs([rank], timeout=20 * PATIENCE if ends else 1)
        assert (len(gone), len(alive)) == ((1, 0) if ends else (0, 1))
    finally:
        agent.kill()
        agent.wait()
        if rank is not None and rank.is_running():
            rank.kill()


def started_by(starter: str, env: dict[str, str], **session: bool) -> str:
    """What a process prints that looks for torchrun's agent, started by way of a program."""
    program = "from pydist.job import processes; print(processes._torchruns_agent())"
    done = subprocess.run(
        [sys.executable, "-c", starter, program],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        **session,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_rank_is_no_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rank starts in a session of its own has the rank for a parent, and goes on."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert processes._torchruns_agent() is None
    env = clean_environment()
    starter = (
        "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], "
        "start_new_session=True, check=True)"
    )
    assert started_by(starter, {**env, "TORCHELASTIC_RUN_ID": "7"}) == "None\n"
    starter = (
        "import os, subprocess, sys; print(os.getpid(), flush=True); "
        "subprocess.run([sys.executable, '-c', sys.argv[1]], start_new_session=True, check=True, "
        "env={**os.environ, 'TORCHELASTIC_RUN_ID': '7'})"
    )
    agent, found = started_by(starter, env).split()
    assert agent == found


def test_the_parent_of_a_shell_is_no_agent() -> None:
    """A function that torch's launcher runs is in the session of the launcher's shell."""
    starter = (
        "import os, subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], "
        "check=True, env={**os.environ, 'TORCHELASTIC_RUN_ID': '7'})"
    )
    assert started_by(starter, clean_environment(), start_new_session=True) == "None\n"
