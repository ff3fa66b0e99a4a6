"""How rank 0 gets the other ranks' measurements: through the job's key-value store.

Note [No collective]: a collective waits for every rank, so a rank that takes no more steps would
hold up the others, and its place in the order of collectives would be part of the program. Here
each rank leaves its chunk of steps in the store and goes on; rank 0 takes what is there.

A rank has a few keys, which it uses by turns, so the store never holds more than that. The last
rank that closes its monitor deletes all of them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from pydist.job.meeting.store_waits import values_of

# How many chunks rank 0 may be behind.
_KEYS = 4
# Where the ranks that have closed are counted.
_CLOSED = "closed"


class Mailbox:
    """The store as the ranks of one monitor use it.

    Args:
        store: Of the job.
        name: Of the monitor, the same on every rank.
        rank: This process's.
        size: How many ranks there are.
    """

    def __init__(self, store: dist.Store, name: str, rank: int, size: int) -> None:
        self._store = dist.PrefixStore(f"monitor/{name}", store)
        self._rank = rank
        self._size = size
        # A key that is there can be read without waiting.
        for key in range(_KEYS):
            self._store.set(f"{rank}/{key}", "")

    def post(self, number: int, chunk: Any) -> None:
        """Leaves a chunk for rank 0.

        Args:
            number: Of the chunk, from 0.
            chunk: As JSON takes it.
        """
        self._store.set(f"{self._rank}/{number % _KEYS}", json.dumps([number, chunk]))

    def close(self) -> None:
        """This rank neither posts nor looks any more."""
        if self._store.add(_CLOSED, 1) < self._size:
            return
        for rank in range(self._size):
            for key in range(_KEYS):
                self._store.delete_key(f"{rank}/{key}")
        self._store.delete_key(_CLOSED)

    def look(self, number: int, ranks: Sequence[int]) -> dict[int, Any]:
        """The chunks of that number that are there, by rank. Waits for nobody."""
        keys = [f"{rank}/{number % _KEYS}" for rank in ranks]
        there = {}
        for rank, text in zip(ranks, values_of(self._store, keys), strict=True):
            if text:
                posted, chunk = json.loads(text)
                if posted == number:
                    there[rank] = chunk
        return there
