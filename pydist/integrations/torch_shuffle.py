"""The order in which frameworks shuffle, so that a training is the same as under their own DDP.

Torch's DistributedSampler, which Lightning uses, and Accelerate's SeedableRandomSampler draw it
alike.
"""

from __future__ import annotations

import torch
from torch import Tensor


class TorchShuffle:
    """The permutation that torch draws from a generator seeded with seed + epoch."""

    name = "shuffled by torch"

    def __init__(self, length: int) -> None:
        self._length = length
        self._seed: int | None = None
        self._permutation = torch.empty(0, dtype=torch.int64)

    def __len__(self) -> int:
        return self._length

    def indices(self, positions: range, *, seed: int, epoch: int) -> Tensor:
        """What stands at some positions."""
        if self._seed != seed + epoch:
            self._seed = seed + epoch
            generator = torch.Generator().manual_seed(self._seed)
            self._permutation = torch.randperm(self._length, generator=generator)
        return self._permutation[positions.start : positions.stop : positions.step]
