"""Launchers that spare the survivors, and one that starts all ranks again."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import psutil  # type: ignore[import-untyped]
import pytest
import torch
import torch.distributed as dist
from launch import clean_environment, run_command, run_ranks
from thorough import everyday
from time_limit import PATIENCE

import pydist
from pydist.cli import continuing_run, main

pytestmark = pytest.mark.timeout(120)

LIMIT_S = 90.0


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command([sys.executable, "-m", "pydist", "run", *arguments], timeout=LIMIT_S)


# Arguments: what the ranks do that are named in the first, and then the others.
SCRIPT = """
import os, signal, sys, time
import torch, pydist

victims = [int(rank) for rank in sys.argv[1].split(",") if rank]
pydist.init(timeout=60)
rank = pydist.rank()
if rank in victims:
    if sys.argv[2] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif sys.argv[2] == "exits":
        raise SystemExit(3)
    elif sys.argv[2] == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
try:
    total = pydist.all_reduce(torch.ones(1), timeout=2 if sys.argv[2] == "stopped" else 60)
except pydist.Error:
    if sys.argv[3] == "gives up":
        raise
    if sys.argv[3] == "saves":
        sys.exit(0)
    pydist.reform(settle=1)
    total = pydist.all_reduce(torch.ones(1))
# In one piece: print writes the end of the line by itself, and other ranks may come between.
sys.stdout.write(f"was {rank}, is {pydist.rank()} of {pydist.world_size()}: {total.item():g}\\n")
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.mark.parametrize(
    ("victims", "how", "then", "status", "printed", "said"),
    [
        ("0", "killed", "reform", 0, ["was 1, is 0 of 2: 2", "was 2, is 1 of 2: 2"], "signal 9"),
        pytest.param(
            "1",
            "stopped",
            "reform",
            0,
            ["was 0, is 0 of 2: 2", "was 2, is 1 of 2: 2"],
            "ends rank 1",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            "1,2",
            "exits",
            "reform",
            0,
            ["was 0, is 0 of 1: 1"],
            "status 3",
            marks=pytest.mark.thorough,
        ),
        pytest.param("1", "killed", "saves", 0, [], "signal 9", marks=pytest.mark.thorough),
        pytest.param("1", "killed", "gives up", 1, [], "signal 9", marks=pytest.mark.thorough),
    ],
)
def test_run_lets_survivors_go_on(
    script: str, victims: str, how: str, then: str, status: int, printed: list[str], said: str
) -> None:
    done = run("-n", "3", "--on-failure=continue", script, victims, how, then)
    assert done.returncode == status, done.stderr
    assert sorted(done.stdout.splitlines()) == printed
    for victim in victims.split(","):
        lines = [
            line
            for line in done.stderr.splitlines()
            if line.startswith("pydist run: ") and f"rank {victim} (pid" in line
        ]
        assert len(lines) == 1, done.stderr
        assert said in lines[0]


NEVER_JOINS = """
import os, sys, time
if os.environ["RANK"] == sys.argv[1]:
    time.sleep(0.5)
    sys.exit(3)
import pydist
try:
    pydist.init(timeout=60)
except pydist.PeerLost as error:
    sys.stdout.write(f"{error.ranks} {error.cause} {'exited with status 3' in str(error)}\\n")
"""


@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.thorough)])
def test_a_rank_that_ends_before_it_joins_is_named_at_once(victim: int, tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text(NEVER_JOINS)
    begin_s = time.monotonic()
    done = run("-n", "3", "--on-failure=continue", str(tmp_path / "ends.py"), str(victim))
    assert done.stdout == f"({victim},) exited with status 3 True\n" * 2, done.stderr
    assert time.monotonic() - begin_s < 50.0  # before the time-out


def never_join() -> str:
    if os.environ["RANK"] == "1":
        os._exit(3)
    with pytest.raises(pydist.PeerLost) as caught:
        pydist.init(timeout=60)
    return f"{caught.value.ranks} {caught.value.cause}"


@pytest.mark.thorough
def test_spawn_names_a_rank_that_ends_before_it_joins() -> None:
    begin_s = time.monotonic()
    outcomes = pydist.spawn(never_join, nprocs=2, on_failure="continue", timeout=LIMIT_S)
    assert outcomes[0] == "(1,) exited with status 3"
    assert time.monotonic() - begin_s < 50.0


ENDS = """
import sys
import pydist
pydist.init(backend=sys.argv[1], timeout=60)
if pydist.rank() == 1:
    sys.exit(3)
try:
    pydist.barrier()
except pydist.PeerLost as error:
    print(error.ranks, error.cause, f" {error.cause}" in str(error))
"""


@pytest.mark.parametrize("backend", everyday("native", thorough=("gloo",)))
def test_a_program_that_ends_early_is_told_from_one_that_leaves(
    backend: str, tmp_path: Path
) -> None:
    (tmp_path / "ends.py").write_text(ENDS)
    done = run("-n", "2", "--on-failure=continue", str(tmp_path / "ends.py"), backend)
    assert done.stdout == "(1,) has left the group (its program has ended) True\n", done.stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--nnodes=2"], "is for ranks of one host"),
        (["--rdzv-backend=c10d"], "is for ranks of one host"),
        (["--max-restarts=1"], "give one of them"),
    ],
)
def test_run_refuses_what_it_cannot_do(
    script: str, flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "-n", "2", "--on-failure=continue", *flags, script]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


SLEEPS = """
import os, signal, sys, time
from pathlib import Path
if sys.argv[2] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
Path(sys.argv[1], str(os.getpid())).touch()
time.sleep(300)
"""


CONTINUES = ["-m", "pydist", "run", "--on-failure=continue"]
STOPS = ["-m", "pydist", "run"]


def wait_for_two(seen: Path, launcher: subprocess.Popen[bytes]) -> None:
    """Waits until both ranks have left a file."""
    deadline = time.monotonic() + LIMIT_S * PATIENCE
    while len(list(seen.iterdir())) < 2:
        assert time.monotonic() < deadline
        assert launcher.poll() is None
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("launcher", "number", "ranks", "status"),
    [
        (CONTINUES, signal.SIGTERM, "polite", 128 + signal.SIGTERM),
        (STOPS, signal.SIGKILL, "deaf", -signal.SIGKILL),
        pytest.param(
            *(CONTINUES, signal.SIGINT, "polite", 128 + signal.SIGINT), marks=pytest.mark.thorough
        ),
        pytest.param(
            *(CONTINUES, signal.SIGKILL, "deaf", -signal.SIGKILL), marks=pytest.mark.thorough
        ),
    ],
)
def test_nothing_outlives_the_launcher(
    tmp_path: Path, launcher: list[str], number: signal.Signals, ranks: str, status: int
) -> None:
    path = tmp_path / "sleeps.py"
    path.write_text(SLEEPS)
    seen = tmp_path / "pids"
    seen.mkdir()
    process = subprocess.Popen(
        [sys.executable, *launcher, "-n", "2", str(path), str(seen), ranks],
        env=clean_environment(),
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_for_two(seen, process)
        process.send_signal(number)
        assert process.wait(LIMIT_S * PATIENCE) == status
        started = [
            psutil.Process(int(p.name)) for p in seen.iterdir() if psutil.pid_exists(int(p.name))
        ]
        _, alive = psutil.wait_procs(started, timeout=10 * PATIENCE)
        assert alive == []
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("launcher", everyday(STOPS, thorough=(CONTINUES,)))
def test_nohup_is_for_the_launcher_and_its_ranks(tmp_path: Path, launcher: list[str]) -> None:
    path = tmp_path / "ends.py"
    path.write_text(
        "import os, signal, sys, time\n"
        "from pathlib import Path\n"
        "folder = Path(sys.argv[1])\n"
        "(folder / os.environ['RANK']).touch()\n"
        "while not (folder / 'end').exists(): time.sleep(0.01)\n"
    )
    seen = tmp_path / "seen"
    seen.mkdir()
    process = subprocess.Popen(
        ["nohup", sys.executable, *launcher, "-n", "2", str(path), str(seen)],
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_for_two(seen, process)
        process.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        (seen / "end").touch()
        assert process.wait(LIMIT_S * PATIENCE) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.thorough
def test_the_example_of_the_docs_goes_on(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/failure.md").read_text()
    [example] = re.findall(r"```python\n(import sys\n.*?pydist\.reform.*?)```", page, re.DOTALL)
    path = tmp_path / "train.py"
    path.write_text(example + 'sys.stdout.write(f"{pydist.world_size()} {step}\\n")\n')
    launcher = subprocess.Popen(
        [sys.executable, "-m", "pydist", "run", "-n", "3", "--on-failure=continue", path, tmp_path],
        env=clean_environment({"PYTHONUNBUFFERED": "1"}),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + LIMIT_S * PATIENCE
        while not (tmp_path / "last").exists():
            assert time.monotonic() < deadline
            assert launcher.poll() is None
            time.sleep(0.01)
        ranks = psutil.Process(launcher.pid).children()
        next(rank for rank in ranks if rank.environ().get("RANK") == "0").kill()
        printed, _ = launcher.communicate(timeout=LIMIT_S * PATIENCE)
        assert launcher.returncode == 0
        assert printed.split("\n") == ["2 1000", "2 1000", ""]
    finally:
        launcher.kill()
        launcher.wait()


def go_on_without(victims: list[int], how: str) -> tuple[int, int]:
    pydist.init(timeout=30)
    rank = pydist.rank()
    if rank in victims:
        if how == "raises":
            raise KeyError("no such sample")
        os.kill(os.getpid(), {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}[how])
    with pytest.raises(pydist.Error):
        pydist.all_reduce(torch.ones(1), timeout=2 if how == "stopped" else 30)
    pydist.reform(settle=1)
    return rank, pydist.world_size()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("killed", r"rank 1 \(pid \d+\) was killed by signal 9 \(SIGKILL\)"),
        pytest.param("raises", "no such sample", marks=pytest.mark.thorough),
        pytest.param(
            "stopped",
            r"rank 1 \(pid \d+\) was ended by pydist.spawn: the others have gone on",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_spawn_returns_what_survivors_returned(how: str, said: str) -> None:
    first, lost, last = pydist.spawn(
        go_on_without, ([1], how), nprocs=3, timeout=90 * PATIENCE, on_failure="continue"
    )
    assert (first, last) == ((0, 2), (2, 2))
    assert isinstance(lost, KeyError if how == "raises" else pydist.PeerLost)
    with pytest.raises(type(lost), match=said):
        raise lost
    if how == "raises":
        assert "in go_on_without" in str(lost.__cause__)


def leave_without_a_word(silent: list[int]) -> int:
    rank = int(os.environ["RANK"])
    if rank in silent:
        os._exit(0)
    return rank


def test_spawn_says_which_rank_ended_without_a_result() -> None:
    limit_s = 90 * PATIENCE
    said = r"rank 1 (of 2 )?\(pid \d+\) exited with status 0 without a result"
    first, lost = pydist.spawn(
        leave_without_a_word, ([1],), nprocs=2, timeout=limit_s, on_failure="continue"
    )
    assert first == 0
    assert isinstance(lost, pydist.PeerLost)
    assert re.match(said, str(lost))
    with pytest.raises(pydist.PeerLost, match=said):
        pydist.spawn(leave_without_a_word, ([1],), nprocs=2, timeout=limit_s)
    with pytest.raises(pydist.PeerLost, match=r"rank 0 of 1 .* without a result"):
        pydist.spawn(leave_without_a_word, ([0],), nprocs=1, timeout=limit_s, on_failure="continue")


class Ended:
    """A process, as the launcher sees it."""

    def __init__(self, pid: int, code: int) -> None:
        self.pid, self.poll = pid, lambda: code


def test_of_ranks_that_end_together_the_cause_comes_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ended = {rank: Ended(2**22 + 1 + rank, code) for rank, code in enumerate((0, 1, -9, 3))}
    assert continuing_run._supervise(ended, dist.HashStore()) == 0
    told = re.findall(r"rank (\d) \(pid \d+\) (\w+)", capsys.readouterr().err)
    assert told == [("2", "was"), ("1", "exited"), ("3", "exited")]


def all_fail() -> None:
    raise KeyError("no such sample")


def test_spawn_raises_where_no_rank_returns() -> None:
    with pytest.raises(KeyError, match="no such sample"):
        pydist.spawn(all_fail, nprocs=2, timeout=90 * PATIENCE, on_failure="continue")
    with pytest.raises(pydist.InvalidUsage, match="on_failure='go'"):
        pydist.spawn(all_fail, on_failure="go")  # type: ignore[call-overload]


# Trains as anybody would; rank 1 dies once, if it is told when.
RESTARTED = """
import os, signal, sys
from pathlib import Path
import torch, pydist

folder, dies_at = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
model = pydist.DataParallel(torch.nn.Linear(4, 1))
optimizer = pydist.ShardedOptimizer(model, torch.optim.AdamW, lr=0.1)
losses, step = [], 0
if Path(folder, "last").exists():
    extra = pydist.load(f"{folder}/last", model=model, optimizer=optimizer)
    losses, step = extra["losses"], extra["step"]
began = step
while step < 8:
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if first and pydist.rank() == 1 and step == dies_at:
        os.kill(os.getpid(), signal.SIGKILL)
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    loss = model(inputs[pydist.rank() :: pydist.world_size()]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    losses.append(pydist.all_reduce(loss.detach(), "mean").item())
    extra = {"losses": losses, "step": step}
    pydist.save(f"{folder}/last", model=model, optimizer=optimizer, extra=extra)
if pydist.rank() == 0:
    print(began, *losses)
"""


def train_whole(folder: str) -> list[str]:
    with mock.patch.object(sys, "argv", ["train.py", folder, "-1"]):
        done: dict[str, Any] = {}
        exec(RESTARTED, done)
    return [str(loss) for loss in done["losses"]]


def test_a_run_that_is_started_again_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(RESTARTED)
    folders = [tmp_path / "whole", tmp_path / "restarted"]
    for folder in folders:
        folder.mkdir()
    expected, _ = run_ranks(train_whole, 2, str(folders[0]))
    done = run("-n", "2", "--max-restarts=3", str(path), str(folders[1]), "5")
    assert done.returncode == 0, done.stderr
    began, *losses = done.stdout.split()
    assert began == "5"
    assert losses == expected
