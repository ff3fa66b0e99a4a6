"""Runs one job at a time on a thread, and hands on what it raises."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable


class StepThread:
    """A thread for each job. For one caller at a time."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._pid = os.getpid()

    def start(self, job: Callable[[], None]) -> None:
        """Begins a job, after `join`."""

        def run() -> None:
            try:
                job()
            except BaseException as error:  # handed on by join()
                self._error = error

        # Not a daemon: the interpreter waits for it, whatever the program forgets.
        self._thread = threading.Thread(target=run, name="pydist-offload")
        self._thread.start()

    def join(self) -> None:
        """Returns once the job is over; raises what it has raised, once.

        At once on the thread itself, where the collector may run whatever finalizers it finds.
        """
        if self._thread is None or self._pid != os.getpid():
            return
        if self._thread is threading.current_thread():
            return
        self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
