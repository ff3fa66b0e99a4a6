"""Loaders that share out their samples, know what was trained on, and seed their workers.

Note [The first batch decides]
An iterator begins with the first batch that it is asked for, workers included. Until then
`set_epoch` and `load_state_dict` still count: some training loops ask for the iterator, then set
the epoch, and then ask for the first batch. Asking for an iterator changes nothing.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar, cast

import torch
import torch.utils.data as torch_data
from torch.utils.data import DataLoader, IterableDataset

from pydist._torch import FedLoader, take_attributes
from pydist.config.in_force import takes_from_config
from pydist.errors import InvalidUsage
from pydist.job.arguments import a_type, flag
from pydist.sampling.agreed_seed import SeedChoice, place_of_caller
from pydist.sampling.audit import Ledger
from pydist.sampling.batch_sampler import BatchSampler
from pydist.sampling.epoch_pass import EpochPass
from pydist.sampling.order import sample_count
from pydist.sampling.rank_shares import Pad
from pydist.sampling.sampler import DistributedSampler, placement
from pydist.sampling.worker_seeds import Marking, Sent, seed_of

T = TypeVar("T")

# Whose order is known: of torch's own, and not of classes that inherit from them.
_TORCHS_SAMPLERS = (
    torch_data.SequentialSampler,
    torch_data.RandomSampler,
    torch_data.DistributedSampler,
)


def _has_own_sampler(given: Mapping[str, Any]) -> bool:
    """Whether the loader that `prepare` is given has a sampler of pydist's, which has its seed."""
    loader = given.get("loader")
    if not isinstance(loader, DataLoader):
        return False
    batched = loader.batch_sampler
    single = loader.sampler if batched is None else getattr(batched, "sampler", None)
    return any(isinstance(each, BatchSampler | DistributedSampler) for each in (batched, single))


@takes_from_config("loader", names=("seed", "pad", "split_batches"), unless=_has_own_sampler)
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
    loop has got, whatever workers have fetched. Not collective; every rank prepares its own, in the
    same order.

    - A loader made with `shuffle=` gets a `DistributedSampler` and batches of `batch_size` on each
      rank. With `drop_last`, a smaller last batch is left out on all ranks or on none.
    - One that has a `pydist.DistributedSampler` or `pydist.BatchSampler` keeps it.
    - Any other sampler is refused: what it should become on several ranks only you can know.
    - A loader of an iterable data set is returned as it is, with a warning where there are several
      ranks: its data set has to take its share by itself.

    Args:
        loader: not iterated yet, or at least not from now on.
        seed: of the order, and of what workers draw at random; the same on every rank. By default
            it is drawn from the loader's `generator`, or from torch's: what `torch.manual_seed` was
            given before preparing or before the first iteration decides (`torch.set_rng_state`:
            before preparing). Each rank draws, and rank 0's counts; the others take it from the
            job's store when they begin to iterate, which they do not before rank 0 does. A loader
            that neither shuffles nor has workers asks nobody.
        pad: see `DistributedSampler`; "repeat" by default.
        split_batches: whether the loader's `batch_size` is that of all ranks together, which share
            it. By default it is each rank's.
        num_replicas: see `DistributedSampler`.
        rank: see `DistributedSampler`.

    Raises:
        InvalidUsage: the loader is prepared already; it has a sampler that can't be shared (the
            message says what to do), or `in_order=False`, which leaves unknown what was trained on;
            or what `DistributedSampler` and `BatchSampler` refuse. From the first iteration: there
            is no seed, and the ranks that share the samples are not those of the job, or it has not
            been joined yet.
        Mismatch: from the first iteration, where there is no seed: rank 0 has prepared other
            loaders.
        Timeout: from the first iteration, where there is no seed: rank 0 does not begin.

    Example:
        >>> import pydist
        >>> from torch.utils.data import DataLoader
        >>> loader = pydist.prepare(DataLoader(range(10), batch_size=4, shuffle=True))
        >>> batches = iter(loader)
        >>> len(next(batches)), loader.state_dict()["position"]
        (4, 4)
    """
    if not isinstance(loader, DataLoader):
        raise InvalidUsage(f"pydist.prepare takes a DataLoader of torch, and got {a_type(loader)}.")
    if isinstance(loader, PreparedLoader):
        raise InvalidUsage(
            "the loader is prepared already: pydist.prepare has shared out its samples, and again "
            "would leave only a part of them. Use it as it is."
        )
    split_batches = flag("split_batches", split_batches)
    if isinstance(loader.dataset, IterableDataset):
        _warn_of_iterable(loader.dataset, placement()[1] if num_replicas is None else num_replicas)
        return cast("PreparedLoader[T]", loader)
    reason = left_to_program(loader)
    if reason is not None:
        raise InvalidUsage(reason)
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
        return prepared_with(loader, batched)
    assert batched is None or isinstance(batched, torch_data.BatchSampler)
    single = loader.sampler if batched is None else batched.sampler
    if isinstance(single, BatchSampler):
        _require_none(given + ["split_batches"] * split_batches)
        return prepared_with(loader, single)
    if isinstance(single, DistributedSampler):
        _require_none(given)
        sampler = single
    elif isinstance(single, torch_data.DistributedSampler):
        raise InvalidUsage(
            "the loader has torch's DistributedSampler, and the script may call its set_epoch: "
            "make it a pydist.DistributedSampler, which takes the same arguments."
        )
    else:
        sampler = DistributedSampler(
            loader.dataset,
            num_replicas,
            rank,
            isinstance(single, torch_data.RandomSampler),
            0 if seed is None else seed,
            pad=pad,
        )
    source: BatchSampler | DistributedSampler = sampler
    if batched is not None:
        sizes: dict[str, Any] = {"batch_size": batched.batch_size}
        if split_batches:
            sizes = {"global_batch_size": batched.batch_size}
        source = BatchSampler(sampler, drop_last=batched.drop_last, **sizes)
    elif split_batches:
        raise InvalidUsage(
            "split_batches=True shares out batches, and with batch_size=None there are none."
        )
    prepared = prepared_with(loader, source)
    if sampler is not single and seed is None:
        generator = getattr(single, "generator", None)
        generator = loader.generator if generator is None else generator
        sampler.seed_by(SeedChoice(generator, sampler.num_replicas, place_of_caller()))
    return prepared


def _require_none(given: list[str]) -> None:
    if given:
        raise InvalidUsage(
            f"the loader has a sampler of pydist's already: give {', '.join(given)} to that one."
        )


def _warn_of_iterable(dataset: object, ranks: int) -> None:
    if ranks > 1:
        warnings.warn(
            f"the loader's data set, {a_type(dataset)}, is iterable: there are no indices "
            f"to share among the {ranks} ranks, and as it is, each of them gets all of it. Let it "
            "take its share by itself, by pydist.rank() and pydist.world_size() (and by "
            "torch.utils.data.get_worker_info() within workers). The loader stays as it is.",
            stacklevel=4,  # past `prepare`, and past what gives it its configuration
        )


def left_to_program(loader: DataLoader[Any]) -> str | None:
    """Why a loader's samples can't be shared without its program, and what to do; else None.

    Args:
        loader: with any sampler. For an iterable data set torch makes one that is left, too.
    """
    if not loader.in_order:
        return (
            "a loader with in_order=False delivers batches in any order, so nobody could say which "
            "ones were trained on: leave in_order=True."
        )
    batched = loader.batch_sampler
    if isinstance(batched, BatchSampler):
        return None
    if batched is not None and type(batched) is not torch_data.BatchSampler:
        return (
            f"the loader has a batch sampler of its own, {a_type(batched)}, and how its "
            "batches should be shared among ranks only you can know: make an order of it "
            "(pydist.Order), and give the loader batch_sampler=pydist.BatchSampler("
            "pydist.DistributedSampler(dataset, order=...), batch_size)."
        )
    single = loader.sampler if batched is None else batched.sampler
    kind = type(single)
    if isinstance(single, BatchSampler | DistributedSampler):
        return None
    if isinstance(single, torch_data.SequentialSampler | torch_data.RandomSampler):
        samples, all_samples = sample_count(single.data_source), sample_count(loader.dataset)
        if samples != all_samples:
            return (
                f"the loader's {kind.__name__} goes through {samples} samples, and its data set "
                f"has {all_samples}: give the loader a data set of those that you want "
                "(torch.utils.data.Subset), or make an order of it (pydist.Order), and give the "
                "loader sampler=pydist.DistributedSampler(dataset, order=...)."
            )
    if isinstance(single, torch_data.RandomSampler) and (
        single.replacement or single.num_samples != len(single.data_source)
    ):
        return (
            "the loader's RandomSampler draws with replacement, or another number of samples than "
            "there are. Make an order of that (pydist.Order), and give the loader "
            "sampler=pydist.DistributedSampler(dataset, order=...)."
        )
    if kind in _TORCHS_SAMPLERS:
        return None
    return (
        f"the loader has a sampler of its own, {a_type(single)}, and which of its samples each "
        "rank should get only you can know: make an order of it (pydist.Order), and give the "
        "loader sampler=pydist.DistributedSampler(dataset, order=...)."
    )


class PreparedLoader(FedLoader[T]):
    """A loader whose samples the ranks share, and which can be resumed; `prepare` makes it.

    A batch counts as trained on from when the loop has got it, so take a state after the step, or
    between epochs. Leaving a loop early and iterating anew begins where the epoch began for this
    process: at its front, or where a loaded state was made. An iterator begins with its first
    batch: until then `set_epoch` and `load_state_dict` count.

    Its `sampler` is a `DistributedSampler`, and its `batch_sampler` a `BatchSampler`, which are
    torch's types, too: libraries that share out samples leave it alone, or are refused when they
    iterate. A library that makes another loader like this one, of its class and settings, gets one
    of the class that was prepared, whose batches are this rank's share, and which has no state.
    """

    # What this one was prepared from.
    _kind: type[DataLoader[Any]] = DataLoader
    # What yields the indices of a step, and keeps the state.
    _source: BatchSampler | DistributedSampler
    _feed: _Feed

    def __new__(cls, *arguments: Any, **settings: Any) -> Any:
        if not arguments and not settings:  # of `prepare`, and of copies
            return super().__new__(cls)
        return cls._kind(*arguments, **settings)

    @property
    def distributed_sampler(self) -> DistributedSampler:
        """The sampler that holds order, epoch and position."""
        return _sampler_of(self._source)

    def __iter__(self) -> Any:
        # Who shares out batches may run now, and return an iterator that asks for them later; or
        # may have asked for this iterator before, and run with the first batch.
        sampler = self.distributed_sampler
        sampler.refuse_sharing_again(sampler, asks_loader=True)
        return _Delivered(super().__iter__, self._feed, sampler, len(self))

    def set_epoch(self, epoch: int) -> None:
        """Says which epoch comes next; see `DistributedSampler.set_epoch`."""
        self.distributed_sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, int | None]:
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

    # --- for iterators ---------------------------------------------------------------------------

    def feed(self) -> _Feed:
        """What iterators ask for indices, in place of the samplers."""
        return self._feed

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Entered while an iterator is made: sees to what its workers are seeded with."""
        has_workers = self._feed.has_workers = self.num_workers > 0
        given, generator = self.worker_init_fn, self.generator
        own = torch.Generator()
        if has_workers:
            sampler = self.distributed_sampler
            # Persistent workers start once, in whichever epoch.
            seed, epoch = sampler.settle_seed(), 0 if self.persistent_workers else sampler.epoch
            own.manual_seed(seed_of(seed, epoch, 0, sampler.rank))
            if given is not None:
                self.worker_init_fn = Marking(given, self.num_workers)
        # torch draws from it, workers or not.
        self.generator = own
        try:
            yield
        finally:
            self.worker_init_fn, self.generator = given, generator


class _Feed:
    """What the iterators of a prepared loader ask for indices, each of which begins a pass."""

    def __init__(self, source: BatchSampler | DistributedSampler) -> None:
        self._source = source
        # Whether indices go to workers, and seeds with them. See Note [Seeds of workers].
        self.has_workers = False
        # The pass that was begun last.
        self.begun: EpochPass | None = None

    def __len__(self) -> int:
        return self._source.epoch_steps

    def __iter__(self) -> Iterator[Any]:
        # torch asks for more iterators than it uses: those begin nothing.
        return chain.from_iterable(self._begun_when_asked())

    def _begun_when_asked(self) -> Iterator[Iterator[Any]]:
        seed = _sampler_of(self._source).settle_seed() if self.has_workers else 0
        self.begun = begun = self._source.begin_epoch(is_counted=True)
        indices: Iterator[Any] = self._source.indices_of(begun)
        yield self._seeded(indices, begun, seed) if self.has_workers else indices

    def _seeded(self, steps: Iterator[Any], begun: EpochPass, seed: int) -> Iterator[Sent]:
        share, rank = begun.share, _sampler_of(self._source).rank
        for step, indices in enumerate(steps):
            position = share.start + step * share.step
            yield Sent(indices, seed_of(seed, begun.epoch, position, rank))


@dataclass(eq=False)
class _Delivered:
    """An iterator of a prepared loader, which counts what it delivers.

    Args:
        start: makes the iterator of the loader's own class, once the first batch is asked for.
        feed: where that iterator gets its indices.
        sampler: whose state it moves.
        length: of a whole epoch.
    """

    start: Callable[[], Iterator[Any]]
    feed: _Feed
    sampler: DistributedSampler
    length: int
    _fetched: Iterator[Any] | None = field(default=None, init=False)
    _own: EpochPass | None = field(default=None, init=False)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return self.length

    def __next__(self) -> Any:
        try:
            if self._own is None:
                batch = self._first()
            else:
                assert self._fetched is not None
                batch = next(self._fetched)
        except StopIteration:
            if self._own is not None:
                self.sampler.close(self._own)
            raise
        if self._own is not None:
            self.sampler.count_step(self._own)
        return batch

    def _first(self) -> Any:
        """A batch of an iterator that has begun no pass yet."""
        self.sampler.refuse_sharing_again(self.sampler, asks_loader=True)
        if self._fetched is None:
            self.feed.begun = None
            self._fetched = self.start()
        try:
            return next(self._fetched)
        finally:
            # A loader's own class may have begun it with this batch, or not even now.
            self._own = self.feed.begun
            if self._own is not None:
                weakref.finalize(self, self.sampler.drop, self._own).atexit = False


def _sampler_of(source: BatchSampler | DistributedSampler) -> DistributedSampler:
    return source.sampler if isinstance(source, BatchSampler) else source


def prepared_with(
    loader: DataLoader[T], source: BatchSampler | DistributedSampler
) -> PreparedLoader[T]:
    """A loader like the given one, whose batches or samples come from a source of pydist's."""
    kind = type(loader)
    # A loader's class may do things of its own in __iter__: it goes on doing them, below ours.
    made: type[PreparedLoader[T]] = PreparedLoader
    if issubclass(kind, PreparedLoader):
        made = kind
    elif kind is not DataLoader:
        made = type(f"Prepared{kind.__name__}", (PreparedLoader, kind), {"_kind": kind})
    _sampler_of(source).keep_attendance()
    prepared: PreparedLoader[T] = made.__new__(made)
    prepared.__dict__.update(loader.__dict__)
    batch_size = loader.batch_size
    if batch_size is not None and isinstance(source, BatchSampler):
        batch_size = source.batch_size  # this rank's
    is_batched = loader.batch_sampler is not None
    take_attributes(
        prepared,
        _source=source,
        _feed=_Feed(source),
        batch_size=batch_size,
        batch_sampler=source if is_batched else None,
        sampler=_sampler_of(source) if is_batched else source,
    )
    return prepared
