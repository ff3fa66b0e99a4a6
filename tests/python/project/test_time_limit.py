"""The time limit itself: a hang becomes a failure that shows where each process is."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import launch
import pytest

HANGING = '''
import subprocess, sys, threading

RANK = """
import threading
def wait_for_a_message_that_never_comes():
    print("ready", flush=True)
    threading.Event().wait()
wait_for_a_message_that_never_comes()
"""

def test_hangs():
    rank = subprocess.Popen([sys.executable, "-c", RANK], stdout=subprocess.PIPE)
    rank.stdout.readline()
    threading.Event().wait()

def test_after_it():
    pass
'''

HANGING_IN_C = """
import ctypes

def test_hangs_without_returning_to_python():
    # Holds the GIL and ignores signals, as a C++ wait that forgot about both would.
    mutex = ctypes.create_string_buffer(256)
    c_library = ctypes.PyDLL(None)
    c_library.pthread_mutex_lock(mutex)
    c_library.pthread_mutex_lock(mutex)
"""


def run_pytest(
    folder: Path, *arguments: str, patience: str = "1"
) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    environment["TEST_PATIENCE"] = patience
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments, str(folder)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A folder with this suite's time limit and nothing else."""
    (tmp_path / "pytest.ini").write_text("[pytest]\ntimeout_method = signal\n")
    shutil.copy(Path(__file__).resolve().parents[1] / "time_limit.py", tmp_path / "conftest.py")
    return tmp_path


def test_a_hang_shows_every_process_and_the_run_goes_on(suite: Path) -> None:
    (suite / "test_hanging.py").write_text(HANGING)
    ended = run_pytest(suite, "--timeout=30", patience="0.1")
    assert "1 failed, 1 passed" in ended.stdout
    assert "passed the limit of 3 s" in ended.stdout
    assert "in test_hangs" in ended.stdout
    assert "in wait_for_a_message_that_never_comes" in ended.stdout


def test_a_hang_in_c_ends_the_run_with_the_stacks(suite: Path) -> None:
    conftest = suite / "conftest.py"
    conftest.write_text(conftest.read_text().replace("GRACE_S = 30.0", "GRACE_S = 1.0"))
    (suite / "test_hanging.py").write_text(HANGING_IN_C)
    ended = run_pytest(suite, "--timeout=2")
    assert ended.returncode == 1
    assert "in test_hangs_without_returning_to_python" in ended.stderr
    assert "passed" not in ended.stdout


def sleep_long() -> None:
    time.sleep(60)


def test_the_limit_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    with launch.Ranks(1) as ranks:
        ranks.run(os.getpid)  # it has started by then, however slow the machine
        monkeypatch.setattr(launch, "PATIENCE", 0.25)
        late = r"ranks \[0\] of 1 took more than 0.5 s"
        with pytest.raises(launch.ExpiredError, match=late) as said:
            ranks.run(sleep_long, timeout=2.0)
    assert "in sleep_long" in str(said.value)


def test_ranks_that_took_too_long_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    with launch.Ranks(1) as ranks:
        late = ranks.pids
        monkeypatch.setattr(launch, "PATIENCE", 0.25)
        with pytest.raises(launch.ExpiredError):
            ranks.run(sleep_long, timeout=2.0)
        monkeypatch.undo()
        assert ranks.run(os.getpid) == ranks.pids
        assert ranks.pids != late
