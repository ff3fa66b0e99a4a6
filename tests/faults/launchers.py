"""Launchers that are killed, and shells that end: what becomes of the ranks and their workers."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]
from launch import clean_environment
from scene import FailedDrillError, LauncherDrill, Result

# Each rank has a worker of a data loader, and says so once all ranks have talked to each other.
PROGRAM = """
import multiprocessing, os, sys, time
from pathlib import Path
import torch, pydist

def run(name):
    folder = Path(name)
    pydist.init(timeout=60)
    loader = torch.utils.data.DataLoader(range(1000), num_workers=1, batch_size=1)
    batches = iter(loader)
    next(batches)
    pydist.barrier()
    pids = [os.getpid(), *(child.pid for child in multiprocessing.active_children())]
    part = folder / f"part-{pydist.rank()}"
    part.write_text(" ".join(map(str, pids)))
    part.rename(folder / f"pids-{pydist.rank()}")
    goes_on = torch.ones(1)
    while goes_on.item():
        goes_on = torch.tensor([float(not (folder / "end").exists())])
        pydist.all_reduce(goes_on, "min")
        time.sleep(0.01)
    (folder / f"ended-{pydist.rank()}").touch()

if __name__ == "__main__":
    if sys.argv[2] == "spawn":
        pydist.spawn(run, (sys.argv[1],), nprocs=2)
    else:
        run(sys.argv[1])
"""
RANKS = 2
START_S = 60.0
# torch's workers look every 5 seconds whether their rank still lives.
WITHIN_S = 8.0


def _command(folder: Path, launcher: str) -> list[str]:
    script = folder / "program.py"
    script.write_text(PROGRAM)
    run = [sys.executable, "-m", "pydist", "run", "-n", str(RANKS)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    how: dict[str, list[str]] = {
        "pydist run": run,
        "pydist run --on-failure=continue": [*run, "--on-failure=continue"],
        "torchrun": [*torchrun, f"--nproc-per-node={RANKS}"],
        "pydist.spawn": [sys.executable],
    }
    mode = "spawn" if launcher == "pydist.spawn" else "run"
    return [*how[launcher], str(script), str(folder), mode]


@contextlib.contextmanager
def _started(command: list[str], folder: Path, slack: float) -> Iterator[subprocess.Popen[bytes]]:
    """A launcher whose ranks all run; kills what is left at the end."""
    with (folder / "output").open("wb") as output:
        launcher = subprocess.Popen(
            command,
            env=clean_environment({"PYTHONFAULTHANDLER": "1"}),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + START_S * slack
        while len(list(folder.glob("pids-*"))) < RANKS:
            if launcher.poll() is not None or time.monotonic() > deadline:
                raise _failed("the ranks have not started", folder)
            time.sleep(0.02)
        yield launcher
    finally:
        for process in [*_family(launcher.pid), *_alive(_pids(folder))]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        launcher.kill()
        launcher.wait()


def _family(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return list(psutil.Process(pid).children(recursive=True))
    return []


def _pids(folder: Path) -> list[int]:
    return [int(pid) for file in folder.glob("pids-*") for pid in file.read_text().split()]


def _alive(pids: list[int]) -> list[psutil.Process]:
    alive = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
    return alive


def _failed(why: str, folder: Path) -> FailedDrillError:
    text = (folder / "output").read_text(errors="replace")
    return FailedDrillError(f"{why}\n{text[-4000:]}")


def killed(launcher: str) -> Callable[[Path, float], Result]:
    """SIGKILL to the launcher: it ends nothing itself."""

    def perform(folder: Path, slack: float) -> Result:
        with _started(_command(folder, launcher), folder, slack) as process:
            pids = _pids(folder)
            ranks = [int(file.read_text().split()[0]) for file in folder.glob("pids-*")]
            begin = time.monotonic()
            process.kill()
            seconds = _wait_for_ends(ranks, begin, WITHIN_S * slack)
            _wait_for_ends(pids, begin, WITHIN_S * slack)
            left = [" ".join(each.cmdline()[:4]) for each in _alive(pids)]
        return Result("", seconds, left)

    return perform


def _wait_for_ends(pids: list[int], begin: float, within_s: float) -> float:
    while _alive(pids) and time.monotonic() < begin + within_s:
        time.sleep(0.005)
    return time.monotonic() - begin


def started_with_nohup(folder: Path, slack: float) -> Result:
    """The shell and its terminal end; the job goes on to its own end."""
    command = ["nohup", *_command(folder, "pydist run")]
    with _started(command, folder, slack) as process:
        pids = [process.pid, *_pids(folder)]
        # As the kernel does when a terminal is closed.
        os.killpg(process.pid, signal.SIGHUP)
        time.sleep(0.5)
        if process.poll() is not None or len(_alive(pids)) < len(pids):
            raise _failed("SIGHUP has ended a job that was started with nohup", folder)
        begin = time.monotonic()
        (folder / "end").touch()
        try:
            status = process.wait(20 * slack)
        except subprocess.TimeoutExpired:
            raise _failed("the job does not come to its end", folder) from None
        if status != 0 or len(list(folder.glob("ended-*"))) < RANKS:
            raise _failed(f"the job ended with status {status}", folder)
        seconds = time.monotonic() - begin
        _wait_for_ends(pids, begin, WITHIN_S * slack)
        return Result("", seconds, [" ".join(each.cmdline()[:4]) for each in _alive(pids)])


LAUNCHER_DRILLS = [
    LauncherDrill(f"SIGKILL of {name}", killed(name), "nothing: all end")
    for name in ("pydist run", "pydist run --on-failure=continue", "torchrun", "pydist.spawn")
] + [
    LauncherDrill(
        "the end of the shell that has started pydist run with nohup",
        started_with_nohup,
        "nothing: all goes on",
    )
]
