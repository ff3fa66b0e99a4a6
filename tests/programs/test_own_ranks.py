"""A script that starts its own ranks: with its arguments, in a debugger, and down together."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from launch import NO_LAUNCHER, run_command, run_ranks
from thorough import everyday
from time_limit import PATIENCE

import pydist
from pydist.job.own_ranks import _divided

PROGRAM = """
import os, sys
import torch
import pydist

pydist.init(processes=2)
total = pydist.all_reduce(torch.tensor([pydist.rank() + 1.0]), "sum").item()
line = f"rank {pydist.rank()} of {pydist.world_size()}: {total:g} {sys.argv[1:]}"
print(f"{line} {torch.get_num_threads()}\\n", end="", flush=True)
"""
TOLD = [f"rank {rank} of 2: 3 ['--lr', '0.1'] 1" for rank in range(2)]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def told(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    return sorted(line for line in done.stdout.splitlines() if line.startswith("rank "))


def test_a_script_with_arguments_and_a_configuration(script: Path) -> None:
    """Each rank reads the configuration that the script names, and not the environment's."""
    for name, timeout in (("a", 50), ("b", 77)):
        (script.parent / f"{name}.toml").write_text(f"[engine]\ntimeout = {timeout}\n")
    other = str(script.parent / "b.toml")
    script.write_text(
        PROGRAM.replace("processes=2", f"config={other!r}, processes=2")
        + "from pydist.job import current\n"
        "timeout = current.job.membership.communicator.timeout\n"
        # In one write: the ranks share the output.
        "print(f'rank {timeout}\\n', end='', flush=True)\n"
    )
    env = {"PYDIST_CONFIG": str(script.parent / "a.toml")}
    done = run_command([sys.executable, str(script), "--lr", "0.1"], env=env)
    assert told(done) == [*TOLD, *["rank 77.0"] * 2]


@pytest.mark.thorough
def test_flags_of_the_interpreter_are_kept(script: Path) -> None:
    tell = "print(f'rank {sys.flags.dev_mode} {sys.flags.optimize}\\n', end='', flush=True)"
    script.write_text(PROGRAM + tell)
    command = [sys.executable, "-X", "dev", "-O", str(script), "--lr", "0.1"]
    assert told(run_command(command))[2:] == ["rank True 1"] * 2


def test_a_module(script: Path) -> None:
    command = ["env", "-C", str(script.parent), sys.executable, "-m", "program", "--lr", "0.1"]
    assert told(run_command(command)) == TOLD


@pytest.mark.thorough
def test_a_package(script: Path) -> None:
    package = script.parent / "package"
    package.mkdir()
    script.rename(package / "__main__.py")
    command = ["env", "-C", str(script.parent), sys.executable, "-m", "package", "--lr", "0.1"]
    assert told(run_command(command)) == TOLD


@pytest.mark.thorough
def test_a_folder(script: Path) -> None:
    script.rename(script.parent / "__main__.py")
    assert told(run_command([sys.executable, str(script.parent), "--lr", "0.1"])) == TOLD


ALWAYS = ["--check-hash-based-pycs", "always"]


@pytest.mark.parametrize(
    ("arguments", "divided"),
    [
        (["-um", "p", "a"], (["-u"], "-m", ["p", "a"])),
        (["-uc", "text", "-m"], (["-u"], "-c", ["text", "-m"])),
        (["-mp", "a"], ([], "-m", ["p", "a"])),
        (["-OW", "ignore", "s.py", "-c"], (["-OW", "ignore"], "", ["s.py", "-c"])),
        (["-Xdev", "-W", "error", "s.py"], (["-Xdev", "-W", "error"], "", ["s.py"])),
        ([*ALWAYS, "s.py"], (ALWAYS, "", ["s.py"])),
        (["-u", "-"], (["-u"], "", ["-"])),
        (["-i", "s.py", "-i"], ([], "", ["s.py", "-i"])),
        (["-iuW", "ignore", "s.py"], (["-uW", "ignore"], "", ["s.py"])),
        (["-Xi", "-ic", "text"], (["-Xi"], "-c", ["text"])),
    ],
)
def test_flags_are_read_as_the_interpreter_reads_them(arguments: list[str], divided: Any) -> None:
    assert _divided(arguments) == divided


@pytest.mark.thorough  # what a debugger that is asked for does is an everyday test
def test_a_breakpoint_is_one_of_rank_0(script: Path) -> None:
    script.write_text(PROGRAM.replace("total =", "breakpoint()\ntotal ="))
    command = f"echo continue | {sys.executable} {script} --lr 0.1"
    done = run_command(["sh", "-c", command])
    assert done.stdout.count("(Pdb)") == 1
    assert done.returncode == 0, done.stderr
    assert len([line for line in done.stdout.splitlines() if ": 3 [" in line]) == 2


def test_an_interactive_rank_0(script: Path) -> None:
    """Goes on with what is typed, and learns of a rank that has failed."""
    script.write_text(PROGRAM + "\nif pydist.rank() == 1: raise ValueError('mine')\n")
    command = f"echo 'import time; time.sleep(600)' | {sys.executable} -i {script} --lr 0.1"
    done = run_command(["bash", "-c", f"{command}; exit ${{PIPESTATUS[1]}}"])
    assert done.returncode != 0
    assert "exited with status 1; all ranks end." in done.stderr


def test_another_thread_and_a_group_of_the_programs_own_are_refused() -> None:
    program = """
import threading
import torch.distributed as dist
import pydist

def ask():
    try: pydist.init(processes=2)
    except pydist.InvalidUsage as error: print(error)

thread = threading.Thread(target=ask)
thread.start(); thread.join()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
pydist.init(processes=1)
pydist.shutdown()
ask()
"""
    done = run_command([sys.executable, "-c", program])
    in_a_thread, beside_a_group = done.stdout.splitlines()
    assert "main thread" in in_a_thread
    assert beside_a_group.startswith("processes=2 comes too late: the program has made a default")


@pytest.mark.thorough
def test_a_text() -> None:
    assert told(run_command([sys.executable, "-c", PROGRAM, "--lr", "0.1"])) == TOLD


@pytest.mark.thorough
def test_a_script_that_goes_elsewhere_first(script: Path) -> None:
    script.write_text("import os\nos.chdir('/')\n" + PROGRAM)
    command = ["env", "-C", str(script.parent), sys.executable, "program.py", "--lr", "0.1"]
    assert told(run_command(command)) == TOLD


@pytest.mark.thorough
def test_all_ranks_have_the_same_arguments(tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(
        "import sys, pydist; pydist.init(processes=2); print(*sys.argv, end='\\n', flush=True)"
    )
    done = run_command([sys.executable, "-u", "run.py", "--lr", "1"], cwd=str(tmp_path))
    assert sorted(done.stdout.splitlines()) == ["run.py --lr 1"] * 2, done.stderr


def test_a_debugger_stays_in_rank_0(script: Path) -> None:
    break_at = script.read_text().splitlines().index("pydist.init(processes=2)") + 2
    command = [sys.executable, "-m", "pdb", "-c", f"break {break_at}", "-c", "continue"]
    command += ["-c", "p 'stopped in', pydist.rank()", "-c", "continue", "-c", "quit"]
    done = run_command([*command, str(script), "--lr", "0.1"])
    assert done.stdout.count("('stopped in', 0)") == 1
    assert told(done) == TOLD


def test_under_a_launcher_its_ranks_are_taken(script: Path) -> None:
    # The launcher chooses the GPUs, so other ones are as good.
    script.write_text(PROGRAM.replace("=2)", "=2, gpus=0)") + "pydist.init(gpus=[0])\n")
    launch = [sys.executable, "-m", "pydist", "run", "-n", "2"]
    assert told(run_command([*launch, str(script), "--lr", "0.1"])) == TOLD


def ask_for_two() -> str:
    with pytest.raises(pydist.InvalidUsage) as caught:
        pydist.init(processes=2)
    return str(caught.value)


def test_under_a_launcher_the_numbers_must_agree() -> None:
    [told] = run_ranks(ask_for_two, 1)
    assert "processes=2 asks for 2 ranks, and torchrun's variables say that there are 1" in told


@pytest.mark.parametrize("read", everyday("< {}", thorough=("/dev/stdin < {}", "<(cat {})")))
def test_what_is_no_script_is_refused(script: Path, read: str) -> None:
    done = run_command(["bash", "-c", f"{sys.executable} {read.format(script)}"])
    assert done.returncode != 0
    assert "pydist.spawn starts ranks there" in done.stderr


REFUSED = {
    "pydist.init(processes=0)": "processes=0 is not valid",
    "pydist.init(processes=True)": "processes=True is not valid",
    "pydist.init(gpus='x')": "gpus='x'",
    "pydist.init(); pydist.init(processes=2)": "the job runs with 1 rank(s) already",
    "pydist.init(); pydist.init(gpus=2)": "the job runs without gpus= already, so gpus=2",
    "pydist.init(gpus=0); pydist.init(gpus=[]); pydist.init(gpus=[1])": "with gpus=0 already, so",
}


def ask_for_what_can_not_be() -> list[str]:
    told = []
    for call in REFUSED:
        with pytest.raises(pydist.InvalidUsage) as caught:
            exec(call)
        told.append(str(caught.value))
        pydist.shutdown()
    return told


def test_what_can_not_be_is_refused() -> None:
    [told] = run_ranks(ask_for_what_can_not_be, 1, env=NO_LAUNCHER)
    for said, message in zip(told, REFUSED.values(), strict=True):
        assert message in said


@pytest.mark.thorough  # the next test shows it every day
def test_gpus_can_not_be_had_once_ranks_were_started() -> None:
    program = """
import pydist

pydist.init(processes=2)
if pydist.rank() == 0:
    try:
        pydist.init(gpus=2)
    except pydist.InvalidUsage as error:
        print(error)
"""
    done = run_command([sys.executable, "-c", program])
    assert done.stdout.startswith("the job runs without gpus= already, so gpus=2 can't be had now")


def test_what_rank_0_is_refused_ends_all() -> None:
    """The other ranks can't know which GPUs were chosen: they learn why rank 0 has ended."""
    program = """
import pydist, torch

pydist.init(processes=2)
pydist.init(gpus=2)
pydist.all_reduce(torch.ones(1))
print("went on", flush=True)
"""
    done = run_command([sys.executable, "-c", program])
    assert done.returncode == 1
    assert "went on" not in done.stdout
    refusal = "the job runs without gpus= already, so gpus=2 can't be had now"
    assert f"InvalidUsage: {refusal}" in done.stderr
    assert re.search(rf"rank 0 \(pid .*\) has ended with InvalidUsage: {refusal}", done.stderr)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(None, "can't be read", marks=pytest.mark.thorough),
        pytest.param("[engine", "can't be read", marks=pytest.mark.thorough),
        ("[engine]\ntimeuot = 3\n", "there is no engine.timeuot; did you mean engine.timeout?"),
    ],
)
def test_a_bad_configuration_starts_nothing(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "train.toml"
    if text is not None:
        path.write_text(text)
    [(told, is_alone, children)] = run_ranks(
        join_with_a_bad_configuration, 1, env={**NO_LAUNCHER, "PYDIST_CONFIG": str(path)}
    )
    assert message in told
    assert is_alone  # one error, and no other one on the way out of it
    assert children == 0


def join_with_a_bad_configuration() -> tuple[str, bool, int]:
    with pytest.raises(pydist.InvalidUsage) as caught:
        pydist.init(processes=2)
    error = caught.value
    return str(error), error.__context__ is error.__cause__, len(psutil.Process().children())


def join_alone_without_gpus() -> tuple[int, str, int]:
    pydist.init(gpus=0, processes=1)
    return pydist.world_size(), str(pydist.device()), len(psutil.Process().children())


def test_no_gpus_and_one_process_start_nothing() -> None:
    assert run_ranks(join_alone_without_gpus, 1, env=NO_LAUNCHER) == [(1, "cpu", 0)]


def test_a_rank_that_ends_well_before_it_joins_is_named_at_once() -> None:
    program = """
import os, sys
import pydist

if os.environ.get("RANK") == "2":
    sys.exit(0)
try:
    pydist.init(processes=3, timeout=600)
except pydist.PeerLost as error:
    sys.stdout.write(f"{error.ranks} {error.cause}\\n")
"""
    begin_s = time.monotonic()
    done = run_command([sys.executable, "-c", program])
    assert done.stdout == "(2,) exited with status 0\n" * 2, done.stderr
    assert time.monotonic() - begin_s < 100.0  # before the time-out


FAILING = """
import os, sys, time
import torch
import pydist
import pydist.job.own_ranks as own_ranks

own_ranks._GRACE_S = 0.5
pydist.init(processes=NUMBER)
print(f"pid {os.getpid()}\\n", end="", flush=True)
pydist.barrier()
if pydist.rank() == RANK:
    END
AFTER
"""


def failing(number: int, rank: int, end: str, after: str) -> str:
    """A program of so many ranks, of which one ends, and what the others do then."""
    values = {"NUMBER": str(number), "RANK": str(rank), "END": end, "AFTER": after}
    return re.sub("|".join(values), lambda found: values[found[0]], FAILING)


RAISES = "raise ValueError('mine')"
ENDS = "os._exit(3)"
IS_KILLED = "os.kill(os.getpid(), 9)"
WAITS, COMPUTES = "pydist.barrier()", "time.sleep(600)"


# Which rank ends, how, what the others do, and with what status the program ends: that of the rank,
# or 1 where rank 0 raises because of it.
@pytest.mark.parametrize(
    "case",
    everyday(
        (0, RAISES, WAITS, 1),
        (2, ENDS, COMPUTES, 3),
        thorough=(
            (2, IS_KILLED, WAITS, 1),
            (0, RAISES, COMPUTES, 1),
            (0, IS_KILLED, COMPUTES, -9),
            (2, ENDS, WAITS, 1),
            (2, RAISES, WAITS, 1),
            (2, RAISES, COMPUTES, 1),
        ),
    ),
)
def test_all_end_when_one_fails(case: tuple[int, str, str, int]) -> None:
    rank, end, after, status = case
    number = 2 if rank == 0 else 3
    program = failing(number, rank, end, after)
    done = run_command([sys.executable, "-c", program])
    assert done.returncode == status
    pids = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("pid ")]
    assert len(pids) == number
    if rank == 2:
        assert "rank 2 (pid " in done.stderr
    else:  # what the others do then is not their fault
        assert not re.search(r"pydist: rank [12] ", done.stderr), done.stderr
    wait_for_ends(pids)


def wait_for_ends(pids: list[int]) -> None:
    """Returns when none of these runs any more: the test's own limit ends it otherwise."""
    while any(psutil.pid_exists(pid) for pid in pids):
        time.sleep(0.05)


def running(program: str) -> subprocess.Popen[str]:
    """Rank 0 of a program, which a test reads and sends signals to."""
    return subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


@pytest.mark.parametrize(
    "number", everyday(signal.SIGKILL, thorough=(signal.SIGINT, signal.SIGTERM))
)
def test_the_others_end_with_rank_0(number: signal.Signals) -> None:
    program = failing(2, -1, "pass", "time.sleep(600)")
    with running(program) as first:
        assert first.stdout is not None
        pids = [int(first.stdout.readline().split()[1]) for _ in range(2)]
        assert first.pid in pids
        first.send_signal(number)
        assert first.wait(60 * PATIENCE) != 0
    wait_for_ends(pids)


LINGERING = """
import pydist
import pydist.job.own_ranks as own_ranks

PATIENCE
pydist.init(processes=2)
pydist.barrier()
if pydist.rank() == 1:
    import time
    pydist.shutdown()
    print("late", flush=True)
    time.sleep(600)
"""


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = int(next(line.split()[1] for line in status.splitlines() if "SigCgt" in line), 16)
    return bool(caught >> (number - 1) & 1)


def test_ctrl_c_while_the_others_are_waited_for() -> None:
    program = LINGERING.replace("PATIENCE", "")
    with running(program) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "late\n"
        others = psutil.Process(first.pid).children()
        # An interpreter that is ending swallows Ctrl-C, until rank 0 has begun to wait.
        while catches(first.pid, signal.SIGINT):
            time.sleep(0.05)
        first.send_signal(signal.SIGINT)
        assert first.wait(60 * PATIENCE) != 0
    assert len(others) == 1
    wait_for_ends([other.pid for other in others])


def test_the_others_are_waited_for_longer_than_after_a_failure() -> None:
    program = LINGERING.replace("PATIENCE", "own_ranks._GRACE_S = 0.1")
    done = run_command([sys.executable, "-c", program.replace("sleep(600)", "sleep(1)")])
    assert done.returncode == 0, done.stderr
    assert done.stdout == "late\n"
    assert done.stderr == ""


@pytest.mark.parametrize(
    "end", everyday("sys.exit(3)", thorough=("raise SystemExit(3)", "exit(3)"))
)
def test_the_others_end_soon_where_rank_0_ends_badly(end: str) -> None:
    program = LINGERING.replace("PATIENCE", "own_ranks._GRACE_S = 0.1") + f"else: {end}"
    done = run_command([sys.executable, "-c", "import sys\n" + program])
    assert done.returncode == 3
    assert re.fullmatch(
        r"pydist: rank 0 has ended with status 3; rank 1 \(pid \d+\) still ran 0\.1 s later: "
        r"SIGTERM\.\n",
        done.stderr,
    )


def test_a_rank_that_fails_after_rank_0_has_ended_counts() -> None:
    program = failing(2, 1, "time.sleep(1); os._exit(4)", "pydist.shutdown()")
    done = run_command([sys.executable, "-c", program])
    assert done.returncode == 4
    assert "exited with status 4" in done.stderr


def test_a_rank_that_fails_while_rank_0_cleans_up_ends_it() -> None:
    program = """
import atexit, os, time
import pydist
import pydist.job.own_ranks as own_ranks

own_ranks._GRACE_S = 0.1
if "RANK" not in os.environ:
    atexit.register(time.sleep, 600)  # it runs after what was registered later
pydist.init(processes=2)
if pydist.rank() == 1:
    pydist.shutdown()
    os._exit(5)
"""
    done = run_command([sys.executable, "-c", program])
    assert done.returncode == -signal.SIGTERM
    assert re.fullmatch(
        r"pydist: rank 1 \(pid \d+\) exited with status 5; all ranks end\.\n", done.stderr
    )
