"""What the Python part of pydist logs: lines like the engine's own, by the levels of PYDIST_LOG.

A program that has set up logging itself, for the logger "pydist" or for all, gets the records
there instead.
"""

from __future__ import annotations

import logging
import socket
from contextlib import suppress
from pathlib import Path

from pydist import _native
from pydist.errors import InvalidUsage
from pydist.job import current
from pydist.job.launchers import read_placement

logger = logging.getLogger("pydist")

_PACKAGE = Path(__file__).parents[1]

_handler: logging.Handler | None = None


def start() -> None:
    """Prints what PYDIST_LOG asks for, unless the script has set up logging itself."""
    global _handler
    if logger.hasHandlers() or logger.level != logging.NOTSET:
        return
    levels = _levels()
    _handler = logging.StreamHandler()
    _handler.setFormatter(_LikeTheEngine())
    _handler.addFilter(lambda record: record.levelno >= levels.get(_part(record), levels[""]))
    logger.addHandler(_handler)
    logger.setLevel(min(levels.values()))


def stop() -> None:
    """Undoes `start`."""
    global _handler
    if _handler is not None:
        logger.removeHandler(_handler)
        logger.setLevel(logging.NOTSET)
        _handler = None


def _levels() -> dict[str, int]:
    """By subsystem; under "" that of all others."""
    told = {"": "warning"}
    with suppress(InvalidUsage):  # which joining tells all ranks
        told = _native.read_environment().log_levels
    return {part: logging.getLevelName(level.upper()) for part, level in told.items()}


def _part(record: logging.LogRecord) -> str:
    """The subsystem: the folder of the package in which the file that logs lies, however deep."""
    path = Path(record.pathname)
    return path.relative_to(_PACKAGE).parts[0] if path.is_relative_to(_PACKAGE) else ""


class _LikeTheEngine(logging.Formatter):
    """Lines like the engine's own: "pydist[rank 0 on host a] warning: job: ..."."""

    def format(self, record: logging.LogRecord) -> str:
        level = record.levelname.lower()
        return f"pydist[{_who()}] {level}: {_part(record)}: {record.getMessage()}"


def _who() -> str:
    host = f"host {socket.gethostname()}"
    if current.job.membership is not None:
        return f"rank {current.job.membership.rank} on {host}"
    with suppress(InvalidUsage):
        return f"rank {read_placement().rank} on {host}"
    return host
