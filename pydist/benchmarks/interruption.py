"""Ctrl-C, and the signals by which launchers and terminals end a benchmark."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

# The exit status.
INTERRUPTED = 130

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


@contextmanager
def interruptible() -> Iterator[None]:
    """Within, each of the signals raises KeyboardInterrupt, as Ctrl-C does."""
    previous = {number: signal.signal(number, _interrupt) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def ignore_interruptions() -> None:
    """From here to the end of `interruptible`: nothing cuts off what is left to be done."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
