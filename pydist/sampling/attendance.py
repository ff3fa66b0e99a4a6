"""Warns where a rank has gone through its share of a loader, and others have not begun theirs.

A library may read batches on one rank alone and send each rank a part of them (Accelerate's
`dispatch_batches=True`). Of a prepared loader that rank reads its own share only, and the other
ranks' samples are never trained on, without any error. No code of ours runs on those ranks, so what
shows it is that they never ask for a batch. Every rank notes in the job's store that it has begun,
and whoever comes to the end of its first epoch looks whether all have. Ranks that meet in each step
have begun by then; for those that do not, it looks for a moment longer.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections import Counter
from contextlib import suppress

import torch.distributed as dist

from pydist.errors import InvalidUsage
from pydist.job import groups
from pydist.job.rank_names import name_ranks

_PATIENCE_S = 5.0
_BETWEEN_LOOKS_S = 0.02

# How many loaders of each description the main thread has prepared, which is how ranks tell them
# apart.
_prepared: Counter[str] = Counter()


class Attendance:
    """Which ranks have begun to iterate over one prepared loader. Not collective.

    Args:
        rank: this process's.
        ranks: how many share the samples, 2 or more.
        what: the loader, in words that are the same on every rank.
    """

    def __init__(self, rank: int, ranks: int, what: str) -> None:
        self._rank = rank
        self._ranks = ranks
        # Other threads may have other names on each rank.
        self._is_kept = threading.current_thread() is threading.main_thread()
        if self._is_kept:
            _prepared[what] += 1
        self._name = f"{what}/{_prepared[what]}"
        self._has_begun = False
        self._has_ended = False

    def begin(self) -> None:
        """Notes that this rank has begun."""
        if self._is_kept and not self._has_begun and (store := self._store()) is not None:
            self._has_begun = True
            # A store that has gone costs the warning, and not the epoch.
            with suppress(RuntimeError):
                store.set(self._key(self._rank), "")

    def end(self) -> None:
        """Warns once, at the end of the first epoch, where other ranks have not begun."""
        if not self._has_begun or self._has_ended or (store := self._store()) is None:
            return
        self._has_ended = True
        with suppress(RuntimeError):
            last_look = time.monotonic() + _PATIENCE_S
            missing = list(range(self._ranks))
            while missing := [rank for rank in missing if not store.check([self._key(rank)])]:
                if time.monotonic() > last_look:
                    break
                time.sleep(_BETWEEN_LOOKS_S)
            if not missing:
                return
            warnings.warn(
                f"rank {self._rank} has come to the end of its share of a prepared loader, and "
                f"{name_ranks(missing)} of {self._ranks} did not begin: the share of each is left "
                "out. A library that reads batches on one rank and hands them to all (Accelerate: "
                "dispatch_batches=True) needs the plain DataLoader; so does a loader that one rank "
                "alone prepares or goes through. If those ranks begin later, ignore this",
                UserWarning,
                stacklevel=2,
            )

    def _key(self, rank: int) -> str:
        return f"{self._name}/{rank}"

    def _store(self) -> dist.Store | None:
        """The job's; None where the ranks that share the samples are others."""
        world = dist.group.WORLD if dist.is_initialized() else None
        if world is None or dist.get_world_size() != self._ranks:
            return None
        with suppress(InvalidUsage):  # torch does not tell the store of every group
            return dist.PrefixStore("pydist loaders begun", groups.store_of(world))
        return None
