"""`steps.jsonl`: whole lines, whatever happens to the process or the disk.

A line is JSON. JSON has no NaN and no infinity, so they are the texts "NaN", "Infinity" and
"-Infinity". A run that goes on appends; a half line that a killed process has left is cut off.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from pydist.job.log import logger

NAME = "steps.jsonl"

# Device and inode of each file that this process has open: its own locks do not hold it off.
_open_files: set[tuple[int, int]] = set()

_TEXTS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def as_text(value: Any) -> Any:
    """A value as it is written: what JSON has no numbers for becomes text."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {str(key): as_text(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_text(each) for each in value]
    return value


_encode = json.JSONEncoder(allow_nan=False).encode


def _encoded(line: dict[str, Any]) -> str:
    try:
        return _encode(line)
    except ValueError:  # a number that JSON does not have: most lines have none
        return _encode(as_text(line))


def as_number(value: Any) -> float | None:
    """Undoes `as_text` for a number; None for what is none."""
    if isinstance(value, str):
        return _TEXTS.get(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def lines_in(file: BinaryIO) -> Iterator[dict[str, Any] | None]:
    """What the lines of a file say, in order; None for a line that says nothing readable."""
    for text in file:
        try:
            line = json.loads(text) if text.endswith(b"\n") else None
        except (ValueError, RecursionError):
            line = None
        is_step = isinstance(line, dict) and type(line.get("step")) is int
        yield line if is_step else None


def _key_of(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino


class StepFile:
    """The file of one run, open for appending.

    Args:
        folder: Of the run; it is there.

    Attributes:
        last_step: The number of the last step in it, 0 where there is none.
        elapsed_s: Seconds that the run has taken up to there.

    Raises:
        OSError: it can't be read or written.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self.last_step = 0
        self.elapsed_s = 0.0
        self._key = (0, 0)
        self._lock_fd = -1
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            self._lock()
            # Up to where the file is known to be whole.
            self._end = self._find_end()
            os.ftruncate(self._fd, self._end)
        except BaseException:
            self.close()
            raise
        self._lost = 0

    def _lock(self) -> None:
        """Keeps the file to this object, where the file system knows locks.

        The lock is the process's own: workers of a data loader, which are forked off and may live
        on for some seconds, do not hold it, so that a restarted job finds it free.
        """
        # Of a file that nobody reads: closing any descriptor of a file ends the process's lock.
        path = self.path.with_name(".steps.lock")
        try:
            with suppress(FileNotFoundError):
                if _key_of(path.stat()) in _open_files:
                    raise BlockingIOError
            self._lock_fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            fcntl.lockf(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            raise OSError(
                errno.EBUSY, "a monitor that is open already writes it", str(self.path)
            ) from error
        except OSError:
            pass  # It knows none.
        if self._lock_fd >= 0:
            self._key = _key_of(os.fstat(self._lock_fd))
            _open_files.add(self._key)

    def _find_end(self) -> int:
        end = 0
        with open(self._fd, "rb", closefd=False) as file:
            for text in file:
                if text.endswith(b"\n"):
                    end += len(text)
            file.seek(0)
            for line in lines_in(file):
                if line is not None:
                    self.last_step = line["step"]
                    self.elapsed_s = as_number(line.get("elapsed_s")) or self.elapsed_s
        return end

    def append(self, lines: Iterable[dict[str, Any]]) -> None:
        """Writes lines; where that fails, warns and leaves them out."""
        given = list(lines)
        text = "".join(f"{_encoded(line)}\n" for line in given).encode()
        try:
            written = 0
            while written < len(text):
                written += os.pwrite(self._fd, text[written:], self._end + written)
        except OSError as error:
            self._cut()
            if not self._lost:
                logger.warning(
                    "pydist.monitor can't write %s (%s); training goes on, and steps from %d on "
                    "are missing until there is room again.",
                    self.path,
                    error,
                    given[0]["step"],
                )
            self._lost += len(given)
            return
        self._end += len(text)
        if self._lost:
            logger.warning(
                "pydist.monitor writes %s again; %d steps are missing.", self.path, self._lost
            )
            self._lost = 0

    def _cut(self) -> None:
        with contextlib.suppress(OSError):  # The next line overwrites the half one.
            os.ftruncate(self._fd, self._end)

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1
            _open_files.discard(self._key)
