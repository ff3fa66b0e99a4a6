"""What a data set draws at random in a loader's workers: the same after any resumption.

Note [Seeds of workers]
torch seeds a worker once, when it starts: what a dataset draws at random depends on how many
batches that worker has fetched before, so it would be another after a resumption, with another
number of workers, and from one epoch of persistent workers to the next. Here each batch of indices
carries a seed to the worker that fetches it, which seeds torch, numpy and random when the indices
arrive there. The seed follows from the sampler's, the epoch, the position and the rank. In the main
process (num_workers=0) nothing is seeded: its generators are the script's.

Note [What worker_init_fn has seeded]
A script seeds its workers in `worker_init_fn`, and seeding them again for each batch would undo
that. So each worker compares its generators' states before and after `worker_init_fn`, and keeps a
mark: a digest of the states that have changed. The marks of all workers together go into the seed
of each batch. One worker's own mark would not do: the first batch after a resumption goes to worker
0, whichever worker would have got the batch without an interruption. Workers tell their marks to
one another in shared memory. A worker_init_fn that seeds nothing leaves no mark, and one that seeds
all workers alike leaves the same on any number of workers.

The marks are the same after a resumption only if torch seeds the workers with the same number, from
which many a worker_init_fn derives its own seeds (`torch.initial_seed()`). torch draws that number
from the loader's generator when workers start. A prepared loader lends torch another generator for
that moment, seeded by the sampler's seed and the epoch. Persistent workers start in any epoch, so
for them it is seeded by the sampler's seed alone.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import random
import struct
import time
from collections.abc import Callable
from multiprocessing.sharedctypes import RawArray
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

# Marks in the shared memory: not there yet, and worker_init_fn has changed no generator.
_PENDING = 0
_NONE = 1

# How often a worker looks whether the others are through with worker_init_fn.
_PAUSE_S = 0.001


def seed_of(seed: int, epoch: int, position: int, rank: int) -> int:
    """63 bits for what is drawn at random in fetching the step at `position`."""
    return _digest(struct.pack("<4Q", seed % 2**64, epoch, position, rank)) >> 1


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


class Sent:
    """Indices on their way to a worker: pickled here, plain and its generators seeded there."""

    def __init__(self, indices: Any, seed: int) -> None:
        self._indices = indices
        self._seed = seed

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (self._indices, self._seed)


def _arrive(indices: Any, seed: int) -> Any:
    if get_worker_info() is not None:
        marks = _marks_of_all()
        if marks:
            seed = _digest(struct.pack(f"<{1 + len(marks)}Q", seed, *marks)) >> 1
        random.seed(seed)
        # Otherwise than Python's, which begins with the same generator: given the same words, the
        # two would draw the same numbers.
        np.random.seed([seed % 2**32, seed >> 32, 1])
        # Those of accelerators belong to nobody in a worker, and setting them is slow.
        torch.default_generator.manual_seed(seed)
    return indices


class Marking:
    """A worker_init_fn that leaves a mark; see Note [What worker_init_fn has seeded].

    Made in the main process for each start of workers, and called in each of them.

    Args:
        given: the script's worker_init_fn.
        workers: how many workers start.
    """

    def __init__(self, given: Callable[[int], Any], workers: int) -> None:
        self._given = given
        self._marks: Any = RawArray("Q", workers)

    def __call__(self, worker: int) -> None:
        global _shared_marks
        _shared_marks = self._marks
        before = _states()
        mark = _NONE
        try:
            self._given(worker)
            after = _states()
            changed = b"".join(name + after[name] for name in after if after[name] != before[name])
            if changed:
                mark = max(_digest(changed), _NONE + 1)
        finally:
            # Also where it raises, which the main process hears of: nobody waits for this worker.
            self._marks[worker] = mark


# In a worker: the marks of all workers, until they are known; then those that are any.
_shared_marks: Any = None
_known_marks: tuple[int, ...] = ()


def _marks_of_all() -> tuple[int, ...]:
    """The different marks, in order. Waits until all workers are through with worker_init_fn."""
    global _shared_marks, _known_marks
    if _shared_marks is not None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        while _PENDING in (marks := set(_shared_marks)) and parent.is_alive():
            time.sleep(_PAUSE_S)
        _shared_marks, _known_marks = None, tuple(sorted(marks - {_PENDING, _NONE}))
    return _known_marks


def _states() -> dict[bytes, bytes]:
    """A digest of the state of each generator that batches are fetched with."""
    of_numpy = np.random.get_state(legacy=True)
    states = {
        b"torch": torch.default_generator.get_state().numpy().tobytes(),
        b"numpy": b"".join(np.asarray(part).tobytes() for part in of_numpy),
        b"random": repr(random.getstate()).encode(),
    }
    return {name: hashlib.blake2b(state, digest_size=16).digest() for name, state in states.items()}
