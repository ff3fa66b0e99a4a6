"""Whole batches of indices, each rank's part of a batch that all ranks share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from torch import Tensor
from torch.utils.data import sampler as torch_samplers

from pydist.errors import InvalidUsage
from pydist.sampling.audit import Ledger
from pydist.sampling.epoch_pass import EpochPass
from pydist.sampling.sampler import DistributedSampler


# It is one of torch's, so that what looks for that finds it; nothing of torch's is used.
class BatchSampler(torch_samplers.BatchSampler):
    """Yields this rank's part of each batch; replaces torch's `BatchSampler`.

    A batch of all ranks together is a stretch of the epoch, so it holds the same samples however
    many ranks share it. Without a loader, for data in memory::

        for indices in pydist.BatchSampler(sampler, global_batch_size=64, as_tensors=True):
            loss = model(inputs[indices]) ...

    With one: `DataLoader(dataset, batch_sampler=pydist.BatchSampler(sampler, 32))`.

    Args:
        sampler: whose order, ranks and state it uses.
        batch_size: samples of a batch on each rank.
        drop_last: leaves out a last batch that is smaller, on all ranks. Without it, the last batch
            follows the sampler's `pad`.
        global_batch_size: instead of `batch_size`, samples of a batch over all ranks. The ranks
            need not divide it: some get one more then (`model.weighted` makes the mean exact).
        as_tensors: yields int64 tensors on the CPU, which index other tensors fastest; by default
            lists, which loaders with workers prefer.

    As torch's, it begins with the first batch that it is asked for: until then `set_epoch` counts.

    Raises:
        InvalidUsage: the size is missing or not valid, or every batch would be left out, or the
            sampler is another one. Where it is asked for batches or for its length: another sampler
            is about to share them out again.

    Example:
        >>> import pydist
        >>> sampler = pydist.DistributedSampler(range(10), num_replicas=2, rank=0, shuffle=False)
        >>> list(pydist.BatchSampler(sampler, 2))
        [[0, 2], [4, 6], [8]]
    """

    sampler: DistributedSampler

    def __init__(
        self,
        sampler: DistributedSampler,
        batch_size: int | None = None,
        drop_last: bool = False,
        *,
        global_batch_size: int | None = None,
        as_tensors: bool = False,
    ) -> None:
        if not isinstance(sampler, DistributedSampler):
            kind = type(sampler)
            raise InvalidUsage(
                f"pydist.BatchSampler makes batches of a pydist.DistributedSampler, and got a "
                f"{kind.__name__} (of {kind.__module__}); of other samplers torch's BatchSampler "
                "does. If a library has put it there to share out samples: pydist has done so, so "
                "tell the library not to (Lightning: Trainer(use_distributed_sampler=False)), or "
                "give it a plain DataLoader."
            )
        ranks = sampler.num_replicas
        if (batch_size is None) == (global_batch_size is None):
            raise InvalidUsage("give either batch_size= (a rank's) or global_batch_size=.")
        if global_batch_size is None:
            assert batch_size is not None
            _require_positive("batch_size", batch_size, 1)
            global_batch_size = batch_size * ranks
        else:
            _require_positive("global_batch_size", global_batch_size, ranks)
        self.sampler = sampler
        self.batch_size = -(-global_batch_size // ranks)
        self.global_batch_size = global_batch_size
        self.drop_last = drop_last
        self.as_tensors = as_tensors
        if drop_last and global_batch_size > len(sampler.order):
            raise InvalidUsage(
                f"a batch of {global_batch_size} samples over {ranks} ranks is more than the "
                f"{len(sampler.order)} there are, and with drop_last=True nothing would be left: "
                "use a smaller one, or drop_last=False."
            )

    def __iter__(self) -> Iterator[Any]:
        # Now and with the first batch: whoever asks may return an iterator of these, or be one.
        self.sampler.refuse_sharing_again(self)
        # Python runs for the first batch only: the chain does the rest.
        return chain.from_iterable(self._begun_when_asked())

    def _begun_when_asked(self) -> Iterator[Iterator[Any]]:
        self.sampler.refuse_sharing_again(self)
        yield self.indices_of(self.begin_epoch())

    def __len__(self) -> int:
        """The number of this rank's batches in a whole epoch."""
        self.sampler.refuse_sharing_again(self)
        return self.epoch_steps

    def begin_epoch(self, *, is_counted: bool = False) -> EpochPass:
        """A pass over what is left of the epoch, a batch a step."""
        return self.sampler.begin(
            self.global_batch_size,
            drops_last_step=bool(self.drop_last),
            batch=self.global_batch_size,
            is_counted=is_counted,
        )

    def indices_of(self, begun: EpochPass) -> Iterator[list[int]] | Iterator[Tensor]:
        """What a pass goes through."""
        return begun.batches(as_tensors=self.as_tensors)

    @property
    def epoch_steps(self) -> int:
        """In how many steps `begin_epoch` goes through a whole epoch."""
        return self.sampler.share(
            self.global_batch_size, drops_last_step=bool(self.drop_last)
        ).steps

    def set_epoch(self, epoch: int) -> None:
        """The sampler's."""
        self.sampler.set_epoch(epoch)

    def state_dict(self, batches_seen: int | None = None) -> dict[str, int | None]:
        """Where training is in the data; see `DistributedSampler.state_dict`.

        Args:
            batches_seen: how many of its latest iterator's batches this rank has trained on.
                A prepared loader knows.
        """
        return self.sampler.state_of(batches_seen, "batches_seen", "batches")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where a state was made; see `DistributedSampler.load_state_dict`.

        Raises:
            InvalidUsage: besides, the state is from the middle of an epoch with other batches.
        """
        self.sampler.check_batch(self.global_batch_size, state)
        self.sampler.load_state_dict(state)

    def ledger(self) -> Ledger:
        """The sampler's."""
        return self.sampler.ledger()


def _require_positive(name: str, size: int, least: int) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or size < least:
        ranks = f", one sample for each of {least} ranks at least" if least > 1 else ""
        raise InvalidUsage(f"{name}={size!r} is not valid; use a whole number >= {least}{ranks}.")
