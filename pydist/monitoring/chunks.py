"""Steps by chunks: what a rank sends, and how rank 0 puts together those of all ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any

from pydist.job.log import logger
from pydist.monitoring.mailbox import Mailbox
from pydist.monitoring.measures import Row

# Between two looks of a rank 0 that is at its end and waits for the others' last steps.
_LOOK_S = 0.02

# The rows of each rank for the same steps; of some ranks there may be none.
Together = list[list[Row]]


_in_order = attrgetter(*(each.name for each in fields(Row)))


def as_json(rows: Sequence[Row]) -> list[Any]:
    """A chunk as it is sent: of each row the values of its fields, in their order."""
    return [_in_order(row) for row in rows]


def from_json(chunk: list[Any]) -> list[Row]:
    """Undoes `as_json`."""
    return [Row(*row) for row in chunk]


class Collector:
    """Rank 0's: keeps a chunk open for the other ranks' rows until its own next one is full.

    Args:
        mailbox: Where they come; None for a job of one rank.
        size: How many ranks there are.
    """

    def __init__(self, mailbox: Mailbox | None, size: int) -> None:
        self._mailbox = mailbox
        self._size = size
        self._number = -1
        # The open chunk, by rank; empty where none is open.
        self._chunk: dict[int, list[Row]] = {}
        # Ranks whose last chunk did not come: nobody looks for theirs in every step.
        self._silent: set[int] = set()
        self._has_warned = False

    def add(self, number: int, rows: list[Row]) -> list[Together]:
        """Opens rank 0's own next chunk; returns the one before, if that is open still."""
        done = self._conclude()
        self._number, self._chunk = number, {0: rows}
        return done

    @property
    def expects_more(self) -> bool:
        """Whether rows of ranks that have sent the chunk before are missing in the open one."""
        return any(rank not in self._silent for rank in self._missing())

    def look(self) -> list[Together]:
        """Takes what has come; returns the open chunk if it is complete."""
        missing = self._missing()
        if missing and self._mailbox is not None:
            for rank, chunk in self._mailbox.look(self._number, missing).items():
                self._chunk[rank] = from_json(chunk)
                self._silent.discard(rank)
        return [] if self._missing() else self._conclude()

    def leave_others(self) -> list[Together]:
        """From now on rank 0 is alone; returns the open chunk, if there is one."""
        self._mailbox = None
        return self._conclude()

    def wait(self, limit_s: float) -> list[Together]:
        """Waits for rows that are expected, until a limit; returns the open chunk."""
        deadline = time.monotonic() + limit_s
        done = self.look()
        while self.expects_more and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
            done += self.look()
        return done + self._conclude()

    def _missing(self) -> list[int]:
        if not self._chunk or self._mailbox is None:
            return []
        return [rank for rank in range(self._size) if rank not in self._chunk]

    def _conclude(self) -> list[Together]:
        if not self._chunk:
            return []
        absent = self._missing()
        self._silent.update(absent)
        if absent and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "pydist.monitor: ranks %s have sent nothing of steps %d to %d, so their numbers "
                "are missing there; call step() on every rank, once a step.",
                absent,
                self._chunk[0][0].step,
                self._chunk[0][-1].step,
            )
        together = [self._chunk.get(rank, []) for rank in range(self._size)]
        self._chunk = {}
        return [together]
