"""Libraries that share out samples meet what is shared out already: they are refused, or leave it.

The libraries' ways are written out by hand, as far as they touch loaders. Accelerate wraps the
batch sampler, or reads on one rank and sends each a part. Lightning and Ray put in a
DistributedSampler, unless they find one. Some wrap the sampler into a data set, so as to put a
DistributedSampler over that.
"""

import itertools
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from launch import Ranks, run_ranks
from prepared_loaders import DATA, LOADER_MARKS, RANKS, prepared
from thorough import everyday
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler, TensorDataset
from torch.utils.data import DistributedSampler as TorchSampler

import pydist

pytestmark = LOADER_MARKS


def share(**settings: Any) -> pydist.DistributedSampler:
    return pydist.DistributedSampler(DATA, RANKS, 0, shuffle=False, **settings)


# --- what libraries do ---------------------------------------------------------------------------


class BatchSamplerShard(BatchSampler):
    """As Accelerate's: of the batches of one process, this process's."""

    def __init__(self, batch_sampler: Any, num_processes: int, process_index: int) -> None:
        self.batch_sampler = batch_sampler
        self.num_processes = num_processes
        self.process_index = process_index
        self.batch_size = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = getattr(batch_sampler, "drop_last", False)

    def __len__(self) -> int:
        return len(self.batch_sampler) // self.num_processes

    def __iter__(self) -> Iterator[list[int]]:
        for number, batch in enumerate(self.batch_sampler):
            if number % self.num_processes == self.process_index:
                yield batch


def accelerate(loader: DataLoader[Any], processes: int = RANKS) -> DataLoader[Any]:
    """As `Accelerator.prepare` does with a loader."""
    batches: Any = loader.batch_sampler
    if isinstance(loader.sampler, BatchSampler):
        batches = loader.sampler
    if processes > 1:
        batches = BatchSamplerShard(batches, processes, 0)
    settings: Any = {"num_workers": loader.num_workers, "collate_fn": loader.collate_fn}
    if isinstance(loader.sampler, BatchSampler):
        settings.update(sampler=batches, batch_size=None)
    else:
        settings.update(batch_sampler=batches)
    return DataLoader(loader.dataset, **settings)


class DatasetOfSampler(Dataset[Any]):
    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def read(self) -> None:
        self.indices = list(self.sampler)

    def __getitem__(self, place: int) -> Any:
        return self.indices[place]


class SamplerWrapper(TorchSampler[Any]):
    """As Lightning's DistributedSamplerWrapper, and others': shares out what any sampler yields."""

    def __init__(self, sampler: Any, num_replicas: int, rank: int) -> None:
        super().__init__(DatasetOfSampler(sampler), num_replicas, rank, shuffle=False)

    def __iter__(self) -> Iterator[Any]:
        dataset: Any = self.dataset
        dataset.read()
        return (dataset[place] for place in super().__iter__())


def lightning(loader: DataLoader[Any], replicas: int = RANKS) -> DataLoader[Any]:
    """As a Trainer does with a loader."""
    if isinstance(loader.sampler, TorchSampler):
        return loader
    return renewed(loader, SamplerWrapper(loader.sampler, replicas, 0))


def renewed(loader: DataLoader[Any], sampler: Any, wrap: Any = None) -> DataLoader[Any]:
    """A loader of the same class with another sampler, as Lightning makes one."""
    batches: Any = loader.batch_sampler
    settings: Any = {"num_workers": loader.num_workers, "collate_fn": loader.collate_fn}
    if batches is None:
        return type(loader)(loader.dataset, None, sampler=sampler, **settings)
    if type(batches) is BatchSampler:
        return type(loader)(loader.dataset, loader.batch_size, sampler=sampler, **settings)
    batches = type(batches)(sampler, batch_size=batches.batch_size, drop_last=batches.drop_last)
    if wrap is not None:
        batches = wrap(batches)
    return type(loader)(loader.dataset, batch_sampler=batches, **settings)


def ray(loader: DataLoader[Any]) -> DataLoader[Any]:
    """As ray.train.torch.prepare_data_loader does."""
    if isinstance(loader.sampler, TorchSampler):
        return loader
    sampler: Any = TorchSampler(loader.dataset, RANKS, 0)  # type: ignore[arg-type]
    return DataLoader(loader.dataset, loader.batch_size, sampler=sampler)


class Recorder:
    """As Lightning's wrapper of batch samplers, which keeps the indices of predictions."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches
        self.seen: list[Any] = []

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            self.seen.append(batch)
            yield batch


class SkippingBatches(BatchSampler):
    """As Accelerate's `skip_first_batches`."""

    def __init__(self, batch_sampler: Any, skipped: int) -> None:
        self.batch_sampler = batch_sampler
        self.skipped = skipped

    def __iter__(self) -> Iterator[list[int]]:
        for number, batch in enumerate(self.batch_sampler):
            if number >= self.skipped:
                yield batch

    def __len__(self) -> int:
        return len(self.batch_sampler) - self.skipped


# --- what can be recognised ----------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_they_are_of_torchs_types(workers: int) -> None:
    loader = prepared(num_workers=workers)
    assert isinstance(loader, DataLoader)
    assert isinstance(loader.sampler, TorchSampler)
    assert isinstance(loader.batch_sampler, BatchSampler)
    assert loader.batch_sampler.sampler is loader.sampler
    assert loader.batch_size == loader.batch_sampler.batch_size == 4
    singles = prepared(batch_size=None, num_workers=workers)
    assert isinstance(singles.sampler, TorchSampler)
    # What anybody gets out of it is what the loader delivers.
    assert isinstance(loader.sampler, pydist.DistributedSampler)
    batches = [batch.tolist() for batch in loader]
    loader.set_epoch(0)
    assert list(loader.batch_sampler) == batches
    loader.set_epoch(0)
    assert list(loader.sampler) == [index for batch in batches for index in batch]
    again = pydist.prepare(DataLoader(DATA, batch_sampler=loader.batch_sampler))
    again.set_epoch(0)
    assert [batch.tolist() for batch in again] == batches


# --- refused by name -----------------------------------------------------------------------------


def with_sampler() -> DataLoader[Any]:
    return DataLoader(DATA, 4, sampler=share())


def with_batch_sampler() -> DataLoader[Any]:
    return DataLoader(DATA, batch_sampler=pydist.BatchSampler(share(), 4))


def with_indexed_batches() -> DataLoader[Any]:
    tensors: Any = torch.arange(22)
    batches: Any = pydist.BatchSampler(share(), 4)
    return DataLoader(tensors, None, sampler=batches)


def prepared_batches() -> DataLoader[Any]:
    return pydist.prepare(with_indexed_batches())


@pytest.mark.parametrize("workers", [0, 1])
def test_a_wrapped_batch_sampler_is_refused(workers: int) -> None:
    for loader in (prepared(num_workers=workers), with_sampler(), with_batch_sampler()):
        wrapped = accelerate(loader)
        with pytest.raises(pydist.InvalidUsage, match=r"among 2 ranks, and a BatchSamplerShard"):
            len(wrapped)
        with pytest.raises(pydist.InvalidUsage, match=r"again, among 2: .*plain DataLoader"):
            next(iter(wrapped))


@pytest.mark.parametrize("make", [with_indexed_batches, prepared_batches])
def test_indexed_batches_are_refused(make: Callable[[], DataLoader[Any]]) -> None:
    with pytest.raises(pydist.InvalidUsage, match="a BatchSamplerShard"):
        list(accelerate(make()))
    with pytest.raises(pydist.InvalidUsage, match="a SamplerWrapper"):
        list(lightning(make()))


def test_a_sampler_over_a_sampler_is_refused() -> None:
    for sampler in (share(), pydist.BatchSampler(share(), 4)):
        over: Any = sampler
        with pytest.raises(pydist.InvalidUsage, match=r"a DistributedSampler \(of torch\.utils"):
            TorchSampler(over, RANKS, 0)
        with pytest.raises(pydist.InvalidUsage, match="a SamplerWrapper"):
            list(SamplerWrapper(over, RANKS, 0))
        with pytest.raises(pydist.InvalidUsage, match="shares out the samples of a data set"):
            pydist.DistributedSampler(over, RANKS, 0)
    with pytest.raises(pydist.InvalidUsage, match="got a PreparedLoader: give it the data set"):
        pydist.DistributedSampler(prepared(), RANKS, 0)
    hidden = DatasetOfSampler(share())
    with pytest.raises(pydist.InvalidUsage, match=r"a DistributedSampler \(of pydist\.sampling"):
        pydist.DistributedSampler(hidden, RANKS, 0)


class LazyShard(BatchSampler):
    """Returns an iterator that asks when this sampler's method is over."""

    def __init__(self, inner: Any, shard: int, num_shards: int) -> None:
        self.inner = inner
        self.shard, self.num_shards = shard, num_shards

    def __iter__(self) -> Any:
        return itertools.islice(self.inner, self.shard, None, self.num_shards)


class LazyExpression(LazyShard):
    def __iter__(self) -> Any:
        pairs = enumerate(self.inner)
        return (batch for at, batch in pairs if at % self.num_shards == self.shard)


class Uninherited:
    """Of torch's type no more than the methods."""

    def __init__(self, inner: Any, shard: int, num_shards: int) -> None:
        self.inner, self.shard, self.num_shards = inner, shard, num_shards

    def __iter__(self) -> Any:
        yield from itertools.islice(self.inner, self.shard, None, self.num_shards)


class Eager(BatchSampler):
    """Asks before it has any attribute."""

    def __init__(self, inner: Any, shard: int, num_shards: int) -> None:
        self.all = list(inner)[shard::num_shards]

    def __iter__(self) -> Any:
        return iter(self.all)


@pytest.mark.parametrize("kind", [Uninherited, Eager])
def test_a_share_of_shares_is_seen_by_what_it_is_made_of(kind: Any) -> None:
    for inner in (pydist.BatchSampler(share(), 4), share()):
        with pytest.raises(pydist.InvalidUsage, match=f"an? {kind.__name__} .* about to share"):
            list(kind(inner, 0, RANKS))


@pytest.mark.parametrize("kind", [LazyShard, LazyExpression])
def test_who_returns_an_iterator_of_our_batches_is_refused(kind: type[LazyShard]) -> None:
    for inner in (pydist.BatchSampler(share(), 4), share()):
        with pytest.raises(pydist.InvalidUsage, match=f"a {kind.__name__} .* is about to share"):
            iter(kind(inner, 0, RANKS))


def test_another_sampler_in_our_batches_is_refused() -> None:
    with pytest.raises(pydist.InvalidUsage, match=r"a SamplerWrapper \(of .*tell the library not"):
        lightning(with_batch_sampler())
    with pytest.raises(pydist.InvalidUsage, match="got a SequentialSampler"):
        renewed(prepared(), SequentialSampler(DATA))


def test_preparing_twice_is_refused() -> None:
    with pytest.raises(pydist.InvalidUsage, match="prepared already"):
        pydist.prepare(prepared())


# --- left as it is -------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("library", [lightning, ray])
def test_a_loader_with_a_distributed_sampler_is_left_alone(library: Any, workers: int) -> None:
    for loader in (prepared(num_workers=workers), with_sampler(), prepared(batch_size=None)):
        assert library(loader) is loader


class Doubling(DataLoader[Any]):
    """With things of its own to do, and arguments of its own."""

    def __init__(self, dataset: Any, *settings: Any, factor: int = 2, **named: Any) -> None:
        super().__init__(dataset, *settings, **named)
        self.factor = factor

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield self.factor * batch


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_made_anew_delivers_the_same_share(workers: int) -> None:
    loader = prepared(num_workers=workers)
    expected = [batch.tolist() for batch in loader]
    loader.set_epoch(0)
    again = renewed(loader, loader.sampler)
    assert type(again) is DataLoader
    assert [batch.tolist() for batch in again] == expected
    loader.set_epoch(0)
    recorded = renewed(loader, loader.sampler, Recorder)
    assert [batch.tolist() for batch in recorded] == expected

    plain: Any = Doubling(DATA, 4, shuffle=True)
    loader = pydist.prepare(plain, seed=0, num_replicas=RANKS, rank=0)
    again = renewed(loader, loader.sampler)
    assert type(again) is Doubling
    assert [batch.tolist() for batch in again] == [[2 * i for i in batch] for batch in expected]


def test_what_does_not_share_out_is_let_through() -> None:
    loader = prepared()
    expected = [batch.tolist() for batch in loader]
    loader.set_epoch(0)
    assert [batch.tolist() for batch in accelerate(loader, processes=1)] == expected
    loader.set_epoch(0)
    skipping = DataLoader(DATA, batch_sampler=SkippingBatches(loader.batch_sampler, 1))
    assert (len(skipping), [batch.tolist() for batch in skipping]) == (2, expected[1:])
    # Nobody has counted, so the loader says nothing about where training is.
    with pytest.raises(pydist.InvalidUsage, match="only you can know"):
        loader.state_dict()
    # A sampler of one share may be shared out.
    whole = DataLoader(DATA, 4, sampler=pydist.DistributedSampler(DATA, 1, 0))
    assert len(list(accelerate(whole))) == 3


def share_by_hosts() -> list[list[int]]:
    """Four ranks, of which two by two share a part that pydist has shared out."""
    pydist.init()
    sampler = pydist.DistributedSampler(DATA, 2, pydist.rank() // 2, shuffle=False)
    loader: Any = DataLoader(DATA, batch_sampler=pydist.BatchSampler(sampler, 2))
    loader = accelerate(loader)
    return [batch.tolist() for batch in loader]


def test_shares_of_shares_may_be_what_is_meant() -> None:
    results = run_ranks(share_by_hosts, 4)
    assert results[0] == results[1] == [[0, 2], [8, 10], [16, 18]]
    assert results[2] == results[3] == [[1, 3], [9, 11], [17, 19]]


# --- one rank reads for all ----------------------------------------------------------------------


def dispatch(how: str) -> tuple[int, list[str]]:
    """What rank 0 has read, where it reads for all as a library does that dispatches batches."""
    pydist.init()
    rank = pydist.rank()
    plain = DataLoader(TensorDataset(torch.arange(24)), batch_size=4)
    loader: Any = pydist.prepare(plain, seed=3 if "seed" in how else None)
    made = DataLoader(loader.dataset, batch_sampler=loader.batch_sampler)
    read = made if how == "of its sampler" else loader
    count = 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            if rank == 0 or how == "all":
                count += sum(len(batch) for (batch,) in read)
            pydist.barrier()
    return count, [str(warning.message) for warning in caught]


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    with Ranks(3) as ranks:
        yield ranks


@pytest.mark.parametrize(
    "how", everyday("of its sampler", "all", thorough=("of the loader", "with a seed"))
)
def test_ranks_that_never_begin_are_told_of(three: Ranks, how: str) -> None:
    found = three.run(dispatch, how, timeout=30)
    assert found[0][0] == 2 * 8
    told = [messages for _, messages in found]
    if how == "all":
        assert told == [[], [], []]
        return
    assert told[1:] == [[], []]
    assert len(told[0]) == 1
    assert "ranks 1, 2 of 3 did not begin" in told[0][0]
    assert "dispatch_batches=True" in told[0][0]


def prepare_one_more_on_rank_0(what: str) -> tuple[str, list[str]]:
    pydist.init()
    if pydist.rank() == 0:
        for _ in pydist.prepare(DataLoader(range(30), batch_size=4), seed=1):  # type: ignore[arg-type]
            pass
        if what == "of the same kind":
            other: Any = DataLoader(range(24), batch_size=4, shuffle=True)
            next(iter(pydist.prepare(other)))
    loader: Any = DataLoader(range(24), batch_size=4, shuffle=True)
    loader = pydist.prepare(loader)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for _ in loader:
                if what == "of the same kind":
                    break  # the other rank comes no further
                pydist.barrier()
        except pydist.Mismatch as error:
            return "Mismatch", [str(error)]
    return "", [str(warning.message) for warning in caught]


def test_a_loader_that_one_rank_alone_prepares_is_not_taken_for_anothers() -> None:
    # Of another kind, and with a seed: the others' loaders are still told apart.
    assert run_ranks(prepare_one_more_on_rank_0, 2, "of another kind") == [("", [])] * 2
    _, (error, told) = run_ranks(prepare_one_more_on_rank_0, 2, "of the same kind")
    assert error == "Mismatch"
    lines = re.findall(r"prepared at line (\d+) of prepare_one_more_on_rank_0", told[0])
    assert len(set(lines)) == 2
