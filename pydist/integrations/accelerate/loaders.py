"""Accelerate's loader over one of pydist's, which knows its place in the epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch.utils.data as torch_data
from accelerate.data_loader import DataLoaderShard
from torch.utils.data import DataLoader

import pydist
from pydist.integrations.torch_order import share_in_torchs_order
from pydist.sampling.loader import left_to_program


class ResumableLoader(DataLoaderShard):
    """Hands on the batches of a prepared loader as Accelerate's own loaders do.

    It moves them to the device, and says when the last one comes. Accelerate looks one batch ahead,
    and takes the state before it does: a state counts the batches that the loop has got.
    """

    def __init__(
        self,
        prepared: pydist.PreparedLoader[Any],
        evaluates: Callable[[], bool],
        **settings: Any,
    ) -> None:
        super().__init__(prepared.dataset, **settings)
        # Whether a loop that begins now is an evaluation's.
        self._evaluates = evaluates
        self.base_dataloader = prepared
        self.dl_state_dict = prepared.state_dict()
        # Where in the epoch the batch ends that the loop got last.
        self._position = 0

    def __iter__(self) -> Iterator[Any]:
        self.set_epoch(self.iteration)
        self._position = self.base_dataloader.distributed_sampler.start
        began, is_evaluation = dict(self.dl_state_dict), self._evaluates()
        try:
            for batch in super().__iter__():
                self._position += self.total_batch_size
                yield batch
        except GeneratorExit:
            # The loop was left. A training goes on from there; the next evaluation begins anew.
            if is_evaluation:
                self.dl_state_dict = began
            raise

    @property
    def total_batch_size(self) -> int:
        """The samples of a step, of all processes together."""
        size: int = self.batch_sampler.global_batch_size
        return size

    def set_epoch(self, epoch: int) -> None:
        """Says which epoch comes next, as Accelerate does before each."""
        self.iteration = epoch
        self.base_dataloader.set_epoch(epoch)
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def state_dict(self) -> dict[str, int | None]:
        """The place in the data, the same on every process; whole numbers."""
        # Accelerate marks the end of an iteration by a key of its own.
        return {key: value for key, value in self.dl_state_dict.items() if key[0] != "_"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where a state was made.

        Raises:
            InvalidUsage: It is of other data, or from mid-epoch with another global batch.
        """
        self.base_dataloader.load_state_dict(state)
        self.dl_state_dict = dict(state)
        self.iteration = state["epoch"]

    def skip_to(self, batches: int) -> None:
        """Begins the epoch that comes next behind its first batches."""
        state = self.base_dataloader.state_dict()
        length = len(self.base_dataloader.distributed_sampler.order)
        position = min(batches * self.total_batch_size, length)
        place = {"epoch": self.iteration, "position": position, "batch": self.total_batch_size}
        self.load_state_dict({**state, **place})

    def samples_of_step(self) -> int:
        """How many samples all processes together have in the batch that the loop got last."""
        length = len(self.base_dataloader.distributed_sampler.order)
        return self.total_batch_size - max(0, self._position - length)

    def shares_of_step(self) -> list[int]:
        """How many of them each process has; repeated ones, which fill up a batch, included."""
        sampler, samples = self.base_dataloader.distributed_sampler, self.samples_of_step()
        ranks = sampler.num_replicas
        if sampler.pad == "repeat":
            samples = min(-(-samples // ranks) * ranks, self.total_batch_size)
        return [len(range(rank, samples, ranks)) for rank in range(ranks)]


def can_resume(loader: DataLoader[Any]) -> bool:
    """Whether pydist can share out a loader's samples; Accelerate does it for the others.

    These are iterable data sets, and samplers and batch samplers of a script's own.
    """
    return loader.batch_sampler is not None and left_to_program(loader) is None


def resumable(
    loader: DataLoader[Any], *, seed: int | None, pads: bool, split_batches: bool
) -> pydist.PreparedLoader[Any]:
    """A loader whose samples the processes share.

    Args:
        loader: One for which `can_resume` is true.
        seed: Of an order as Accelerate's seedable sampler has it; None for one of pydist's, whose
            seed the processes agree on.
        pads: Whether the last batch is filled up, so that all processes have equally many.
        split_batches: Whether the batch size is that of all processes together.

    Raises:
        InvalidUsage: The loader has torch's DistributedSampler.
    """
    if isinstance(loader, pydist.PreparedLoader):
        return loader
    own = isinstance(loader.batch_sampler, pydist.BatchSampler)
    if own or isinstance(loader.sampler, pydist.DistributedSampler):
        return pydist.prepare(loader)
    pad: Any = "repeat" if pads else "none"
    if seed is None or not isinstance(loader.sampler, torch_data.RandomSampler):
        return pydist.prepare(loader, pad=pad, split_batches=split_batches)
    return share_in_torchs_order(loader, seed=seed, pad=pad, split_batches=split_batches)
