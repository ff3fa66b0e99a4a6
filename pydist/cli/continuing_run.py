"""`pydist run --on-failure=continue`: a launcher that spares the survivors of a rank's death.

torchrun ends all ranks when one has failed. This one starts the same processes, by torch's own
parts, lets those go on that are left, and serves the store in which they meet again
(`pydist.reform`). On one host.
"""

import argparse
import multiprocessing.connection
import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes
from torch.distributed.elastic.utils import macros

from pydist.job.meeting.launcher_news import note_end
from pydist.job.meeting.local_store import serve_local_store
from pydist.job.recovery.last_ones import LastOnes
from pydist.job.recovery.left_behind import is_left_behind
from pydist.job.spawn import job_variables
from pydist.job.spawn_results import how_it_ended

__all__ = ["run_and_continue"]

_LOOK_S = 0.1
# How long ranks get to end by themselves when the launcher is told to.
_GRACE_S = 30
# How long ranks that were left behind get, once no other runs: one that has left may be ending yet.
_LATE_END_S = 5.0


class _ToldToEnd(Exception):  # noqa: N818
    """The launcher got a signal."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def run_and_continue(options: argparse.Namespace, count: int) -> int:
    """Runs a script on several processes of this host, and lets survivors go on.

    Args:
        options: torchrun's, parsed; they describe one host and no restarts.
        count: how many processes.

    Returns:
        0 if all ranks ended well that had remained: at least one, and none failed after that one,
        except ranks that the others had left behind. 1 otherwise; for a signal, 128 and its number.
    """
    store = serve_local_store()
    # torch reads there which signals are to have its handlers.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = options.signals_to_handle
    names = {name.strip() for name in options.signals_to_handle.split(",")}
    numbers = [number for number in signal.Signals if number.name in names]
    before = {number: signal.signal(number, _tell_to_end) for number in numbers}
    processes: Any = None
    try:
        processes = _start(options, count, store.port)
        for number in numbers:  # torch has put handlers of its own there
            signal.signal(number, _tell_to_end)
        return _supervise({r: h.proc for r, h in processes.subprocess_handlers.items()}, store)
    except _ToldToEnd as told:
        _say(f"ends all ranks ({_name(told.number)})")
        for number in numbers:
            signal.signal(number, _kill_at_once(processes))
        if processes is not None:
            processes.close(signal.Signals(told.number), _GRACE_S)
        return 128 + told.number
    finally:
        if processes is not None:
            processes.close(signal.SIGKILL, _GRACE_S)
        for number, handler in before.items():
            signal.signal(number, handler)


def _tell_to_end(number: int, _frame: FrameType | None) -> None:
    raise _ToldToEnd(number)


def _kill_at_once(processes: Any) -> Callable[[int, FrameType | None], None]:
    """For who signals once more."""

    def kill(_number: int, _frame: FrameType | None) -> None:
        for handler in processes.subprocess_handlers.values() if processes is not None else ():
            if handler.proc.poll() is None:
                handler.proc.kill()

    return kill


def _start(options: argparse.Namespace, count: int, port: int) -> Any:
    config, command, arguments = torchrun.config_from_args(options)
    shared = {
        **job_variables(count, port, None),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": options.role,
        "ROLE_WORLD_SIZE": str(count),
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "pydist",
    }
    return start_processes(
        name=options.role,
        entrypoint=command,
        args={rank: tuple(macros.substitute(list(arguments), str(rank))) for rank in range(count)},
        envs={
            rank: {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "ROLE_RANK": str(rank)}
            for rank in range(count)
        },
        logs_specs=config.logs_specs or DefaultLogsSpecs(),
    )


def _supervise(running: dict[int, Any], store: dist.Store) -> int:
    """Waits until all processes have ended, and says which of them failed."""
    start_s = time.monotonic()
    pids = {rank: process.pid for rank, process in running.items()}
    well: list[int] = []
    failed_later: list[int] = []
    last_ones = LastOnes(store, _LATE_END_S, _say)
    while running:
        ended = [
            (code, rank) for rank, each in running.items() if (code := each.poll()) is not None
        ]
        # Several may have ended since the last look. First those that were killed, then those that
        # failed, perhaps because of them, and last those that succeeded.
        for code, rank in sorted(ended, key=lambda end: (end[0] == 0, end[0] > 0, end[1])):
            del running[rank]
            note_end(store, rank, pids[rank], how_it_ended(code))
            fate = "the others go on" if running else "no other runs any more"
            if is_left_behind(store, pids[rank]):
                pass  # whatever its status, it was no rank any more
            elif code == 0:
                well.append(rank)
            elif well:
                failed_later.append(rank)
                fate = "others had ended well before"
            if code != 0:
                _say(
                    f"rank {rank} (pid {pids[rank]}) {how_it_ended(code)} after "
                    f"{time.monotonic() - start_s:.1f} s; {fate}"
                )
        still = {rank: pids[rank] for rank in running}
        if why := last_ones.why_to_end(still, has_any_ended=len(still) < len(pids)):
            for rank, process in running.items():
                _say(f"ends rank {rank} (pid {pids[rank]}): {why}, and no other runs any more")
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                if well and not is_left_behind(store, pids[rank]):
                    failed_later.append(rank)
            break
        _sleep_until_one_ends(running)
    return 0 if well and not failed_later else 1


def _sleep_until_one_ends(running: dict[int, Any]) -> None:
    """Returns when a process ends, so that the next look finds few that have, or after a while."""
    descriptors: list[int] = []
    try:
        for process in running.values():
            descriptors.append(os.pidfd_open(process.pid))
        multiprocessing.connection.wait(descriptors, _LOOK_S)
    except OSError:  # a kernel before 5.3, or no descriptor is left
        time.sleep(_LOOK_S)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _say(text: str) -> None:
    print(f"pydist run: {text}", file=sys.stderr, flush=True)


def _name(number: int) -> str:
    return signal.Signals(number).name
