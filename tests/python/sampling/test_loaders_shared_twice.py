"""A loader over a prepared one, which shares out its batches again, is refused; others are not."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from prepared_loaders import DATA, LOADER_MARKS, RANKS, prepared
from torch.utils.data import DataLoader

import pydist

pytestmark = LOADER_MARKS


class LoaderShard:
    """As Transformers' IterableDatasetShard: of the batches that a loader has, this process's."""

    def __init__(self, loader: Any, num_processes: int) -> None:
        self.loader = loader
        self.num_processes = num_processes
        self.process_index = 0

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self.loader):
            if number % self.num_processes == 0:
                yield batch


class LazyLoaderShard(LoaderShard):
    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self.loader), 0, None, self.num_processes)


class EarlyLoaderShard(LoaderShard):
    """Asks for the iterator before it is iterated over."""

    def __init__(self, loader: Any, num_processes: int) -> None:
        super().__init__(iter(loader), num_processes)


class ToDevice:
    """Shares out nothing, and knows how many ranks there are."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.world_size = self.num_processes = RANKS

    def __iter__(self) -> Iterator[Any]:
        yield from self.loader


class LoaderOfRanks(DataLoader[Any]):
    world_size = num_processes = RANKS
    process_index = 0

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.num_replicas, self.rank = RANKS, 0


def test_who_knows_the_ranks_and_shares_out_nothing_gets_all_batches() -> None:
    loader: Any = LoaderOfRanks(DATA, batch_size=4, shuffle=True)
    own = pydist.prepare(loader, seed=0, num_replicas=RANKS, rank=0)
    assert len(list(own)) == len(list(ToDevice(prepared()))) == 3


@pytest.mark.parametrize("kind", [LoaderShard, LazyLoaderShard, EarlyLoaderShard])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_over_a_prepared_one_is_refused(kind: type[LoaderShard], workers: int) -> None:
    with pytest.raises(pydist.InvalidUsage, match=f"again, among {RANKS}: .*plain DataLoader"):
        next(iter(kind(prepared(num_workers=workers), RANKS)))
    assert len(list(kind(prepared(num_workers=workers), 1))) == 3
