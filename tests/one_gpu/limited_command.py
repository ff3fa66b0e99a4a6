"""A command that is run within a limit; what it prints goes to a log."""

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

# What a command gets after SIGINT, to say what it has found so far: pytest does.
_GRACE_S = 15.0


@dataclass(frozen=True)
class Ended:
    """How a command ended, or why it was not run."""

    how: str
    took_s: float = 0.0
    output: str = ""

    @property
    def is_good(self) -> bool:
        return self.how == "passed"

    @property
    def counts(self) -> str:
        """The closing line of pytest, where there is one: "12 passed, 3 skipped"."""
        found = re.findall(r"^=* ?((?:\d+ \w+,? ?)+)(?: in [\d.]+s.*)$", self.output, re.MULTILINE)
        return found[-1].strip() if found else ""


def run(
    command: str, *, limit_s: float, log: IO[bytes], folder: Path, env: Mapping[str, str]
) -> Ended:
    """Runs `command` by a shell; ends it and all that it has started when `limit_s` have passed."""
    began = time.monotonic()
    start = log.seek(0, os.SEEK_END)
    log.write(f"\n$ {command}\n".encode())
    process = subprocess.Popen(
        ["bash", "-c", command],
        cwd=folder,
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        status = process.wait(limit_s)
        how = "passed" if status == 0 else f"failed with status {status}"
    except subprocess.TimeoutExpired:
        how = f"stopped after {limit_s:.0f} s"
        _end(process)
    except BaseException:
        _end(process)
        raise
    text = Path(log.name).read_bytes()[start:]
    return Ended(how, time.monotonic() - began, text.decode(errors="replace"))


def _end(process: "subprocess.Popen[bytes]") -> None:
    os.killpg(process.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_S)
    # What it has started may live on.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
