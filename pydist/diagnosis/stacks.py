"""The Python stacks of other processes, where they can be had."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

from pydist.diagnosis.dump import file_of
from pydist.diagnosis.local_ranks import environment_of, state_of

# How long a process gets to write its stacks, and py-spy to read them.
_WRITING_S = 2.0
_READING_S = 20.0


def stacks_of(pid: int) -> str:
    """The stacks of all threads of a process, or why they can't be had.

    A process with PYDIST_DUMP in its environment writes them itself when it is sent SIGUSR1, unless
    it is stopped; py-spy, where it is installed, reads those of any process.
    """
    state = state_of(pid)
    if state == "dead":
        return "the process is dead"
    folder = environment_of(pid).get("PYDIST_DUMP")
    if folder and _handles(pid, signal.SIGUSR1) and state != "stopped":
        text = _asked_for(pid, folder)
        if text:
            return text
    tool = shutil.which("py-spy")
    if tool is not None:
        return _read_by(tool, pid)
    why = "it is stopped" if state == "stopped" else "it was started without PYDIST_DUMP"
    return f"none to be had: {why}, and py-spy is not installed"


def _handles(pid: int, number: signal.Signals) -> bool:
    """Whether the signal would not end the process."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def _asked_for(pid: int, folder: str) -> str:
    # A relative folder is that of the process.
    file = file_of(Path(f"/proc/{pid}/cwd") / folder, pid)
    try:
        before = file.stat().st_size
        os.kill(pid, signal.SIGUSR1)
    except OSError:
        return ""
    deadline = time.monotonic() + _WRITING_S
    size = before
    while time.monotonic() < deadline:
        time.sleep(0.1)
        grown = file.stat().st_size
        if grown > before and grown == size:  # The process has written, and stopped writing.
            break
        size = grown
    with file.open() as opened:
        opened.seek(before)
        # The table that may follow, below a line of its own, is about all ranks, and is shown
        # already. Blank lines are between threads, too.
        return re.split(rf"^.* pid {pid}: .*$", opened.read(), maxsplit=1, flags=re.M)[0].strip()


def _read_by(tool: str, pid: int) -> str:
    try:
        done = subprocess.run(
            [tool, "dump", "--pid", str(pid)],
            capture_output=True,
            text=True,
            timeout=_READING_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"py-spy failed: {error}"
    return done.stdout.strip() if done.returncode == 0 else f"py-spy failed: {done.stderr.strip()}"
