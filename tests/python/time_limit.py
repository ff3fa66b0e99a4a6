"""The hard time limit of every test, and what is printed when it passes.

Note [Time limits]
A hang must become a failure that shows where each rank is. At the limit (`timeout` in
pyproject.toml, or `@pytest.mark.timeout(seconds)`; times `PATIENCE`):

1. this process writes the stacks of all its threads;
2. every descendant process gets SIGABRT: a Python one writes the stacks of all its threads
   (PYTHONFAULTHANDLER, set below, is inherited) and dies;
3. the test fails, and the run goes on.

If the main thread is stuck in C++ so that no signal handler of Python can run, a thread of
faulthandler's ends the whole run `GRACE_S` later, again with all stacks.
"""

import contextlib
import faulthandler
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

import pytest

# By what all limits of the tests are multiplied, those of `launch` too: more on a slow machine.
# Not a PYDIST_ name: the engine warns of those that it does not know.
PATIENCE = float(os.environ.get("TEST_PATIENCE", "") or 1)
GRACE_S = 30.0
# How long the aborted descendants get to write their stacks.
_WRITING_S = 2.0

_stderr_fd = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    # pytest captures no output at this moment, so this is the terminal's or the pipe's.
    config.stash[_stderr_fd] = os.dup(2)
    os.environ["PYTHONFAULTHANDLER"] = "1"
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _descendants(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield int(child)
                yield from _descendants(int(child))


def _abort_descendants() -> list[int]:
    """Aborts all processes below this one, and waits a moment while they write their stacks."""
    pids = list(_descendants(os.getpid()))
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGABRT)
            # A stopped process takes no signal before it continues.
            os.kill(pid, signal.SIGCONT)
    if pids:
        time.sleep(_WRITING_S)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return pids


def pytest_timeout_set_timer(item: pytest.Item, settings: object) -> bool:
    """Replaces pytest-timeout's own action at expiry (see Note [Time limits])."""
    limit_s: float = settings.timeout * PATIENCE  # type: ignore[attr-defined]
    stderr_fd = item.config.stash[_stderr_fd]

    def on_expiry(signum: int, frame: FrameType | None) -> NoReturn:
        __tracebackhide__ = True
        sys.stderr.write(f"\n{item.nodeid} passed its limit of {limit_s:g} s.\n")
        sys.stderr.flush()
        faulthandler.dump_traceback(2)
        pids = _abort_descendants()
        pytest.fail(
            f"passed the limit of {limit_s:g} s; the stacks of this process and of its "
            f"descendants {pids} are in the captured stderr"
        )

    signal.signal(signal.SIGALRM, on_expiry)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    faulthandler.dump_traceback_later(limit_s + GRACE_S, exit=True, file=stderr_fd)
    return True


def pytest_timeout_cancel_timer(item: pytest.Item) -> bool:
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    faulthandler.cancel_dump_traceback_later()
    return True
