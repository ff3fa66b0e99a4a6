"""Loaders that can be resumed in mid-epoch, in place of those that Lightning shares out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch.utils.data as torch_data

import pydist
from pydist.integrations.torch_order import share_in_torchs_order
from pydist.sampling.loader import prepared_with
from pydist.sampling.order import sample_count


class _RanksOfLightning(int):
    """The number of ranks in a sampler that Lightning makes; a script's own sampler has an int.

    Both are torch's DistributedSampler. Lightning's is replaced by one that can be resumed. One of
    the script's has to stay: it says what each rank gets, and the script may call it. Nothing else
    tells the two apart: Lightning asks the strategy for the arguments of the samplers it makes.
    """


def marking(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Lightning's arguments for the samplers that it makes, so that `shared` knows them."""
    return {**arguments, "num_replicas": _RanksOfLightning(arguments["num_replicas"])}


def shared(loader: Any, *, pads: bool) -> Any:
    """A loader that can be resumed in mid-epoch, in place of one that Lightning shares out.

    Args:
        loader: As Lightning has made it. Its sampler is one of torch's that was made with arguments
            from `marking`, or the loader stays as it is.
        pads: Whether all ranks get equally many samples. In training they do; elsewhere a sample
            that comes twice would count twice.
    """
    sampler = getattr(loader, "sampler", None)
    batched = getattr(loader, "batch_sampler", None)
    if (
        type(sampler) is not torch_data.DistributedSampler
        or not isinstance(sampler.num_replicas, _RanksOfLightning)
        or type(batched) is not torch_data.BatchSampler
        or sampler.total_size == 0  # which Lightning skips
    ):
        return loader
    # torch repeats samples first, and then drops the last batch of each rank that isn't full.
    of_all_ranks = sampler.num_replicas * batched.batch_size
    drops_last = batched.drop_last and not (pads and sampler.total_size % of_all_ranks == 0)
    if drops_last and sample_count(sampler.dataset) < of_all_ranks:
        return loader  # which has a batch of samples that come twice, or none and is skipped
    return share_in_torchs_order(
        loader,
        seed=sampler.seed,
        pad="repeat" if pads else "none",
        shuffles=sampler.shuffle,
        drop_last=drops_last,
        num_replicas=int(sampler.num_replicas),
        rank=sampler.rank,
    )


def stand_in(loader: pydist.PreparedLoader[Any]) -> pydist.PreparedLoader[Any]:
    """A loader of the data set's first sample, for a rank of whose samples there are none.

    Lightning refuses a loader of no batches, and a rank without any would miss what the others do
    together at the end of an evaluation.
    """
    sampler = pydist.DistributedSampler(loader.dataset, 1, 0, order=pydist.Sequential(1))
    is_batched = loader.batch_sampler is not None
    made = prepared_with(loader, pydist.BatchSampler(sampler, 1) if is_batched else sampler)
    sampler.attend_for(loader.distributed_sampler)
    return made


def batches_of_ranks(loader: pydist.PreparedLoader[Any]) -> tuple[int, int]:
    """How many batches the first rank has of an evaluation, and the last one, as its `stand_in`."""
    batched, sampler = loader.batch_sampler, loader.distributed_sampler
    if isinstance(batched, pydist.BatchSampler):
        share = sampler.share(batched.global_batch_size, drops_last_step=batched.drop_last)
    else:
        share = sampler.share(sampler.num_replicas)
    last = dataclasses.replace(share, rank=sampler.num_replicas - 1)
    return dataclasses.replace(share, rank=0).steps, max(1, last.steps)


class _EpochsOfFabric:
    """In place of a sampler's `set_epoch`; Fabric counts from 0 again in each process.

    After a state was loaded, its epoch comes next. The last number that is set before an iterator
    begins stands for that epoch, and later numbers are counted from it. The last one is Fabric's,
    also where a script sets epochs by itself.
    """

    def __init__(self, sampler: pydist.DistributedSampler) -> None:
        self._sampler = sampler
        # What is added to Fabric's number of an epoch.
        self._ahead = 0

    def __call__(self, epoch: int) -> None:
        sampler = self._sampler
        is_loaded = sampler.is_loaded
        if is_loaded:
            self._ahead = sampler.epoch - epoch
        type(sampler).set_epoch(sampler, max(0, epoch + self._ahead))
        sampler.is_loaded = is_loaded


def counted_by_fabric(loader: Any) -> Any:
    """The loader; if it was prepared, it goes on with the epoch of a loaded state in Fabric."""
    if isinstance(loader, pydist.PreparedLoader):
        sampler = loader.distributed_sampler
        sampler.set_epoch = _EpochsOfFabric(sampler)  # type: ignore[method-assign]
        sampler.begins_next_epoch = (
            "goes over the loader once before (`for _ in loader: pass`), which ends this epoch: "
            "Fabric sets epochs by itself, and overrules set_epoch()"
        )
    return loader
