"""Every sample once: shares, batches, resumption at another number of ranks, ledgers, errors."""

import itertools
import os
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from all_samplers import batch_samplers, flat, samplers
from hypothesis import given
from hypothesis import settings as trials
from hypothesis import strategies as st
from launch import run_ranks
from torch.utils.data import DistributedSampler as TorchSampler

import pydist
from pydist.sampling.rank_shares import PADS, Pad, Share

# Nobody says here which epoch comes next.
pytestmark = pytest.mark.filterwarnings("ignore:the state of the sampler was made with the last")

LENGTHS = st.integers(1, 70)

RANKS = st.integers(1, 7)

# A busy machine is no failure; the test as a whole has its time limit.
PATIENT = trials(deadline=None)


# --- like torch's --------------------------------------------------------------------------------


@PATIENT
@given(LENGTHS, RANKS, st.booleans())
def test_without_shuffling_it_is_torchs(length: int, ranks: int, drop_last: bool) -> None:
    if drop_last and ranks > length:
        return
    for ours in samplers(length, ranks, shuffle=False, drop_last=drop_last):
        theirs = TorchSampler(range(length), ranks, ours.rank, shuffle=False, drop_last=drop_last)  # type: ignore[arg-type,var-annotated]
        assert (len(ours), ours.num_samples, ours.total_size) == (
            len(theirs),
            theirs.num_samples,
            theirs.total_size,
        )
        assert list(ours) == list(theirs)
        assert isinstance(ours, TorchSampler)


# --- every sample once ---------------------------------------------------------------------------


@PATIENT
@given(LENGTHS, RANKS, st.sampled_from(PADS), st.booleans(), st.integers(0, 3))
def test_ranks_share_every_sample(
    length: int, ranks: int, pad: Pad, shuffle: bool, epoch: int
) -> None:
    if pad == "drop" and ranks > length:
        return
    everyone = samplers(length, ranks, pad=pad, shuffle=shuffle)
    for sampler in everyone:
        sampler.set_epoch(epoch)
    shares = [list(sampler) for sampler in everyone]
    assert [len(share) for share in shares] == [len(sampler) for sampler in everyone]
    counts = Counter(flat(shares))
    if pad == "none":
        assert counts == Counter(range(length))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    else:
        assert len({len(share) for share in shares}) == 1
    if pad == "drop":
        assert set(counts.values()) <= {1}
        assert length - ranks < counts.total() <= length
    if pad == "repeat":
        assert set(counts) == set(range(length))
        assert length <= counts.total() < length + ranks
    assert all(sampler.epoch == epoch + 1 for sampler in everyone)


@PATIENT
@given(LENGTHS, st.integers(1, 20), st.sampled_from(PADS), st.booleans())
def test_batches_hold_the_same_samples_on_any_number_of_ranks(
    length: int, batch: int, pad: Pad, drop_last: bool
) -> None:
    if drop_last and batch > length:
        return
    alone = list(batch_samplers(length, 1, batch, drop_last=drop_last, pad=pad)[0])
    for ranks in range(1, min(batch, length) + 1):
        everyone = batch_samplers(length, ranks, batch, drop_last=drop_last, pad=pad)
        parts = [list(sampler) for sampler in everyone]
        assert [len(part) for part in parts] == [len(sampler) for sampler in everyone]
        together = [
            sorted(flat(batches)) for batches in itertools.zip_longest(*parts, fillvalue=[])
        ]
        assert all(all(part) for part in parts), "no batch is empty"
        if pad != "none":
            assert len({len(part) for part in parts}) == 1
        whole = length // batch
        assert together[:whole] == [sorted(each) for each in alone[:whole]]
        if drop_last:
            assert len(together) == whole
        elif pad == "none":
            assert together[whole:] == [sorted(each) for each in alone[whole:]]
        elif pad == "repeat" and length % batch:
            assert set(together[whole]) >= set(alone[whole])
        elif length % batch >= ranks:
            assert set(together[whole]) <= set(alone[whole])


@PATIENT
@given(LENGTHS, RANKS, st.integers(1, 9), st.sampled_from(PADS), st.booleans())
def test_a_batch_size_is_that_of_each_rank(
    length: int, ranks: int, size: int, pad: Pad, as_tensors: bool
) -> None:
    if pad == "drop" and ranks > length:
        return
    for sampler in samplers(length, ranks, pad=pad):
        batches = pydist.BatchSampler(sampler, size, as_tensors=as_tensors)
        got = [list(map(int, batch)) for batch in batches]
        sampler.set_epoch(0)
        assert flat(got) == list(sampler)
        assert {len(batch) for batch in got[:-1]} <= {size}


def test_blocks_join_without_a_seam() -> None:
    """Longer than what is computed at once."""
    length = 3 * 2048 + 5
    for ranks, batch in ((1, 1), (2, 6), (3, 7), (2, 5000)):
        got = flat(flat(each) for each in batch_samplers(length, ranks, batch, pad="none"))
        assert sorted(got) == list(range(length))
        got = flat(samplers(length, ranks, pad="none"))
        assert sorted(got) == list(range(length))


# --- ledgers -------------------------------------------------------------------------------------


def test_ledgers_count_what_was_handed_out() -> None:
    length = 5000
    order = list(samplers(length, 1)[0])
    for taken in (0, 1, 2047, 2048, 2049, 4999, 5000):
        sampler = samplers(length, 1)[0]
        iterator = iter(sampler)
        for _ in range(taken):
            next(iterator)
        assert sampler.ledger() == pydist.Ledger.of(0, torch.tensor(order)[:taken])
    assert sampler.ledger().count == length
    sampler.set_epoch(7)  # another epoch is not begun yet
    assert sampler.ledger().epoch == 0
    assert pydist.Ledger.of(0, torch.tensor(order[1:])) != sampler.ledger()
    repeated = torch.tensor([*order[1:], order[5]])
    assert pydist.Ledger.of(0, repeated).count == length
    assert pydist.Ledger.of(0, repeated) != sampler.ledger()
    with pytest.raises(pydist.InvalidUsage, match="epoch 0 and one of epoch 1 have no sum"):
        _ = sampler.ledger() + pydist.Ledger(1)
    with pytest.raises(pydist.InvalidUsage, match=r"torch\.int64"):
        pydist.Ledger.of(0, torch.ones(3))


# --- errors --------------------------------------------------------------------------------------


class Growing:
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length


@pytest.mark.parametrize(
    ("dataset", "arguments", "complaint"),
    [
        ([], {}, "is empty"),
        (iter([1]), {}, "has no length"),
        (range(3), {"num_replicas": 4, "pad": "drop"}, "3 samples for 4 ranks"),
        (range(3), {"num_replicas": 4, "drop_last": True}, "3 samples for 4 ranks"),
        (range(3), {"num_replicas": 2, "rank": 2}, "ranks go from 0 to 1"),
        (range(3), {"num_replicas": 2, "rank": -1}, "ranks go from 0 to 1"),
        (range(3), {"pad": "wrap"}, "use one of: repeat, none, drop"),
        (range(3), {"pad": "none", "drop_last": True}, "contradict"),
        (range(3), {"seed": 2**64}, "seed="),
        (range(3), {"seed": 0.5}, "seed=0.5"),
        (range(3), {"num_replicas": 0}, "num_replicas=0"),
        (range(3), {"num_replicas": "2"}, "num_replicas='2'"),
        (range(3), {"rank": 0.5}, "rank=0.5"),
        (range(3), {"order": [2, 1, 0]}, "order is a list"),
        (range(2**64), {}, "more samples than an index"),
    ],
)
def test_nonsense_is_refused(dataset: Any, arguments: dict[str, Any], complaint: str) -> None:
    with pytest.raises(pydist.InvalidUsage, match=complaint):
        pydist.DistributedSampler(dataset, **{"num_replicas": 1, "rank": 0, **arguments})


def test_batches_that_can_not_be_are_refused() -> None:
    sampler = samplers(10, 4)[0]
    for arguments, complaint in (
        ({}, "give either"),
        ({"batch_size": 2, "global_batch_size": 8}, "give either"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": True}, "batch_size=True"),
        ({"global_batch_size": 3}, "one sample for each of 4 ranks"),
        ({"batch_size": 3, "drop_last": True}, "nothing would be left"),
    ):
        with pytest.raises(pydist.InvalidUsage, match=complaint):
            pydist.BatchSampler(sampler, **arguments)  # type: ignore[arg-type]
    with pytest.raises(pydist.InvalidUsage, match="and got a range"):
        pydist.BatchSampler(range(3), 2)  # type: ignore[arg-type]


def test_a_data_set_that_changes_its_length_is_named() -> None:
    dataset = Growing(5)
    sampler = pydist.DistributedSampler(dataset, 1, 0)
    list(sampler)
    dataset.length = 6
    with pytest.raises(pydist.InvalidUsage, match=r"had 5 samples .* has 6 now"):
        iter(sampler)


def test_a_share_of_what_is_left_ends_where_it_should() -> None:
    share = Share(length=17, start=16, ranks=3, rank=2, step=8, pad="repeat")
    assert [list(part) for part in share.positions(0, 1)] == [[1]]
    assert share.position_after(1) == 17
    assert Share(17, 17, 3, 0, 8, "repeat").steps == 0
    assert Share(2, 0, 5, 4, 5, "repeat").samples == 1


# --- on ranks ------------------------------------------------------------------------------------


def sample_on_ranks() -> tuple[list[int], pydist.Ledger, str]:
    before = pydist.DistributedSampler(range(100), pad="none")  # the launcher has said enough
    with mock.patch.dict(os.environ, clear=True):
        alone = pydist.DistributedSampler(range(100))  # here it has not
    pydist.init()
    sampler = pydist.DistributedSampler(range(100), pad="none")
    assert (sampler.rank, sampler.num_replicas) == (pydist.rank(), pydist.world_size())
    mine = list(sampler)
    assert list(before) == mine
    whole = sampler.ledger().combined()
    if pydist.rank() == 1:
        list(sampler)
    with pytest.raises(pydist.InvalidUsage, match="of different epochs, 0 to 1") as caught:
        sampler.ledger().combined()
    assert len(list(pydist.DistributedSampler(range(100), num_replicas=4))) == 25
    with pytest.raises(pydist.InvalidUsage, match="num_replicas= and rank="):
        iter(alone)
    return mine, whole, str(caught.value)


def test_ranks_are_found_and_ledgers_combined() -> None:
    results = run_ranks(sample_on_ranks, 3)
    assert sorted(flat(mine for mine, _, _ in results)) == list(range(100))
    assert [len(mine) for mine, _, _ in results] == [34, 33, 33]
    assert {whole for _, whole, _ in results} == {pydist.Ledger.of(0, torch.arange(100))}
    assert len({message for _, _, message in results}) == 1
