"""Loaders that can be resumed in mid-epoch, in place of those that Lightning shares out."""

from __future__ import annotations

from typing import Any

import torch.utils.data as torch_data

import pydist
from pydist.integrations.torch_shuffle import TorchShuffle
from pydist.sampling.loader import prepared_with
from pydist.sampling.order import sample_count


class SamplerOfFabric(pydist.DistributedSampler):
    """Goes on with the epoch of a loaded state; Fabric counts from 0 again in each process."""

    # What is added to Fabric's number of an epoch.
    _ahead = 0

    def set_epoch(self, epoch: int) -> None:
        """Takes Fabric's number; the first one after a state was loaded stands for its epoch."""
        if self._is_loaded:
            self._ahead = self.epoch - epoch
        super().set_epoch(epoch + self._ahead)


def shared(
    loader: Any, *, pads: bool, kind: type[pydist.DistributedSampler] = pydist.DistributedSampler
) -> Any:
    """A loader that can be resumed in mid-epoch, in place of one that Lightning shares out.

    Args:
        loader: As Lightning has made it, with a sampler of torch's where it shares out samples.
        pads: Whether all ranks get equally many samples. In training they do; elsewhere a sample
            that comes twice would count twice.
        kind: Of the sampler.
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
    order = TorchShuffle(length) if sampler.shuffle else pydist.Sequential(length)
    own = kind(
        sampler.dataset,
        sampler.num_replicas,
        sampler.rank,
        seed=sampler.seed,
        pad="repeat" if pads else "none",
        order=order,
    )
    batches = pydist.BatchSampler(own, batched.batch_size, drop_last=batched.drop_last)
    return prepared_with(loader, batches)
