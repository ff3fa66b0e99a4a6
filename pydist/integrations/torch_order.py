"""Loaders that can be resumed, with samples in the order of those that frameworks share out.

Torch's DistributedSampler, which Lightning uses, and Accelerate's SeedableRandomSampler shuffle
alike.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader

import pydist
from pydist.sampling.loader import prepared_with
from pydist.sampling.order import sample_count


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


def share_in_torchs_order(
    loader: DataLoader[Any],
    *,
    seed: int,
    pad: Literal["repeat", "none"],
    shuffles: bool = True,
    split_batches: bool = False,
    drop_last: bool | None = None,
    **ranks: Any,
) -> pydist.PreparedLoader[Any]:
    """A loader like the given one, whose samples the ranks share, and which can be resumed.

    Args:
        loader: With a batch sampler of torch's.
        seed: Of the order.
        pad: As for `pydist.DistributedSampler`.
        shuffles: Whether to go through the samples in torch's shuffled order, or as they come.
        split_batches: Whether the loader's batch size is that of all ranks together.
        drop_last: As for `pydist.BatchSampler`; by default the loader's.
        **ranks: `num_replicas` and `rank`, where they aren't the job's.
    """
    length, batched = sample_count(loader.dataset), loader.batch_sampler
    assert isinstance(batched, torch.utils.data.BatchSampler)
    order = TorchShuffle(length) if shuffles else pydist.Sequential(length)
    sampler = pydist.DistributedSampler(loader.dataset, seed=seed, pad=pad, order=order, **ranks)
    name = "global_batch_size" if split_batches else "batch_size"
    size: dict[str, Any] = {name: batched.batch_size}
    drops = batched.drop_last if drop_last is None else drop_last
    batches = pydist.BatchSampler(sampler, drop_last=drops, **size)
    return prepared_with(loader, batches)
