"""Loaders that can be resumed in mid-epoch, in place of those that Lightning shares out."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils.data as torch_data
from torch import Tensor

import pydist
from pydist.sampling.order import sample_count


class _TorchsShuffle:
    """The order of torch's DistributedSampler, so that a training is the same as under DDP."""

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


def shared(loader: Any, *, pads: bool) -> Any:
    """A loader that can be resumed in mid-epoch, in place of one that Lightning shares out.

    Args:
        loader: As Lightning has made it, with a sampler of torch's where it shares out samples.
        pads: Whether all ranks get equally many samples. In training they do; elsewhere a sample
            that comes twice would count twice.
    """
    sampler = getattr(loader, "sampler", None)
    batched = getattr(loader, "batch_sampler", None)
    if (
        type(sampler) is not torch_data.DistributedSampler
        or type(batched) is not torch_data.BatchSampler
        or isinstance(loader, pydist.PreparedLoader)
    ):
        return loader
    length = sample_count(sampler.dataset)
    order = _TorchsShuffle(length) if sampler.shuffle else pydist.Sequential(length)
    own = pydist.DistributedSampler(
        sampler.dataset,
        sampler.num_replicas,
        sampler.rank,
        seed=sampler.seed,
        pad="repeat" if pads else "none",
        order=order,
    )
    batches = pydist.BatchSampler(own, batched.batch_size, drop_last=batched.drop_last)
    names = ["num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn"]
    names += ["multiprocessing_context", "generator", "prefetch_factor", "persistent_workers"]
    settings = {name: getattr(loader, name) for name in names}
    return pydist.prepare(torch_data.DataLoader(loader.dataset, batch_sampler=batches, **settings))
