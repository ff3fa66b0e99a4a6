"""Every sample once: shares, batches, resumption at another number of ranks, ledgers, errors."""

import itertools
import json
import os
from collections import Counter
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as trials
from hypothesis import strategies as st
from launch import run_ranks
from torch.utils.data import DistributedSampler as TorchSampler

import pydist
from pydist.sampling.partition import PADS, Pad, Share

LENGTHS = st.integers(1, 70)
RANKS = st.integers(1, 7)
# A busy machine is no failure; the test as a whole has its time limit.
PATIENT = trials(deadline=None)


def samplers(length: int, ranks: int, **settings: Any) -> list[pydist.DistributedSampler]:
    return [pydist.DistributedSampler(range(length), ranks, r, **settings) for r in range(ranks)]


def batch_samplers(
    length: int, ranks: int, batch: int, *, drop_last: bool = False, **settings: Any
) -> list[pydist.BatchSampler]:
    return [
        pydist.BatchSampler(sampler, drop_last=drop_last, global_batch_size=batch)
        for sampler in samplers(length, ranks, **settings)
    ]


def flat(parts: Any) -> list[int]:
    return [*itertools.chain.from_iterable(parts)]


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


# --- resumption ----------------------------------------------------------------------------------


@trials(PATIENT, max_examples=300)
@given(
    LENGTHS,
    st.integers(7, 20),
    st.lists(st.tuples(RANKS, st.integers(0, 6)), max_size=5),
    RANKS,
    st.sampled_from(PADS),
    st.booleans(),
    st.integers(-5, 2**64 - 1),
)
def test_nothing_is_lost_or_repeated_however_often_it_is_interrupted(
    length: int,
    batch: int,
    interruptions: list[tuple[int, int]],
    last_ranks: int,
    pad: Pad,
    drop_last: bool,
    seed: int,
) -> None:
    got: list[int] = []
    ledger = pydist.Ledger(0)
    state: dict[str, int] | None = None
    fits = [ranks for ranks, _ in interruptions] + [last_ranks]
    if (pad == "drop" and max(fits) > length) or (drop_last and batch > length):
        return
    for ranks, batches_done in [*interruptions, (last_ranks, None)]:
        # The seed comes with the state.
        settings = {"drop_last": drop_last, "pad": pad, "seed": seed if state is None else 0}
        everyone = batch_samplers(length, ranks, batch, **settings)
        states = []
        for sampler in everyone:
            if state is not None:
                sampler.load_state_dict(json.loads(json.dumps(state)))
            done = list(itertools.islice(sampler, batches_done))
            got += flat(done)
            ledger += sampler.ledger() if done else pydist.Ledger(0)
            if batches_done is not None:
                states.append(sampler.state_dict(batches_seen=len(done)))
        if batches_done is not None:
            state = states[0]
            # Where shares are uneven at the end, some ranks have had a batch less.
            assert pad == "none" or all(each == state for each in states)
    counts = Counter(got)
    assert ledger.count == len(got)
    assert ledger == pydist.Ledger.of(0, torch.tensor(got))
    if drop_last:
        assert set(counts.values()) == {1}
        assert length - counts.total() == length % batch
    elif pad == "none":
        assert counts == Counter(range(length))
        assert ledger == pydist.Ledger.of(0, torch.arange(length))
    elif pad == "repeat":
        assert set(counts) == set(range(length))
        assert counts.total() - length < max(fits)
    else:
        assert set(counts.values()) <= {1}
        assert length - counts.total() < max(fits)


@PATIENT
@given(LENGTHS, RANKS, RANKS, st.integers(0, 70))
def test_samples_resume_at_another_number_of_ranks(
    length: int, before: int, after: int, seen: int
) -> None:
    first = samplers(length, before, pad="none")
    got = [list(itertools.islice(sampler, seen)) for sampler in first]
    states = [
        sampler.state_dict(samples_seen=len(part)) for sampler, part in zip(first, got, strict=True)
    ]
    second = samplers(length, after, pad="none")
    for sampler in second:
        sampler.load_state_dict(states[0])
    rest = [list(sampler) for sampler in second]
    assert sorted(flat(got) + flat(rest)) == list(range(length))
    ledgers = [sampler.ledger() for sampler in first + second if sampler.ledger().count]
    whole = sum(ledgers[1:], start=ledgers[0])
    assert whole == pydist.Ledger.of(0, torch.arange(length))


def test_the_epoch_goes_on_with_the_last_index_and_not_before() -> None:
    sampler = samplers(10, 1)[0]
    iterator = iter(sampler)
    iter(sampler)
    taken = [next(iterator) for _ in range(9)]
    assert sampler.epoch == 0
    taken.append(next(iterator))
    assert sampler.epoch == 1  # nobody has to ask for what is not there
    assert list(iterator) == []
    assert sampler.epoch == 1
    second = list(sampler)
    assert sampler.epoch == 2
    assert sorted(second) == sorted(taken)
    assert second != taken
    # Two iterators over one epoch move on once.
    for _ in zip(iter(sampler), iter(sampler), strict=True):
        pass
    assert sampler.epoch == 3
    # set_epoch wins, also where it is an attribute.
    sampler.set_epoch(0)
    assert list(sampler) == taken
    sampler.epoch = 1
    assert list(sampler) == second


def test_an_old_iterator_that_ends_does_not_overrule_set_epoch() -> None:
    sampler = samplers(10, 2)[0]
    old = iter(sampler)
    next(old)
    sampler.set_epoch(5)
    assert len(list(old)) == 4
    assert sampler.epoch == 5
    assert sampler.state_dict()["epoch"] == 5


def test_batches_end_the_epoch_likewise() -> None:
    for as_tensors in (False, True):
        batches = pydist.BatchSampler(samplers(10, 1)[0], 5, as_tensors=as_tensors)
        iterator = iter(batches)
        next(iterator)
        assert batches.sampler.epoch == 0
        next(iterator)
        assert batches.sampler.epoch == 1


def test_set_epoch_keeps_the_place_of_the_epoch_that_was_loaded() -> None:
    first = samplers(20, 1)[0]
    first.set_epoch(3)
    whole = list(first)
    first.set_epoch(3)
    iterator = iter(first)
    for _ in range(8):
        next(iterator)
    state = first.state_dict(samples_seen=8)
    assert (state["epoch"], state["position"]) == (3, 8)
    second = samplers(20, 1)[0]
    second.load_state_dict(state)
    second.set_epoch(3)  # as a loop over epochs does
    next(iter(second))  # a glance moves nothing
    assert list(second) == whole[8:]
    second.load_state_dict(state)
    second.set_epoch(2)
    assert len(list(second)) == 20


def test_a_bare_sampler_does_not_guess() -> None:
    sampler = samplers(10, 2)[0]
    assert sampler.state_dict()["position"] == 0
    iterator = iter(sampler)
    assert sampler.state_dict()["position"] == 0  # nothing was handed out
    next(iterator)
    with pytest.raises(pydist.InvalidUsage, match=r"1 of 5 samples of epoch 0 .*samples_seen="):
        sampler.state_dict()
    assert sampler.state_dict(samples_seen=0)["position"] == 0
    assert sampler.state_dict(1)["position"] == 2
    list(iterator)
    # A loader's workers may hold the last ones still.
    with pytest.raises(pydist.InvalidUsage, match="5 of 5 samples of epoch 0"):
        sampler.state_dict()
    ended = sampler.state_dict(samples_seen=len(sampler))
    assert (ended["epoch"], ended["position"]) == (0, 10)
    sampler.set_epoch(1)
    begun = sampler.state_dict()
    assert (begun["epoch"], begun["position"]) == (1, 0)
    # Either goes on with epoch 1.
    following = samplers(10, 2)[0]
    following.load_state_dict(begun)
    expected = list(following)
    following.load_state_dict(ended)
    assert list(following) == []
    assert list(following) == expected
    for seen in (-1, 6, "many"):
        fresh = samplers(10, 2)[0]
        next(iter(fresh))
        with pytest.raises(pydist.InvalidUsage, match="samples_seen"):
            fresh.state_dict(seen)  # type: ignore[arg-type]
    with pytest.raises(pydist.InvalidUsage, match="nothing of epoch 0 has been asked for"):
        samplers(10, 2)[0].state_dict(samples_seen=3)
    batches = batch_samplers(10, 2, 4)[0]
    next(iter(batches))
    with pytest.raises(pydist.InvalidUsage, match="batches_seen="):
        batches.state_dict()
    assert batches.sampler.state_dict(samples_seen=2) == batches.state_dict(batches_seen=1)
    with pytest.raises(pydist.InvalidUsage, match="in steps of 2"):
        batches.sampler.state_dict(samples_seen=1)


def test_states_are_a_few_whole_numbers_that_fit_their_data_set() -> None:
    batches = batch_samplers(100, 4, 32, seed=7)[0]
    next(iter(batches))
    state = batches.state_dict(batches_seen=1)
    assert len(json.dumps(state)) < 200
    assert all(type(value) is int for value in state.values())
    # What checkpoints make of numbers.
    stored = {key: torch.tensor(value) for key, value in state.items() if key != "order"}
    other = batch_samplers(100, 2, 32)[0]
    other.load_state_dict({**stored, "order": np.int64(state["order"])})
    assert other.sampler.seed == 7
    assert other.state_dict() == state

    with pytest.raises(pydist.InvalidUsage, match="of 100 samples, and this one has 99"):
        batch_samplers(99, 4, 32)[0].load_state_dict(state)
    with pytest.raises(pydist.InvalidUsage, match=r"than 'sequential' \(of 'shuffled'\)"):
        batch_samplers(100, 4, 32, shuffle=False)[0].load_state_dict(state)
    with pytest.raises(pydist.InvalidUsage, match=r"batches of 32 .* of these 3 ranks are of 33"):
        pydist.BatchSampler(samplers(100, 3)[0], 11).load_state_dict(state)
    # The number of ranks need not divide the batch.
    batch_samplers(100, 3, 32)[0].load_state_dict(state)
    # Loaded into the sampler beneath, it is found when the epoch begins.
    late = pydist.BatchSampler(samplers(100, 3)[0], 11)
    late.sampler.load_state_dict(state)
    with pytest.raises(pydist.InvalidUsage, match="batches of 32"):
        next(iter(late))
    late.load_state_dict({**state, "batch": 0})
    assert len(list(late)) == 3
    # From the end of an epoch any batch may follow.
    list(batches)
    pydist.BatchSampler(samplers(100, 3)[0], 11).load_state_dict(batches.state_dict(batches_seen=4))

    sampler = samplers(100, 1)[0]
    for wrong, complaint in (
        ({}, "no state of a sampler"),
        ({**state, "version": 2}, "version 2"),
        ({key: state[key] for key in state if key != "position"}, "has no position"),
        ({**state, "position": 101}, "position=101"),
        ({**state, "epoch": "first"}, "epoch='first'"),
    ):
        with pytest.raises(pydist.InvalidUsage, match=complaint):
            sampler.load_state_dict(wrong)
    assert sampler.state_dict()["position"] == 0


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
