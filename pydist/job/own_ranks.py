"""The other ranks of a script that nobody has launched: `pydist.init(processes=4)`.

This process becomes rank 0, so a debugger stays in it, and starts its own script again for each of
the others, which find their job in the environment. Whoever of these fails ends all: a thread of
this process watches them. Once this process's own program has ended well, it waits for them; once
it has ended badly, they have a few seconds. The kernel ends them with this process.
"""

import atexit
import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from pydist import _native
from pydist.config import in_force
from pydist.config.config import Config
from pydist.errors import InvalidUsage
from pydist.gpu import selection
from pydist.gpu.visible import visible_gpus
from pydist.job import current
from pydist.job.launchers import read_placement
from pydist.job.meeting.launcher_news import note_end
from pydist.job.meeting.local_store import serve_local_store
from pydist.job.processes import folder_at_import
from pydist.job.spawn import job_variables
from pydist.job.spawn_results import how_it_ended
from pydist.job.tied_start import tied

# How long ranks get to end by themselves once one has failed or rank 0 has ended badly, and again
# after SIGTERM.
_GRACE_S = 3.0
# How often the others are looked at.
_LOOK_S = 0.1


@dataclass
class _Others:
    """The ranks that this process has started; rank 1 is the first."""

    processes: list[subprocess.Popen[bytes]]
    # Where all meet. Served here, so it must live as long as this process.
    store: dist.TCPStore
    pid: int
    has_told: bool = False
    has_told_of_end: bool = False
    watcher: threading.Thread | None = None
    # The program has ended, and the watcher's part is over.
    is_handed_over: threading.Event = field(default_factory=threading.Event)
    # Then: the ranks that still ran, and those that had failed. None: it has not ended.
    at_end: tuple[list[int], list[int]] | None = None

    def running(self) -> list[int]:
        return [i + 1 for i, each in enumerate(self.processes) if each.poll() is None]

    def failed(self) -> list[int]:
        return [i + 1 for i, each in enumerate(self.processes) if each.poll() not in (None, 0)]


_others: _Others | None = None


def has_started_ranks() -> bool:
    """Whether this process is rank 0 and has started the others."""
    return _others is not None and os.getpid() == _others.pid


def start_own_ranks(
    processes: int | None, gpus: "selection.Gpus | None", configuration: Config | None
) -> "selection.Choice | None":
    """Starts this script again for all ranks but the first, which this process becomes.

    Does nothing in those, nor where a launcher has started as many.

    Args:
        processes: How many ranks; None: one for each of `gpus`.
        gpus: As for `pydist.spawn`; None: whichever are visible.
        configuration: What the program gives `pydist.init`.

    Returns:
        What was chosen for `gpus`; None where that is None, or a launcher's matter.

    Raises:
        InvalidUsage: `processes` is less than 1, or another number than a launcher's; there are no
            such GPUs, or the program has used one already; nobody can tell how to start the
            program again; the file that PYDIST_CONFIG names is not valid.
    """
    is_whole = isinstance(processes, int) and not isinstance(processes, bool)
    if processes is not None and not (is_whole and processes >= 1):
        raise InvalidUsage(f"processes={processes!r} is not valid; it must be 1 or more.")
    placement = read_placement()
    if placement.launcher != "no launcher":
        if processes is not None and processes != placement.world_size:
            raise InvalidUsage(
                f"processes={processes} asks for {processes} ranks, and {placement.launcher} say "
                f"that there are {placement.world_size}: leave processes= out under a launcher, or "
                "start the script without one."
            )
        return None
    in_force.over_file(configuration)  # here, and not in each of the ranks
    choice = None
    variables: dict[str, str] = {}
    if gpus is not None:
        chosen = selection.choose_gpus(gpus)
        choice = selection.Choice(gpus, chosen, visible_gpus() if chosen else ())
        variables = selection.gpu_variables(chosen)
        if chosen:
            if torch.cuda.is_initialized():
                raise InvalidUsage(
                    f"gpus={gpus!r} comes too late: the program has used a GPU already. Call "
                    "pydist.init before."
                )
            processes = selection.process_count(
                chosen, processes, f"gpus={gpus!r}", f"processes={processes}"
            )
    os.environ.update(variables)
    if processes is not None and processes > 1:
        _start(processes, _own_command())
    return choice


def _start(count: int, command: Sequence[str]) -> None:
    global _others
    if threading.current_thread() is not threading.main_thread():
        raise InvalidUsage(
            "processes= must be asked for in the main thread, with which the other ranks end"
        )
    if dist.is_initialized():
        raise InvalidUsage(
            f"processes={count} comes too late: the program has made a default process group of "
            f"{dist.get_world_size()} already. Call pydist.init before, which makes one of all."
        )
    in_force.leave_environment()  # the others read the configuration by themselves
    before = dict(os.environ)
    store = serve_local_store()
    os.environ.update(job_variables(count, store.port, None))
    if "OMP_NUM_THREADS" not in before:  # torch has counted this process's cores already
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    os.environ.update(RANK="0", LOCAL_RANK="0")
    command = tied(command, by_this_python=True)
    # A debugger in the others would have nobody to talk to.
    variables = os.environ | {"PYTHONBREAKPOINT": "0"}
    variables.pop("PYTHONINSPECT", None)  # see `_divided`
    others = _Others([], store, os.getpid())
    try:
        with _outside_debugger():
            for rank in range(1, count):
                others.processes.append(
                    subprocess.Popen(
                        [sys.executable, *command],
                        env=variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                        cwd=folder_at_import(),
                        stdin=subprocess.DEVNULL,
                        # Ctrl-C is for rank 0, whose debugger may want it; the others end with it.
                        start_new_session=True,
                    )
                )
    except OSError as error:
        _end(others)
        os.environ.clear()
        os.environ.update(before)
        raise InvalidUsage(
            f"processes={count}: rank {len(others.processes) + 1} can't be started: {error}"
        ) from error
    _others = others
    # Before what leaves the job at exit is registered, so that it comes after that.
    atexit.register(_at_exit)
    current.before_leaving_at_exit.append(_at_end_of_program)
    others.watcher = threading.Thread(
        target=_watch, args=(others,), name="pydist-ranks", daemon=True
    )
    others.watcher.start()


def _outside_debugger() -> AbstractContextManager[None]:
    """Keeps debugpy's debugger out of the processes that are started meanwhile.

    It puts itself into the arguments of every Python process, which then waits for a client. Ours
    become another program under the same process number (`tied`), and debugpy takes that for one
    process debugged twice: neither goes on, nor ends with this one.
    """
    skip = getattr(sys.modules.get("pydevd"), "skip_subprocess_arg_patch", nullcontext)
    entered: AbstractContextManager[None] = skip()
    return entered


def _own_command() -> list[str]:
    """The arguments by which the interpreter runs this program once more.

    Where the interpreter runs it by itself, they are the interpreter's own, with its flags. Where a
    debugger or another program runs it, they are made of the main module and of `sys.argv`.
    """
    if multiprocessing.parent_process() is not None:
        raise InvalidUsage(
            "processes= starts the program again, and this process was started by multiprocessing: "
            "ask for it in the program's first process, or use pydist.spawn"
        )
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    flags, what, rest = _divided(sys.orig_argv[1:])
    if what == "-c":
        return [*flags, "-c", *rest]
    if spec is not None and spec.name == "__main__":  # a folder, or an archive
        return [*flags, os.path.abspath(sys.argv[0]), *sys.argv[1:]]
    if spec is not None:
        name = spec.name.removesuffix(".__main__") if spec.parent else spec.name
        is_itself = what == "-m" and rest[0] in (name, spec.name)
        return [*flags, "-m", name, *(rest[1:] if is_itself else sys.argv[1:])]
    # What a script has for itself alone (/dev/stdin, /dev/fd/63) the others don't find there.
    if file is None or not Path(file).exists() or _is_made_by_the_kernel(file):
        raise InvalidUsage(
            "processes= starts the script again, and this program is no script: it is a notebook, "
            "an interactive session, or read from standard input or a pipe. pydist.spawn starts "
            "ranks there."
        )
    is_itself = what == "" and rest != [] and Path(rest[0]).name == Path(file).name
    given = rest if is_itself else sys.argv
    # As it was given, so that all ranks have the same `sys.argv`; but by its full path where the
    # program has gone to another folder before.
    is_there = os.path.realpath(Path(folder_at_import() or ".", given[0])) == os.path.realpath(file)
    return [*flags, given[0] if is_there else os.path.abspath(file), *given[1:]]


def _is_made_by_the_kernel(file: str) -> bool:
    return Path(os.path.abspath(file)).parts[1] in ("dev", "proc")


def _divided(arguments: Sequence[str]) -> tuple[list[str], str, list[str]]:
    """The interpreter's flags, then "-c", "-m" or "", and what follows that.

    Short flags may stand together (`-um module`), and some have a value, in the same word or in the
    next one. `-i` is left out: an interpreter that asks for more, and finds nobody, ends well even
    where its program has failed.
    """
    flags: list[str] = []
    at = 0
    while at < len(arguments) and arguments[at].startswith("-") and arguments[at] != "-":
        word = arguments[at]
        at += 1
        if word.startswith("--"):
            flags.append(word)
            if word == "--check-hash-based-pycs":
                flags.append(arguments[at])
                at += 1
            continue
        short_flags = "-"
        for place, letter in enumerate(word[1:], 1):
            value = word[place + 1 :]
            if letter in "cm":
                flags += [short_flags] if short_flags != "-" else []
                return flags, f"-{letter}", [*([value] if value else []), *arguments[at:]]
            if letter in "WX":
                short_flags += letter + value
                if not value:
                    flags.append(short_flags)
                    short_flags = arguments[at]
                    at += 1
                break
            if letter != "i":
                short_flags += letter
        flags += [short_flags] if short_flags != "-" else []
    return flags, "", list(arguments[at:])


def _watch(others: _Others) -> None:
    """Ends all ranks, this one too, some time after one has failed."""
    is_over = False
    while not (failed := others.failed()):
        _tell_of_ends(others)
        if is_over or others.is_handed_over.wait(_LOOK_S):
            return
        is_over = not others.running()  # one of them may have failed since it was asked
    _tell(others, failed)
    if others.is_handed_over.wait(_GRACE_S):
        return
    _end(others)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        os._exit(_status_for(others, failed))  # as the signal would, but for the status
    os.kill(others.pid, signal.SIGTERM)
    if not others.is_handed_over.wait(_GRACE_S):
        os.kill(others.pid, signal.SIGKILL)


def _tell_of_ends(others: _Others) -> None:
    """Lets ranks that are still to join know of one that has ended, though well: it won't come."""
    if others.has_told_of_end:
        return
    for rank, process in enumerate(others.processes, 1):
        if process.poll() is not None:
            others.has_told_of_end = True
            note_end(others.store, rank, process.pid, how_it_ended(process.returncode))
            return


def _tell(others: _Others, failed: Sequence[int]) -> None:
    """Says once who has failed first."""
    if not others.has_told:
        others.has_told = True
        print(_words_for(others, failed), file=sys.stderr, flush=True)


def _words_for(others: _Others, failed: Sequence[int]) -> str:
    first = others.processes[failed[0] - 1]
    how = how_it_ended(first.returncode)
    return f"pydist: rank {failed[0]} (pid {first.pid}) {how}; all ranks end."


def _status_for(others: _Others, failed: Sequence[int]) -> int:
    code = others.processes[failed[0] - 1].returncode
    return code if code > 0 else 1


def _end(others: _Others) -> None:
    for process in others.processes:
        if process.poll() is None:
            process.terminate()
    until_s = time.monotonic() + _GRACE_S
    for process in others.processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, until_s - time.monotonic()))
        if process.poll() is None:
            process.kill()
        process.wait()


def _at_end_of_program() -> tuple[list[int], list[int]]:
    """The ranks that still ran when this one's program had ended, and those that had failed.

    Asked for before this rank leaves the job. Nobody waits for the others from then on but the C
    library: it learns how this rank has ended, and whether others fail because of that.
    """
    others = _others
    if others is None or os.getpid() != others.pid:
        return [], []
    if others.at_end is None:
        others.is_handed_over.set()
        if others.watcher is not None:
            others.watcher.join()
        others.at_end = others.running(), others.failed()
    return others.at_end


def _at_exit() -> None:
    """Hands the others over to the C library, which knows with which status the program ends."""
    others = _others
    if others is None or os.getpid() != others.pid:
        return
    try:
        # Ctrl-C ends the process from here on: an interpreter that ends would swallow it.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        running, failed = _at_end_of_program()
        # Modules are cleared when the interpreter ends, but the process lives on until the others
        # have ended. Until then they need the store, and their Popen objects must not wait for
        # them. So this object is never freed.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(others))
        left = [(f"rank {rank}", others.processes[rank - 1].pid) for rank in running]
        status, words = 0, ""
        if failed:
            status = _status_for(others, failed)
            words = "" if others.has_told else _words_for(others, failed)
        _native.wait_for_children_at_exit(left, _GRACE_S, status, words)
    except KeyboardInterrupt:
        _end(others)
        os._exit(128 + signal.SIGINT)
