"""Ranks started from within a program."""

import contextlib
import functools
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import torch
from launch import run_command
from thorough import everyday
from time_limit import PATIENCE

import pydist
from pydist.job.pickling import find_unpicklable


def place_and_sum(offset: float) -> tuple[int, int, float, str]:
    pydist.init()
    total = torch.tensor([pydist.rank() + offset])
    pydist.all_reduce(total)
    return pydist.rank(), pydist.world_size(), float(total), pydist.backend()


@pytest.mark.parametrize(
    ("nprocs", "backend"),
    [
        (2, None),
        (1, "gloo"),
        *(pytest.param(nprocs, None, marks=pytest.mark.thorough) for nprocs in (1, 4)),
    ],
)
def test_results_come_back_in_rank_order_and_the_environment_stays(
    nprocs: int, backend: str | None
) -> None:
    total = sum(range(nprocs)) + 10.0 * nprocs
    expected = [(rank, nprocs, total, backend or "native") for rank in range(nprocs)]
    before = dict(os.environ)
    given = {} if backend is None else {"backend": backend}
    assert pydist.spawn(place_and_sum, (10.0,), nprocs, timeout=90, **given) == expected
    assert dict(os.environ) == before


def fail_on(rank: int) -> None:
    pydist.init()
    if pydist.rank() == rank:
        raise KeyError("no such sample")
    pydist.barrier()


@pytest.fixture
def left_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The test's temporary files have a folder of their own, which is empty afterwards."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield
    assert list(folder.iterdir()) == []


@pytest.mark.usefixtures("left_no_files")
def test_the_first_culprit_is_raised_with_its_traceback() -> None:
    with pytest.raises(KeyError, match="no such sample") as caught:
        pydist.spawn(fail_on, (1,), nprocs=2, timeout=90)
    text = str(caught.value.__cause__)
    assert "rank 1 of 2" in text
    assert "in fail_on" in text
    assert not psutil.Process().children(recursive=True) or all(
        "spawn_main" not in " ".join(child.cmdline()) for child in psutil.Process().children()
    )


class TwoPartsError(Exception):
    """Can be pickled, but not unpickled."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")


def fail_awkwardly() -> None:
    raise TwoPartsError("this", "that")


def test_an_error_that_cannot_travel_comes_as_text() -> None:
    with pytest.raises(pydist.Error, match=r"rank 0 failed: .*TwoPartsError: this and that"):
        pydist.spawn(fail_awkwardly, nprocs=1, timeout=90)


def kill_rank_1() -> None:
    pydist.init()
    if pydist.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


@pytest.mark.thorough  # as test_who_is_ended_after_another_is_not_to_blame
@pytest.mark.usefixtures("left_no_files")
def test_a_killed_rank_ends_the_others_within_seconds() -> None:
    started = time.monotonic()
    with pytest.raises(pydist.PeerLost, match=r"rank 1 of 2 \(pid \d+\) was killed by signal 9"):
        pydist.spawn(kill_rank_1, nprocs=2, timeout=90)
    assert time.monotonic() - started < 45


def kill_rank_1_before_rank_0_is_ended(at_sigterm: str) -> None:
    """Rank 0 does at SIGTERM what programs do that save a checkpoint before they end."""

    def handle(*_: Any) -> None:
        if at_sigterm == "raises":
            raise RuntimeError("I was told to end")

    signal.signal(signal.SIGTERM, handle)
    pydist.init()
    if pydist.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        time.sleep(0.1)


@pytest.mark.usefixtures("left_no_files")
@pytest.mark.parametrize("at_sigterm", everyday("goes on", thorough=("raises",)))
def test_who_is_ended_after_another_is_not_to_blame(at_sigterm: str) -> None:
    with pytest.raises(pydist.PeerLost, match=r"rank 1 of 2 .* was killed by signal 9") as caught:
        pydist.spawn(kill_rank_1_before_rank_0_is_ended, (at_sigterm,), nprocs=2, timeout=90)
    assert caught.value.ranks == (1,)


def end_rank_1_by_sigterm() -> None:
    pydist.init()
    if pydist.rank() == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


def test_a_rank_that_somebody_else_ends_by_sigterm_is_named() -> None:
    with pytest.raises(pydist.PeerLost, match=r"rank 1 of 2 .* was killed by signal 15"):
        pydist.spawn(end_rank_1_by_sigterm, nprocs=2, timeout=90)


def ignore_interrupts(folder: str) -> None:
    """And stops, on rank 1."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pydist.init()
    (Path(folder) / str(pydist.rank())).write_text(str(os.getpid()))
    if pydist.rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        torch.ones(1000).sum()
        time.sleep(0.001)


# From a thread too: then it is not the main thread whose end the kernel tells of.
DIES_WHILE_RANKS_RUN = """
import os, signal, sys, threading, time
from pathlib import Path
import pydist
from test_spawn import ignore_interrupts

def spawn():
    pydist.spawn(ignore_interrupts, (sys.argv[1],), nprocs=2)

def die_when_both_run():
    while len(list(Path(sys.argv[1]).iterdir())) < 2:
        time.sleep(0.05)
    time.sleep(0.2)  # until the last one has written
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    in_thread, in_main = die_when_both_run, spawn
    if sys.argv[2] == "thread":
        in_thread, in_main = in_main, in_thread
    threading.Thread(target=in_thread).start()
    in_main()
"""


def runs(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


@pytest.mark.parametrize("caller", ["main", pytest.param("thread", marks=pytest.mark.thorough)])
def test_ranks_that_ignore_interrupts_or_are_stopped_end_with_the_process_that_spawned_them(
    tmp_path: Path, caller: str
) -> None:
    script = tmp_path / "dies.py"
    script.write_text(DIES_WHILE_RANKS_RUN)
    pids = tmp_path / "pids"
    pids.mkdir()
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    done = run_command(
        [sys.executable, str(script), str(pids), caller],
        timeout=60,
        env={"PYTHONPATH": path, "TMPDIR": str(temporary)},
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    ranks = [int(file.read_text()) for file in pids.iterdir()]
    assert len(ranks) == 2
    gone_by = time.monotonic() + 20.0
    while any(map(runs, ranks)):
        assert time.monotonic() < gone_by
        time.sleep(0.1)
    assert not list(temporary.glob("pydist*"))


def leave(status: int) -> None:
    sys.exit(status)


def test_sys_exit_of_a_rank_does_not_end_the_caller() -> None:
    with pytest.raises(pydist.Error, match="rank 0 failed: SystemExit: 3"):
        pydist.spawn(leave, (3,), nprocs=1, timeout=90)


def sleep_long() -> None:
    time.sleep(100)


@pytest.mark.usefixtures("left_no_files")
def test_a_timeout_ends_all_and_shows_the_stacks(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(pydist.Timeout, match=r"ranks \[0, 1\] of 2 still ran after \d+ s"):
        pydist.spawn(sleep_long, nprocs=2, timeout=10 * PATIENCE)  # ranks need a while to start
    _, of_0, of_1 = re.split(r"rank \d \(pid \d+\) still runs\.\n", capfd.readouterr().err)
    assert "in sleep_long" in of_0
    assert "in sleep_long" in of_1


class Model:
    def __init__(self) -> None:
        self.name = "model"
        self.parts = {"lock": threading.Lock()}


def test_what_cannot_be_sent_is_named_by_its_path() -> None:
    with pytest.raises(pydist.InvalidUsage, match=r"args\[1\]\.parts\['lock'\] is a _thread\.lock"):
        pydist.spawn(place_and_sum, (1.0, Model()), nprocs=2)


def return_a_lock() -> dict[str, Any]:
    return {"fine": 1, "inner": [threading.Lock()]}


def test_what_cannot_be_sent_back_is_named_by_its_path() -> None:
    with pytest.raises(
        pydist.InvalidUsage, match=r"rank 0 returned.*result\['inner'\]\[0\] is a _thread\.lock"
    ):
        pydist.spawn(return_a_lock, nprocs=1, timeout=90)


@pytest.mark.parametrize("nprocs", [0, -1])
def test_no_ranks_is_refused(nprocs: int) -> None:
    with pytest.raises(pydist.InvalidUsage, match="nprocs="):
        pydist.spawn(sleep_long, nprocs=nprocs)


def test_an_unknown_backend_is_refused_at_once() -> None:
    with pytest.raises(pydist.InvalidUsage, match="use one of: auto"):
        pydist.spawn(sleep_long, nprocs=1, backend="fastest")


# No guard on purpose: with cloudpickle the script is not run again.
UNGUARDED = """
import os, pydist, torch
FACTOR = 3
def work(x):
    pydist.init()
    t = torch.tensor([float(pydist.rank() + 1)])
    pydist.all_reduce(t)
    return float(t) * x * FACTOR
print(pydist.spawn(work, (2,), nprocs=2, timeout=60))
"""

WITHOUT_CLOUDPICKLE = "import sys\nsys.modules['cloudpickle'] = None\n"


def test_a_script_without_a_guard(tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle")
    script = tmp_path / "unguarded.py"
    script.write_text(UNGUARDED)
    done = run_command([sys.executable, str(script)], timeout=100)
    assert (done.returncode, done.stdout) == (0, "[18.0, 18.0]\n"), done.stderr


def test_an_interactive_session() -> None:
    pytest.importorskip("cloudpickle")
    of_lambda = UNGUARDED.replace("work, (2,), nprocs=2", "lambda: work(2), nprocs=1")
    done = run_command([sys.executable, "-c", of_lambda], timeout=100)
    assert (done.returncode, done.stdout) == (0, "[6.0]\n"), done.stderr


@pytest.mark.thorough  # as the interactive one below
def test_without_cloudpickle_a_missing_guard_is_explained(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(WITHOUT_CLOUDPICKLE + UNGUARDED)
    done = run_command([sys.executable, str(script)], timeout=100)
    assert done.returncode == 1
    assert 'if __name__ == "__main__":' in done.stderr


def test_without_cloudpickle_an_interactive_function_is_explained() -> None:
    done = run_command([sys.executable, "-c", WITHOUT_CLOUDPICKLE + UNGUARDED], timeout=100)
    assert done.returncode == 1
    assert "install cloudpickle" in done.stderr


@pytest.mark.thorough
def test_without_cloudpickle_a_guarded_script_works(tmp_path: Path) -> None:
    body, call = UNGUARDED.split("print(")
    script = tmp_path / "guarded.py"
    script.write_text(f'{WITHOUT_CLOUDPICKLE}{body}if __name__ == "__main__":\n    print({call}')
    done = run_command([sys.executable, str(script)], timeout=100)
    assert (done.returncode, done.stdout) == (0, "[18.0, 18.0]\n"), done.stderr


class Slotted:
    __slots__ = ("hook",)

    def __init__(self, hook: Any) -> None:
        self.hook = hook


class Owner:
    def method(self) -> None: ...


def find(value: object) -> str:
    import pickle

    return find_unpicklable(value, "args", pickle.dumps)


def test_paths_to_what_cannot_be_pickled() -> None:
    hook = lambda: None  # noqa: E731
    line = f"is a lambda defined in {__file__}:{hook.__code__.co_firstlineno}"
    assert f"args[0].hook {line}" in find([Slotted(hook)])
    model = torch.nn.Sequential(torch.nn.ReLU())
    model[0].hook = hook  # type: ignore[assignment]
    assert f"args['model'].0.hook {line}" in find({"model": model})
    assert f"args.keywords['key'] {line}" in find(functools.partial(max, key=hook))
    owner = Owner()
    owner.hook = hook  # type: ignore[attr-defined]
    assert f"args.__self__.hook {line}" in find(owner.method)
    cycle: list[Any] = [hook]
    cycle.append(cycle)
    assert f"args[0] {line}" in find(cycle)


def test_closures_are_searched() -> None:
    cloudpickle = pytest.importorskip("cloudpickle")
    lock = threading.Lock()

    def uses_lock() -> bool:
        return lock.locked()

    found = find_unpicklable(uses_lock, "fn", cloudpickle.dumps)
    assert "lock (a variable that fn uses) is a _thread.lock" in found
