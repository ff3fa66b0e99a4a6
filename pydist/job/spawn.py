"""Starting ranks from within a program: for notebooks, and scripts that can't be run again.

Note [No second main]
multiprocessing runs the main script once more in every process that it spawns, so that functions
of the script can be found by name there. A script without a guard would start ranks from within
ranks, and a notebook has no script. With cloudpickle (installed with IPython, Ray, Dask and many
others) functions of the main script travel by value, so the children need no main module, and
`_without_main` keeps multiprocessing from running one. Without cloudpickle it is as multiprocessing
has it: the function must be importable, and a script needs the guard.
"""

import atexit
import contextlib
import faulthandler
import importlib
import multiprocessing.connection
import os
import pickle
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import process as multiprocessing_process
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import torch.distributed as dist
import torch.multiprocessing as torch_multiprocessing

from pydist.config import in_force
from pydist.config.variables import environment_with, parse_backend
from pydist.errors import InvalidUsage, Timeout
from pydist.job import last_words
from pydist.job.log import logger
from pydist.job.meeting.launcher_news import note_end
from pydist.job.meeting.local_store import serve_local_store
from pydist.job.pickling import find_unpicklable
from pydist.job.processes import end_with
from pydist.job.recovery.last_ones import LastOnes
from pydist.job.spawn_results import (
    Course,
    Failure,
    failure_file,
    has_returned,
    how_it_ended,
    print_stacks,
    raise_first,
    result_file,
    result_or_error,
    stacks_file,
)

if TYPE_CHECKING:
    from pydist.gpu.selection import Gpus

__all__ = ["spawn"]

R = TypeVar("R")

# How long the other ranks get to end by themselves once one has failed, and again after SIGTERM.
_GRACE_S = 2.0

# How often the ranks are looked at that may have been stopped.
_LOOK_S = 1.0

_lock = threading.Lock()


@overload
def spawn(
    fn: Callable[..., R],
    args: Sequence[Any] = (),
    nprocs: int | None = None,
    *,
    gpus: "Gpus | None" = None,
    timeout: float | None = None,
    backend: str | None = None,
    on_failure: Literal["stop"] = "stop",
) -> list[R]: ...


@overload
def spawn(
    fn: Callable[..., R],
    args: Sequence[Any] = (),
    nprocs: int | None = None,
    *,
    gpus: "Gpus | None" = None,
    timeout: float | None = None,
    backend: str | None = None,
    on_failure: Literal["continue"],
) -> list[R | Exception]: ...


def spawn(
    fn: Callable[..., R],
    args: Sequence[Any] = (),
    nprocs: int | None = None,
    *,
    gpus: "Gpus | None" = None,
    timeout: float | None = None,
    backend: str | None = None,
    on_failure: Literal["stop", "continue"] = "stop",
) -> list[R] | list[R | Exception]:
    """Runs `fn(*args)` on new processes of this host, each a rank of one job, and waits for them.

    In the processes `pydist.init()` finds its job as it does under `pydist run`; DataParallel joins
    it by itself. Functions of the main script or notebook work if cloudpickle is installed.

    Args:
        fn: what each rank runs. It and its arguments are sent by pickle.
        args: its arguments, the same for every rank; tensors are copied.
        nprocs: how many processes; by default one for each of `gpus`, otherwise one for each core
            that this process may use.
        gpus: the GPUs that the ranks see, of those that this process sees: how many (0 for none,
            -1 for all), which (`[0, 2]`, also as an array or tensor), or `"auto:2"` for idle ones;
            strings are read as by `pydist run --gpus`, except that `"0"` is the first GPU. By
            default all.
        timeout: seconds that the whole call may take; by default without limit. When it has passed,
            each rank prints its stacks on standard error.
        backend: for the ranks' PYDIST_BACKEND; by default this process's.
        on_failure: what becomes of the other ranks when one has failed. "stop" ends them;
            "continue" lets them go on, for functions that call `pydist.reform`.

    Returns:
        What `fn` returned, in rank order. With `on_failure="continue"`, in the place of a rank that
        failed, the exception that it raised, or `PeerLost` where its process died or the others
        had gone on without it and ended.

    Raises:
        InvalidUsage: `fn`, `args` or a result can't be pickled; the message names the part by its
            attribute path. Or `nprocs` is less than 1, or the script lacks the guard, or there are
            no such `gpus`, or not as many as `nprocs`.
        PeerLost: a rank's process died.
        Timeout: the call took longer than `timeout`.
        Exception: whatever `fn` raised on the rank that failed first, with that rank's traceback
            as its cause. The other ranks have ended by then. With `on_failure="continue"` this and
            `PeerLost` are raised only where no rank has returned.

    Example:
        >>> import pydist
        >>> pydist.spawn(max, ((1, 5, 3),), nprocs=2)
        [5, 5]
    """
    if getattr(multiprocessing_process.current_process(), "_inheriting", False):
        raise InvalidUsage(
            "pydist.spawn ran again while a rank was importing the main script. Put the call under "
            'if __name__ == "__main__":, or install cloudpickle.'
        )
    if on_failure not in ("stop", "continue"):
        raise InvalidUsage(f"on_failure={on_failure!r} is not valid; use 'stop' or 'continue'.")
    count = len(os.sched_getaffinity(0)) if nprocs is None else nprocs
    if count < 1:
        raise InvalidUsage(f"nprocs={nprocs} is not valid; it must be 1 or more.")
    variables: dict[str, str] = {}
    if gpus is not None:
        from pydist.gpu import selection  # not at import: few need it

        chosen = selection.choose_gpus(gpus)
        variables = selection.gpu_variables(chosen)
        if chosen:
            count = selection.process_count(chosen, nprocs, f"gpus={gpus!r}", f"nprocs={nprocs}")
    if backend is not None:
        parse_backend(backend, "backend=")
    payload, by_value = _pack(fn, tuple(args))
    with tempfile.TemporaryDirectory(prefix="pydist-spawn-") as name:
        folder = Path(name)
        (folder / "payload").write_bytes(payload)
        # Served here and on a port that the system picks: nothing to race for.
        store = serve_local_store()
        variables.update(job_variables(count, store.port, backend))
        survived_by = store if on_failure == "continue" else None
        course = _run(folder, variables, count, timeout, by_value, survived_by)
        returned = [has_returned(folder, rank, course) for rank in range(count)]
        if not any(returned) or (on_failure == "stop" and not all(returned)):
            raise_first(folder, course)
        return [result_or_error(folder, rank, course) for rank in range(count)]


def job_variables(count: int, port: int, backend: str | None) -> dict[str, str]:
    """Tells `count` ranks of this host of their job; this process serves its store on `port`."""
    variables = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # By which they know each other; any user of the host can read what is in the store.
        "PYDIST_JOB_SECRET": secrets.token_hex(32),
        # What torchrun says of a store that its agent serves.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    if count > 1:
        variables["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    if backend is not None:
        variables["PYDIST_BACKEND"] = backend
    return variables


def _cloudpickle() -> Any:
    with contextlib.suppress(ImportError):
        return importlib.import_module("cloudpickle")
    return None


def _pack(fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[bytes, bool]:
    """`fn` and `args` as bytes, and whether functions of the main script went by value."""
    cloudpickle = _cloudpickle()
    dumps = pickle.dumps if cloudpickle is None else cloudpickle.dumps
    try:
        payload: bytes = dumps((fn, args))
    except Exception as error:
        for value, path in ((fn, "fn"), (args, "args")):
            try:
                dumps(value)
            except Exception:
                hint = "" if cloudpickle else " (with cloudpickle installed, more can be)"
                culprit = find_unpicklable(value, path, dumps)
                raise InvalidUsage(f"can't be sent to other processes{hint}: {culprit}") from error
        raise
    has_main_file = getattr(sys.modules["__main__"], "__file__", None) is not None
    if cloudpickle is None and fn.__module__ == "__main__" and not has_main_file:
        raise InvalidUsage(
            f"fn is {fn.__qualname__}, defined in a notebook or an interactive session, where "
            "other processes can't import it: install cloudpickle, or move it to a module."
        )
    return payload, cloudpickle is not None


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Hides the main module from multiprocessing; see Note [No second main]."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _run(
    folder: Path,
    variables: dict[str, str],
    count: int,
    timeout: float | None,
    by_value: bool,
    survived_by: dist.Store | None,
) -> Course:
    """Runs the ranks to their end.

    Args:
        folder: with what they run, and for what they return.
        variables: of their environment.
        count: how many.
        timeout: seconds that it may take.
        by_value: whether functions of the main script travel by value.
        survived_by: the store in which survivors say that they go on; None if the first failure
            ends all.
    """
    deadline_s = None if timeout is None else time.monotonic() + timeout
    main = _without_main() if by_value else contextlib.nullcontext()
    # The ranks read PYDIST_CONFIG by themselves.
    with _lock, in_force.outside_environment(), environment_with(variables), main:
        context = torch_multiprocessing.spawn(
            _run_rank, (str(folder), deadline_s), nprocs=count, join=False
        )
    processes = context.processes
    ended_s: dict[int, float] = {}
    why: str | None = None
    last_ones = None if survived_by is None else LastOnes(survived_by, 0.0, logger.warning)
    try:
        while len(ended_s) < count:
            left_s = None if deadline_s is None else deadline_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                # The ranks write their stacks at this moment.
                time.sleep(0.5)
                waiting = [r for r, process in enumerate(processes) if process.is_alive()]
                for rank in waiting:
                    print_stacks(folder, rank, processes[rank].pid)
                raise Timeout(
                    f"ranks {waiting} of {count} still ran after {timeout:g} s; their stacks are "
                    "on standard error.",
                    ranks=waiting,
                    cause="still ran",
                )
            if last_ones is not None:
                running = {r: each.pid for r, each in enumerate(processes) if r not in ended_s}
                if why := last_ones.why_to_end(running, has_any_ended=bool(ended_s)):
                    for rank in running:
                        processes[rank].kill()
                    break
                left_s = min(_LOOK_S, _LOOK_S if left_s is None else left_s)
            ended = _note_ends(processes, ended_s, left_s)
            if survived_by is not None:
                for rank in ended:
                    how = how_it_ended(processes[rank].exitcode)
                    note_end(survived_by, rank, processes[rank].pid, how)
            if survived_by is None and any(processes[rank].exitcode for rank in ended_s):
                until_s = time.monotonic() + _GRACE_S
                while len(ended_s) < count and (left_s := until_s - time.monotonic()) > 0:
                    _note_ends(processes, ended_s, left_s)
                break
    finally:
        stopped_s = time.monotonic()
        _end(processes)
        # torch's own account of what ranks raised; they have left us a fuller one in `folder`.
        for file in context.error_files:
            Path(file).unlink(missing_ok=True)
    exit_codes = [process.exitcode for process in processes]
    return Course(exit_codes, context.pids(), ended_s, stopped_s, why or "")


def _note_ends(
    processes: Sequence[Any], ended_s: dict[int, float], left_s: float | None
) -> list[int]:
    """Waits until one more process ends, notes when which did, and returns these."""
    running = {
        process.sentinel: rank for rank, process in enumerate(processes) if rank not in ended_s
    }
    ready = multiprocessing.connection.wait(list(running), left_s)
    now_s = time.monotonic()
    for sentinel in ready:
        rank = running[sentinel]
        processes[rank].join()
        ended_s[rank] = now_s
    return [running[sentinel] for sentinel in ready]


def _end(processes: Sequence[Any]) -> None:
    for process in processes:
        if process.is_alive():
            process.terminate()
    deadline_s = time.monotonic() + _GRACE_S
    for process in processes:
        process.join(max(0.0, deadline_s - time.monotonic()))
        if process.is_alive():
            process.kill()
        process.join()


def _run_rank(rank: int, folder_name: str, deadline_s: float | None) -> None:
    """The life of a spawned process."""
    folder = Path(folder_name)
    _end_after_parent(folder)
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    if deadline_s is not None:
        # The monotonic clock is the same in all processes of a host.
        left_s = max(0.001, deadline_s - time.monotonic())
        # Stays open as long as the process lives, as faulthandler needs it.
        stacks = os.open(stacks_file(folder, rank), os.O_WRONLY | os.O_CREAT, 0o600)
        faulthandler.dump_traceback_later(left_s, file=stacks)
    try:
        fn, args = pickle.loads((folder / "payload").read_bytes())
        result = fn(*args)
        _write(result_file(folder, rank), _pack_result(rank, result))
    except BaseException as error:
        _write(failure_file(folder, rank), pickle.dumps(_failure(rank, error)))
        if isinstance(error, Exception):
            last_words.tell(error)
        # Not sys.exit: torch's wrapper would take it for a success of its own.
        raise RuntimeError(f"rank {rank} failed") from error


def _end_after_parent(folder: Path) -> None:
    """Has this process end when the one is gone that has called `spawn`, which leaves its folder.

    torch has the kernel send SIGINT at that moment, so that a rank can end by itself. A program
    that was started in the background ignores SIGINT, and so do its ranks.
    """
    parent = multiprocessing_process.parent_process()
    assert parent is not None
    assert parent.pid is not None

    def clear() -> None:
        if os.getppid() != parent.pid:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(clear)
    end_with(parent.pid, _GRACE_S, clear)
    if os.getppid() != parent.pid:  # it had gone before it could be watched
        clear()
        os.kill(os.getpid(), signal.SIGKILL)


def _write(file: Path, content: bytes) -> None:
    part = file.with_suffix(".part")
    part.write_bytes(content)
    part.rename(file)


def _pack_result(rank: int, result: object) -> bytes:
    cloudpickle = _cloudpickle()
    dumps = pickle.dumps if cloudpickle is None else cloudpickle.dumps
    try:
        packed: bytes = dumps(result)
    except Exception as error:
        raise InvalidUsage(
            f"what rank {rank} returned can't be sent back: "
            f"{find_unpicklable(result, 'result', dumps)}"
        ) from error
    return packed


def _failure(rank: int, error: BaseException) -> Failure:
    packed = None
    if isinstance(error, Exception):  # a rank's sys.exit must not end the caller
        with contextlib.suppress(Exception):
            dumped = pickle.dumps(error)
            pickle.loads(dumped)
            packed = dumped
    return Failure(
        rank=rank,
        pid=os.getpid(),
        time_s=time.monotonic(),
        traceback="".join(traceback.format_exception(type(error), error, error.__traceback__)),
        error=packed,
        is_consequence=last_words.is_echo(error),
    )
