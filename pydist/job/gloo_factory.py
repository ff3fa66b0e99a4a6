"""Torch's gloo for a group, or an error where this process lacks what it takes.

Gloo takes its threads and descriptors one by one on threads of its own, and ends the process where
it gets only some of them. So they are tried here first.
"""

import _thread
import errno
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from pydist._torch import threads_of
from pydist.errors import TransportError
from pydist.job.descriptors import require_descriptors
from pydist.job.meeting.gloo_network import GlooNetwork

__all__ = ["gloo_factory"]

# Gloo waits so many times its time-out for a connection. Each operation has a time-out of its own.
_CONNECTING = 5
# How long a thread that the system has granted may take to run.
_STARTING_S = 3.0
# A group takes 3, and 2 for each rank. More are tried, as other threads may take some meanwhile.
_DESCRIPTORS = 12
_DESCRIPTORS_A_RANK = 3


def gloo_factory(
    network: GlooNetwork,
) -> Callable[[dist.Store, int, int, float | timedelta], dist.ProcessGroup]:
    """What makes torch's gloo for `create_gloo`."""

    def create(
        store: dist.Store, rank: int, size: int, timeout: float | timedelta
    ) -> dist.ProcessGroup:
        if not dist.is_gloo_available():
            raise TransportError("this torch was built without gloo.")
        wait = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
        require_descriptors(_DESCRIPTORS + _DESCRIPTORS_A_RANK * size, "the group")
        options = network.options(wait / _CONNECTING)
        _require_threads(threads_of(options))
        # Any: torch's stubs leave out its options.
        gloo: Any = dist.ProcessGroupGloo
        group: dist.ProcessGroup = gloo(store, rank, size, options)
        return group

    return create


def _require_threads(count: int) -> None:
    """Raises where this process can't start so many threads more."""
    may_end = threading.Event()
    running: list[int] = []
    started = 0

    def hold() -> None:
        running.append(threading.get_native_id())
        may_end.wait()

    try:
        for _ in range(count):
            # Not threading's, which waits for ever for a thread that has no memory to begin.
            _thread.start_new_thread(hold, ())
            started += 1
        patience_s = time.monotonic() + _STARTING_S
        while len(running) < count:
            if time.monotonic() > patience_s:
                raise RuntimeError(f"{count - len(running)} of {count} threads did not start")
            time.sleep(1e-4)
    except RuntimeError as error:
        # What gloo says where it gets none; what can be done about it is added to that.
        raise TransportError(os.strerror(errno.EAGAIN)) from error
    finally:
        may_end.set()
        # The system counts a thread until it is gone, which is soon.
        patience_s = time.monotonic() + 1.0
        while time.monotonic() < patience_s and (
            len(running) < started
            or any(os.path.exists(f"/proc/self/task/{thread}") for thread in running)
        ):
            time.sleep(1e-4)
