"""How random the shuffled order is, and orders of one's own.

All seeds are fixed, so a test passes always or never. What is compared are standard deviations from
what a random order would give: each statistic is about normal (a sum of many terms, or chi-square
with many degrees of freedom, by its mean and variance), so 4 of them would be exceeded by one in
16000 of random orders, and there are fewer than 100 statistics.
"""

import itertools
import math
import pickle
from collections import Counter

import numpy as np
import pytest
import torch
from torch import Tensor

import pydist
from pydist.sampling.order import Order, name_digest

LIMIT = 4.0
# Just beyond the table, where the grid is smallest; a full grid, one with the most places too many;
# a large one.
LENGTHS = [4097, 4160, 4161, 10_007, 1_000_003]


def shuffled(
    length: int, count: int, *, seeds: range = range(1), epochs: range = range(1)
) -> np.ndarray:
    """The first `count` samples of each seed and epoch, one row for each."""
    order = pydist.Shuffled(length)
    rows = [
        order.indices(range(count), seed=seed, epoch=epoch)
        for seed, epoch in itertools.product(seeds, epochs)
    ]
    return torch.stack(rows).numpy()


def deviations(counts: np.ndarray, expected: np.ndarray) -> float:
    """Of chi-square from its mean, in standard deviations. Cells expect 5 or more each."""
    assert expected.min() >= 5
    freedom = counts.size - 1
    chi_square = ((counts - expected) ** 2 / expected).sum()
    return float((chi_square - freedom) / math.sqrt(2 * freedom))


def cells(length: int, count: int) -> np.ndarray:
    """In which of `count` cells of about the same size each sample lies."""
    return np.arange(length) * count // length


def assert_even(samples: np.ndarray, length: int, count: int) -> None:
    """Samples fall into `count` cells as evenly as chance would have it."""
    cell = cells(length, count)
    counts = np.bincount(cell[samples.ravel()], minlength=count)
    sizes = np.bincount(cell, minlength=count)
    assert abs(deviations(counts, sizes / length * samples.size)) < LIMIT


@pytest.mark.parametrize("length", [2, 3, 4, 5])
def test_all_orders_of_few_samples_are_equally_likely(length: int) -> None:
    orders = Counter(map(tuple, shuffled(length, length, seeds=range(150), epochs=range(40))))
    counts = np.array([orders[each] for each in itertools.permutations(range(length))])
    assert abs(deviations(counts, np.full(counts.size, counts.mean()))) < LIMIT


@pytest.mark.parametrize("length", [*range(6, 70, 7), 4096, *LENGTHS])
def test_every_position_may_hold_every_sample(length: int) -> None:
    rows = shuffled(length, min(length, 64), seeds=range(500))
    parts = min(length, 16)
    for column in (0, 1, rows.shape[1] // 2, rows.shape[1] - 1):
        assert_even(rows[:, column], length, parts)
    assert_even(rows, length, parts)


@pytest.mark.parametrize("length", LENGTHS)
def test_neighbours_have_nothing_to_do_with_each_other(length: int) -> None:
    rows = shuffled(length, 2000, seeds=range(300))
    columns = math.isqrt(length - 1) + 1  # of the grid that the order is computed on
    for distance in (1, 2, columns - 1, columns, columns + 1):
        # Of two different samples: one less than the length, so from 0 again.
        apart = (rows[:, distance:] - rows[:, :-distance]) % length - 1
        assert_even(apart, length - 1, 499)
        if length < 20_000:
            assert_even(apart, length - 1, length - 1)
    # Neighbours stay neighbours as often as chance would have it: once in an order, each way.
    apart = (rows[:, 1:] - rows[:, :-1]) % length
    for near in (1, length - 1):
        expected = apart.size / (length - 1)
        assert abs((apart == near).sum() - expected) < LIMIT * math.sqrt(expected) + 1


@pytest.mark.parametrize("length", [60, 4096, 4097, 1_000_003])
def test_seeds_and_epochs_have_nothing_to_do_with_each_other(length: int) -> None:
    count = min(length, 500)
    rows = shuffled(length, count, seeds=range(12), epochs=range(12)).reshape(12, 12, count)
    parts = min(length, 499)
    for one, other in (
        (rows[1:], rows[:-1]),  # a seed and the next
        (rows[:, 1:], rows[:, :-1]),  # an epoch and the next
        (rows[1:, :-1], rows[:-1, 1:]),  # what seed + epoch would make the same
        (rows[0, 1:], rows[1:, 0]),  # seed and epoch swapped
    ):
        assert_even((one - other) % length, length, parts)


def test_seeds_may_be_any_number_of_64_bits() -> None:
    order = pydist.Shuffled(100)
    fronts = {
        tuple(order.indices(range(9), seed=seed, epoch=0).tolist())
        for seed in (-(2**63), -1, 0, 1, 2**63 - 1, 2**64 - 2)
    }
    assert len(fronts) == 6


@pytest.mark.parametrize("length", [10**12, 2**63 - 1])
def test_length_costs_nothing(length: int) -> None:
    order = pydist.Shuffled(length)
    ends = range(length - 10**7, length, 10**6 + 3)
    samples = order.indices(ends, seed=0, epoch=0)
    assert len(set(samples.tolist())) == len(ends)
    # A place is computed by itself.
    for place, sample in zip(ends, samples.tolist(), strict=True):
        assert order.indices(range(place, place + 1), seed=0, epoch=0).tolist() == [sample]


def test_orders_are_pickled_without_what_they_compute_with() -> None:
    order = pydist.Shuffled(5000)
    before = order.indices(range(10), seed=3, epoch=4)
    again = pickle.loads(pickle.dumps(order))
    assert again.indices(range(10), seed=3, epoch=4).equal(before)


# --- orders of one's own -------------------------------------------------------------------------


class ShardByShard:
    """Files in shuffled order, each from its start to its end."""

    name = "shard by shard"

    def __init__(self, shards: int, samples_a_shard: int) -> None:
        self.shards = pydist.Shuffled(shards)
        self.samples_a_shard = samples_a_shard

    def __len__(self) -> int:
        return len(self.shards) * self.samples_a_shard

    def indices(self, positions: range, *, seed: int, epoch: int) -> Tensor:
        place = torch.arange(positions.start, positions.stop, positions.step)
        shards = self.shards.indices(range(len(self.shards)), seed=seed, epoch=epoch)
        first = shards[place // self.samples_a_shard] * self.samples_a_shard
        return first + place % self.samples_a_shard


class Weighted:
    """As many draws with replacement as there are samples, heavier ones more often."""

    name = "weighted"

    def __init__(self, weights: Tensor) -> None:
        self.bounds = weights.double().cumsum(0)
        self.places = pydist.Shuffled(len(weights))

    def __len__(self) -> int:
        return len(self.bounds)

    def indices(self, positions: range, *, seed: int, epoch: int) -> Tensor:
        # Stratified: one draw from each stretch of the sum of weights, in shuffled order.
        stretch = self.places.indices(positions, seed=seed, epoch=epoch)
        point = (stretch.double() + 0.5) / len(self) * self.bounds[-1]
        return torch.searchsorted(self.bounds, point)


class ByLength:
    """Batches of samples of about the same length, the batches in shuffled order."""

    name = "by length"

    def __init__(self, lengths: Tensor, batch: int) -> None:
        self.batches = lengths.argsort(stable=True).view(-1, batch)
        self.places = pydist.Shuffled(len(self.batches))

    def __len__(self) -> int:
        return self.batches.numel()

    def indices(self, positions: range, *, seed: int, epoch: int) -> Tensor:
        place = torch.arange(positions.start, positions.stop, positions.step)
        order = self.places.indices(range(len(self.places)), seed=seed, epoch=epoch)
        batch = self.batches.shape[1]
        return self.batches[order[place // batch], place % batch]


OWN: list[Order] = [
    ShardByShard(6, 4),
    Weighted(torch.arange(1, 25)),
    ByLength(torch.arange(24).flip(0) // 3, 4),
]


@pytest.mark.parametrize("order", OWN, ids=lambda order: order.name)
def test_an_order_of_ones_own_is_shared_and_resumed_like_any(order: Order) -> None:
    assert isinstance(order, Order)
    whole = order.indices(range(24), seed=5, epoch=0).tolist()

    def sampler(ranks: int, rank: int) -> pydist.BatchSampler:
        own = pydist.DistributedSampler(range(24), ranks, rank, seed=5, order=order)
        return pydist.BatchSampler(own, global_batch_size=4)

    got = []
    samplers = [sampler(2, rank) for rank in range(2)]
    for batches in zip(*(itertools.islice(each, 3) for each in samplers), strict=True):
        got += [*itertools.chain(*zip(*batches, strict=True))]
    state = samplers[0].state_dict(batches_seen=3)
    rest = sampler(1, 0)
    rest.load_state_dict(state)
    got += [*itertools.chain(*rest)]
    assert got == whole
    assert rest.sampler.epoch == 1
    with pytest.raises(pydist.InvalidUsage, match=r"another order .* \(of 'shuffled'\)"):
        rest.load_state_dict({**state, "order": name_digest(pydist.Shuffled(1))})


@pytest.mark.parametrize("wrong", [torch.zeros(3), torch.zeros(2, dtype=torch.int64)])
def test_an_order_that_gives_something_else_is_named(wrong: Tensor) -> None:
    class Wrong:
        name = "wrong"

        def __len__(self) -> int:
            return 3

        def indices(self, positions: range, *, seed: int, epoch: int) -> Tensor:
            return wrong

    with pytest.raises(pydist.InvalidUsage, match="the order 'wrong' was asked for the indices at"):
        list(pydist.DistributedSampler(range(3), 1, 0, order=Wrong()))
