"""Loaders that share out their samples, know what was trained on, and seed their workers.

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
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.utils.data as torch_data
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from pydist.batch_sampler import BatchSampler
from pydist.epoch_pass import EpochPass
from pydist.errors import InvalidUsage
from pydist.ledger import Ledger
from pydist.orders import sample_count
from pydist.sampler import DistributedSampler, placement
from pydist.shares import Pad

__all__ = ["PreparedLoader", "prepare"]

T = TypeVar("T")


def prepare(
    loader: DataLoader[T],
    *,
    seed: int | None = None,
    pad: Pad | None = None,
    split_batches: bool = False,
    num_replicas: int | None = None,
    rank: int | None = None,
) -> PreparedLoader[T]:
    """A loader like the given one, whose samples the ranks share, and which can be resumed.

    It has the loader's dataset, workers, collate function and other settings, shuffles where that
    one shuffles, and leaves the given one as it is. Its `state_dict()` counts the batches that the
    loop has got, whatever workers have fetched. Not collective; every rank prepares its own.

    - A loader made with `shuffle=` gets a `DistributedSampler` and batches of `batch_size` on each
      rank. With `drop_last`, a smaller last batch is left out on all ranks or on none.
    - One that has a `pydist.DistributedSampler` or `pydist.BatchSampler` keeps it.
    - Any other sampler is refused: what it should become on several ranks only you can know.
    - A loader of an iterable data set is returned as it is, with a warning where there are several
      ranks: its data set has to take its share by itself.

    Args:
        loader: not iterated yet, or at least not from now on.
        seed: of the order, the same on every rank; 0 by default.
        pad: see `DistributedSampler`; "repeat" by default.
        split_batches: whether the loader's `batch_size` is that of all ranks together, which share
            it. By default it is each rank's.
        num_replicas: see `DistributedSampler`.
        rank: see `DistributedSampler`.

    Raises:
        InvalidUsage: the loader has a sampler that can't be shared (the message says what to do),
            or `in_order=False`, which leaves unknown what was trained on; or what
            `DistributedSampler` and `BatchSampler` refuse.

    Example:
        >>> import pydist
        >>> from torch.utils.data import DataLoader
        >>> loader = pydist.prepare(DataLoader(range(10), batch_size=4, shuffle=True))
        >>> batches = iter(loader)
        >>> len(next(batches)), loader.state_dict()["position"]
        (4, 4)
    """
    if not isinstance(loader, DataLoader):
        raise InvalidUsage(
            f"pydist.prepare takes a DataLoader of torch, and got a {type(loader).__name__}."
        )
    if isinstance(loader, PreparedLoader):
        raise InvalidUsage("the loader is prepared already.")
    if isinstance(loader.dataset, IterableDataset):
        _warn_of_iterable(loader.dataset, placement()[1] if num_replicas is None else num_replicas)
        return cast("PreparedLoader[T]", loader)
    if not loader.in_order:
        raise InvalidUsage(
            "a loader with in_order=False delivers batches in any order, so nobody could say which "
            "ones were trained on: leave in_order=True."
        )
    given = [
        name
        for name, value in (
            ("seed", seed),
            ("pad", pad),
            ("num_replicas", num_replicas),
            ("rank", rank),
        )
        if value is not None
    ]
    batched = loader.batch_sampler
    if isinstance(batched, BatchSampler):
        _require_none(given + ["split_batches"] * split_batches)
        return _prepared(loader, batched)
    if batched is not None and type(batched) is not torch_data.BatchSampler:
        raise InvalidUsage(
            f"the loader has a batch sampler of its own, a {type(batched).__name__}, and how its "
            "batches should be shared among ranks only you can know: make an order of it "
            "(pydist.Order), and give the loader batch_sampler=pydist.BatchSampler("
            "pydist.DistributedSampler(dataset, order=...), batch_size)."
        )
    single = loader.sampler if batched is None else batched.sampler
    if isinstance(single, BatchSampler):
        _require_none(given + ["split_batches"] * split_batches)
        return _prepared(loader, single)
    if isinstance(single, DistributedSampler):
        _require_none(given)
        sampler = single
    else:
        sampler = DistributedSampler(
            loader.dataset,
            num_replicas,
            rank,
            _shuffles(single, loader.dataset),
            0 if seed is None else seed,
            pad=pad,
        )
    if batched is None:
        if split_batches:
            raise InvalidUsage(
                "split_batches=True shares out batches, and with batch_size=None there are none."
            )
        return _prepared(loader, sampler)
    if split_batches:
        sizes: dict[str, Any] = {"global_batch_size": batched.batch_size}
    else:
        sizes = {"batch_size": batched.batch_size}
    return _prepared(loader, BatchSampler(sampler, drop_last=batched.drop_last, **sizes))


def _require_none(given: list[str]) -> None:
    if given:
        raise InvalidUsage(
            f"the loader has a sampler of pydist's already: give {', '.join(given)} to that one."
        )


def _warn_of_iterable(dataset: object, ranks: int) -> None:
    if ranks > 1:
        warnings.warn(
            f"the loader's data set, a {type(dataset).__name__}, is iterable: there are no indices "
            f"to share among the {ranks} ranks, and as it is, each of them gets all of it. Let it "
            "take its share by itself, by pydist.rank() and pydist.world_size() (and by "
            "torch.utils.data.get_worker_info() within workers). The loader stays as it is.",
            stacklevel=3,
        )


def _shuffles(sampler: object, dataset: object) -> bool:
    """Whether a sampler that torch's loader has made of its data set shuffles.

    Raises:
        InvalidUsage: it is another one, whose order means something.
    """
    kind = type(sampler)
    if isinstance(sampler, torch_data.SequentialSampler | torch_data.RandomSampler):
        samples, all_samples = sample_count(sampler.data_source), sample_count(dataset)
        if samples != all_samples:
            raise InvalidUsage(
                f"the loader's {kind.__name__} goes through {samples} samples, and its data set "
                f"has {all_samples}: give the loader a data set of those that you want "
                "(torch.utils.data.Subset), or make an order of it (pydist.Order), and give the "
                "loader sampler=pydist.DistributedSampler(dataset, order=...)."
            )
    if kind is torch_data.SequentialSampler:
        return False
    if kind is torch_data.RandomSampler:
        assert isinstance(sampler, torch_data.RandomSampler)
        if not sampler.replacement and sampler.num_samples == len(sampler.data_source):
            return True
        raise InvalidUsage(
            "the loader's RandomSampler draws with replacement, or another number of samples than "
            "there are. Make an order of that (pydist.Order), and give the loader "
            "sampler=pydist.DistributedSampler(dataset, order=...)."
        )
    if kind is torch_data.DistributedSampler:
        raise InvalidUsage(
            "the loader has torch's DistributedSampler, and the script may call its set_epoch: "
            "make it a pydist.DistributedSampler, which takes the same arguments."
        )
    raise InvalidUsage(
        f"the loader has a sampler of its own, a {kind.__name__}, and which of its samples each "
        "rank should get only you can know: make an order of it (pydist.Order), and give the "
        "loader sampler=pydist.DistributedSampler(dataset, order=...)."
    )


class PreparedLoader(DataLoader[T]):
    """A loader whose samples the ranks share, and which can be resumed; `prepare` makes it.

    A batch counts as trained on from when the loop has got it, so take a state after the step, or
    between epochs. Leaving a loop early and iterating anew begins where the epoch began for this
    process: at its front, or where a loaded state was made.
    """

    # What yields the indices of a step, and keeps the state.
    _source: BatchSampler | DistributedSampler
    # Seeds workers as they start; None where the script has given a generator.
    _own_generator: torch.Generator | None

    @property
    def distributed_sampler(self) -> DistributedSampler:
        """The sampler that holds order, epoch and position."""
        source = self._source
        return source.sampler if isinstance(source, BatchSampler) else source

    def __iter__(self) -> Any:
        sampler = self.distributed_sampler
        if self._own_generator is not None:
            self._own_generator.manual_seed(_seed_of(sampler, sampler.epoch, 0))
        before = sampler.current
        with sampler.counting():
            # With workers, torch asks for an iterator twice and uses the second.
            fetched = super().__iter__()
        return _Delivered(fetched, sampler, before, len(self))

    def set_epoch(self, epoch: int) -> None:
        """Says which epoch comes next; see `DistributedSampler.set_epoch`."""
        self.distributed_sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, int]:
        """Where training is in the data, for any checkpoint; see `DistributedSampler.state_dict`.

        Example:
            >>> import pydist
            >>> from torch.utils.data import DataLoader
            >>> loader = pydist.prepare(DataLoader(range(10), batch_size=4, num_workers=0))
            >>> for step, batch in enumerate(loader):
            ...     if step == 1:
            ...         state = loader.state_dict()
            >>> loader.load_state_dict(state)
            >>> [batch.tolist() for batch in loader]
            [[8, 9]]
        """
        return self._source.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where a state was made; see `DistributedSampler.load_state_dict`."""
        self._source.load_state_dict(state)

    def ledger(self) -> Ledger:
        """What the loop has got of the epoch that was iterated over last. Not collective."""
        return self._source.ledger()


class _Delivered:
    """An iterator of a prepared loader, which counts what it delivers."""

    def __init__(
        self,
        fetched: Iterator[Any],
        sampler: DistributedSampler,
        before: EpochPass | None,
        length: int,
    ) -> None:
        self._fetched = fetched
        self._sampler = sampler
        self._before = before
        self._length = length
        self._own: EpochPass | None = None
        self._find_own()

    def _find_own(self) -> None:
        """The pass that the loader has begun, which a loader's own class may do with the first
        batch only."""
        current = self._sampler.current
        if current is not self._before:
            self._own, self._before = current, None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return self._length

    def __next__(self) -> Any:
        try:
            if self._own is None:
                with self._sampler.counting():
                    batch = next(self._fetched)
            else:
                batch = next(self._fetched)
        except StopIteration:
            if self._own is None:
                self._find_own()
            if self._own is not None:
                self._sampler.close(self._own)
            raise
        if self._own is None:
            self._find_own()
        if self._own is not None:
            self._own.count_step()
        return batch


def _prepared(
    loader: DataLoader[T], source: BatchSampler | DistributedSampler
) -> PreparedLoader[T]:
    kind = type(loader)
    # A loader's class may do things of its own in __iter__: it goes on doing them, below ours.
    made: type[PreparedLoader[T]] = PreparedLoader
    if kind is not DataLoader:
        made = type(f"Prepared{kind.__name__}", (PreparedLoader, kind), {})
    prepared = made.__new__(made)
    # torch's loader refuses to have its samplers set; what it was made with is all in here.
    prepared.__dict__.update(loader.__dict__)
    sampler = source.sampler if isinstance(source, BatchSampler) else source
    feed = _Seeded(source, sampler) if loader.num_workers > 0 else source
    generator = torch.Generator() if loader.generator is None else None
    batch_size = loader.batch_size
    if batch_size is not None and isinstance(source, BatchSampler):
        batch_size = source.batch_size  # this rank's
    prepared.__dict__.update(
        _source=source,
        _own_generator=generator,
        _iterator=None,
        batch_size=batch_size,
        generator=loader.generator if generator is None else generator,
        batch_sampler=None if loader.batch_sampler is None else feed,
        sampler=feed if loader.batch_sampler is None else sampler,
    )
    return prepared


def _seed_of(sampler: DistributedSampler, epoch: int, position: int) -> int:
    """63 bits for what is drawn at random in fetching the step at `position`."""
    words = (sampler.seed % 2**64, epoch, position, sampler.rank)
    digest = hashlib.blake2b(struct.pack("<4Q", *words), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class _Seeded:
    """What a loader with workers asks for indices: they come with seeds. See Note [Seeds of
    workers]."""

    def __init__(
        self, source: BatchSampler | DistributedSampler, sampler: DistributedSampler
    ) -> None:
        self._source = source
        self._sampler = sampler

    def __len__(self) -> int:
        return len(self._source)

    def __iter__(self) -> Iterator[_Sent]:
        steps: Iterable[Any] = iter(self._source)
        current = self._sampler.current
        assert current is not None
        share = current.share
        return (
            _Sent(indices, _seed_of(self._sampler, current.epoch, share.start + step * share.step))
            for step, indices in enumerate(steps)
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # a copy under construction has no _source yet
            raise AttributeError(name)
        return getattr(self._source, name)


class _Sent:
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
