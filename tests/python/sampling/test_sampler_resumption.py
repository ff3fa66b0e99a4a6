"""Samplers that go on in the middle of an epoch, on any number of ranks."""

import itertools
import json
import warnings
from collections import Counter

import numpy as np
import pytest
import torch
from all_samplers import batch_samplers, flat, samplers
from hypothesis import given
from hypothesis import settings as trials
from hypothesis import strategies as st

import pydist
from pydist.sampling.rank_shares import PADS, Pad

# Nobody says here which epoch comes next.
pytestmark = pytest.mark.filterwarnings("ignore:the state of the sampler was made with the last")

LENGTHS = st.integers(1, 70)

RANKS = st.integers(1, 7)

# A busy machine is no failure; the test as a whole has its time limit.
PATIENT = trials(deadline=None)


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


def test_an_epoch_that_was_over_says_so_where_nobody_names_the_next() -> None:
    first = samplers(20, 1)[0]
    _ = [index for index, _ in zip(first, range(20), strict=False)]  # never asks for the end
    state = first.state_dict(samples_seen=20)
    assert (state["epoch"], state["position"]) == (0, 20)
    second = samplers(20, 1)[0]
    second.load_state_dict(state)
    with warnings.catch_warnings(), second.place_kept():
        warnings.simplefilter("error")
        list(second)  # an evaluation is no iteration of the loop's
    with pytest.warns(UserWarning, match=r"last batch of epoch 0.*calls set_epoch\(\)"):
        assert list(second) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(list(second)) == 20
        for epoch, left in ((0, 0), (1, 20)):
            second.load_state_dict(state)
            second.set_epoch(epoch)
            assert len(list(second)) == left


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
    # What to do instead, for those who have written no BatchSampler either.
    with pytest.raises(pydist.InvalidUsage, match=r"Keep 32: batch_size=32 of all ranks together"):
        pydist.BatchSampler(samplers(100, 3)[0], 11).load_state_dict(state)
    with pytest.raises(pydist.InvalidUsage, match="Keep 32: batch_size=16, a rank's, on these 2"):
        pydist.BatchSampler(samplers(100, 2)[0], 11).load_state_dict(state)
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
