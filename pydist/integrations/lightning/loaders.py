"""Loaders that can be resumed in mid-epoch, in place of those that Lightning shares out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.utils.data as torch_data

import pydist
from pydist.integrations.torch_order import share_in_torchs_order


class SamplerOfFabric(pydist.DistributedSampler):
    """Goes on with the epoch of a loaded state; Fabric counts from 0 again in each process."""

    # What is added to Fabric's number of an epoch.
    _ahead = 0

    def set_epoch(self, epoch: int) -> None:
        """Takes Fabric's number; the first one after a state was loaded stands for its epoch."""
        if self._is_loaded:
            self._ahead = self.epoch - epoch
        super().set_epoch(epoch + self._ahead)


class _RanksOfLightning(int):
    """The number of ranks in a sampler that Lightning makes; a script's own sampler has an int."""


def marking(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Lightning's arguments for the samplers that it makes, so that `shared` knows them."""
    return {**arguments, "num_replicas": _RanksOfLightning(arguments["num_replicas"])}


def shared(loader: Any, *, pads: bool, sampler_class: Any = pydist.DistributedSampler) -> Any:
    """A loader that can be resumed in mid-epoch, in place of one that Lightning shares out.

    Args:
        loader: As Lightning has made it. Its sampler is one of torch's that was made with arguments
            from `marking`, or the loader stays as it is.
        pads: Whether all ranks get equally many samples. In training they do; elsewhere a sample
            that comes twice would count twice.
        sampler_class: Of the sampler: `pydist.DistributedSampler`, or a class of it.
    """
    sampler = getattr(loader, "sampler", None)
    batched = getattr(loader, "batch_sampler", None)
    if (
        type(sampler) is not torch_data.DistributedSampler
        or not isinstance(sampler.num_replicas, _RanksOfLightning)
        or type(batched) is not torch_data.BatchSampler
    ):
        return loader
    # torch repeats samples first, and then drops the last batch of each rank that isn't full.
    is_last_full = sampler.total_size % (sampler.num_replicas * batched.batch_size) == 0
    return share_in_torchs_order(
        loader,
        seed=sampler.seed,
        pad="repeat" if pads else "none",
        shuffles=sampler.shuffle,
        drop_last=batched.drop_last and not (pads and is_last_full),
        sampler_class=sampler_class,
        num_replicas=int(sampler.num_replicas),
        rank=sampler.rank,
    )
