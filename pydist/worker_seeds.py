"""What a data set draws at random in a loader's workers: the same after any resumption.

Note [Seeds of workers]
torch seeds a worker once, when it starts: what a dataset draws at random depends on how many
batches that worker has fetched before, so it would be another after a resumption, with another
number of workers, and from one epoch of persistent workers to the next. Here each batch of indices
carries a seed to the worker that fetches it, which seeds torch, numpy and random when the indices
arrive there. The seed follows from the sampler's, the epoch, the position and the rank. In the main
process (num_workers=0) nothing is seeded: its generators are the script's.
"""

from __future__ import annotations

import hashlib
import random
import struct
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

__all__ = ["Sent", "seed_of"]


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
        random.seed(seed)
        np.random.seed([seed % 2**32, seed >> 32])
        # Those of accelerators belong to nobody in a worker, and setting them is slow.
        torch.default_generator.manual_seed(seed)
    return indices
