"""Prepared loaders: workers that fetch ahead, resumption, seeds, and what is left alone."""

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data import DistributedSampler as TorchSampler

import pydist

pytestmark = [
    pytest.mark.timeout(60),
    # Of machines with one core, and of Python 3.12 and later about fork.
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:This process:DeprecationWarning"),
]

WORKERS: list[dict[str, Any]] = [
    {},
    {"num_workers": 2, "prefetch_factor": 3},
    {"num_workers": 2, "persistent_workers": True},
]
SAMPLES = 46


class Noisy(Dataset[tuple[int, float, float, float]]):
    """Samples that know their index, with something drawn from each generator."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, torch.rand(()).item(), float(np.random.rand()), random.random()


def loader(*, rank: int = 0, ranks: int = 1, **settings: Any) -> pydist.PreparedLoader[Any]:
    """Batches of 12 over all ranks."""
    own = {"seed": 0, **{key: settings.pop(key) for key in ("seed", "pad") if key in settings}}
    plain = DataLoader(Noisy(), 12, **{"shuffle": True, **settings})
    return pydist.prepare(plain, split_batches=True, num_replicas=ranks, rank=rank, **own)


def indices(batches: Any) -> list[int]:
    return [index for batch in batches for index in batch[0].tolist()]


def drawn(batches: Any) -> list[float]:
    return [value for batch in batches for part in batch[1:] for value in part.tolist()]


@pytest.mark.parametrize("workers", WORKERS, ids=["none", "fresh", "persistent"])
def test_a_state_counts_what_the_loop_has_got(workers: dict[str, Any]) -> None:
    first = loader(pad="none", **workers)
    assert len(first) == 4
    whole = [list(first), list(first)]
    assert [sorted(indices(epoch)) for epoch in whole] == [list(range(SAMPLES))] * 2
    assert indices(whole[0]) != indices(whole[1])
    assert first.ledger() == pydist.Ledger.of(1, torch.arange(SAMPLES))
    assert first.distributed_sampler.epoch == 2

    first.set_epoch(0)
    states = []
    for step, _ in enumerate(first, 1):
        states.append(first.state_dict())
        assert states[-1]["epoch"] == 0
        # What workers have fetched beyond counts for nothing.
        assert states[-1]["position"] == min(12 * step, SAMPLES)
        assert first.ledger().count == min(12 * step, SAMPLES)
    ended = first.state_dict()
    assert (ended["epoch"], ended["position"]) == (1, 0)

    # Of the loop left early, of its last batch, and after its end; on 2 and 3 ranks, and on one
    # with the workers that have gone on to epoch 1.
    for state, done in ((states[1], 2), (states[3], 4), (ended, 0)):
        epoch = whole[state["epoch"]]
        first.load_state_dict(state)
        first.set_epoch(state["epoch"])
        rest = list(first)
        assert indices(rest) == indices(epoch[done:])
        if workers:
            assert drawn(rest) == drawn(epoch[done:])
        if state is states[3]:
            assert indices(first) == indices(whole[1])
    for ranks in (2, 3):
        parts = [loader(rank=rank, ranks=ranks, pad="none") for rank in range(ranks)]
        for part in parts:
            part.load_state_dict(states[1])
        batches = [list(part) for part in parts]
        together = [
            sorted(indices(batch for batch in step if batch is not None))
            for step in itertools.zip_longest(*batches)
        ]
        assert together == [sorted(indices([batch])) for batch in whole[0][2:]]
        both = sum((part.ledger() for part in parts), start=pydist.Ledger(0))
        assert both.count == SAMPLES - 24


def test_what_workers_draw_depends_on_neither_their_number_nor_the_past() -> None:
    one = list(loader(num_workers=1))
    three = loader(num_workers=3, prefetch_factor=1)
    assert drawn(three) == drawn(one)
    following = drawn(three)
    assert not set(following) & set(drawn(one))  # another epoch
    three.set_epoch(0)
    list(itertools.islice(three, 2))  # left early
    assert drawn(three) == drawn(one)
    other_seed = drawn(loader(num_workers=1, seed=1))
    assert not set(other_seed) & set(drawn(one))
    ranks = [drawn(loader(rank=rank, ranks=2, num_workers=1)) for rank in range(2)]
    assert not set(ranks[0]) & set(ranks[1])


class Exploding(Noisy):
    def __getitem__(self, index: int) -> Any:
        if index == 30:
            raise ArithmeticError("boom")
        return super().__getitem__(index)


def test_a_batch_that_fails_was_not_trained_on() -> None:
    # (torch takes 5 s to end a worker after that.)
    plain = DataLoader(Exploding(), 12)
    prepared = pydist.prepare(plain)
    iterator = iter(prepared)
    next(iterator)
    next(iterator)
    with pytest.raises(ArithmeticError, match=r"boom"):
        next(iterator)
    assert prepared.state_dict()["position"] == 24


# --- what becomes of which loader ----------------------------------------------------------------


def test_loaders_keep_what_they_were_made_with() -> None:
    def collate(samples: list[Any]) -> list[Any]:
        return samples

    generator = torch.Generator()
    plain = DataLoader(range(10), 4, drop_last=True, collate_fn=collate, generator=generator)  # type: ignore[arg-type,var-annotated]
    prepared = pydist.prepare(plain, num_replicas=2, rank=1)
    assert isinstance(prepared, DataLoader)
    assert prepared.dataset is plain.dataset
    assert isinstance(prepared.sampler, pydist.DistributedSampler)
    assert isinstance(prepared.batch_sampler, pydist.BatchSampler)
    assert (len(prepared), prepared.batch_size, prepared.drop_last) == (1, 4, True)
    state = generator.get_state()
    assert list(prepared) == [[1, 3, 5, 7]]  # does not shuffle, since that one did not
    assert prepared.generator is generator
    assert generator.get_state().equal(state)
    assert isinstance(plain.sampler, SequentialSampler)
    assert len(plain) == 2
    with pytest.raises(pydist.InvalidUsage, match=r"prepared already"):
        pydist.prepare(prepared)


class Doubling(DataLoader[Any]):
    """With things of its own to do, and arguments of its own."""

    def __init__(self, factor: int, **settings: Any) -> None:
        super().__init__(range(6), **settings)  # type: ignore[arg-type]
        self.factor = factor

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield self.factor * batch


def test_a_loaders_own_class_goes_on_doing_what_it_does() -> None:
    prepared = pydist.prepare(Doubling(10, batch_size=2), num_replicas=2, rank=1)
    assert isinstance(prepared, Doubling)
    states = []
    got = []
    for batch in prepared:
        got.append(batch.tolist())
        states.append(prepared.state_dict()["position"])
    assert got == [[10, 30], [50]]
    assert states == [4, 6]


def test_samplers_of_pydists_are_kept() -> None:
    data = range(10)
    sampler = pydist.DistributedSampler(data, 2, 1, shuffle=False)
    batches = pydist.BatchSampler(sampler, 2, as_tensors=True)
    for plain, expected in (
        (DataLoader(data, 2, sampler=sampler), [[1, 3], [5, 7], [9]]),  # type: ignore[arg-type,var-annotated]
        (DataLoader(data, batch_sampler=batches), [[1, 3], [5, 7], [9]]),  # type: ignore[arg-type,var-annotated]
        (DataLoader(data, batch_sampler=BatchSampler(sampler, 3, True)), [[1, 3, 5]]),  # type: ignore[arg-type,var-annotated]
        (DataLoader(torch.arange(10), None, sampler=batches), [[1, 3], [5, 7], [9]]),  # type: ignore[arg-type,var-annotated]
        (DataLoader(data, None, sampler=sampler), [1, 3, 5, 7, 9]),  # type: ignore[arg-type,var-annotated]
        (DataLoader(data, None, sampler=sampler, num_workers=1), [1, 3, 5, 7, 9]),  # type: ignore[arg-type,var-annotated]
    ):
        for argument in ({"seed": 1}, {"pad": "none"}, {"rank": 1}):
            with pytest.raises(pydist.InvalidUsage, match=r"has a sampler of pydist's already"):
                pydist.prepare(plain, **argument)  # type: ignore[arg-type]
        prepared = pydist.prepare(plain)
        assert prepared.distributed_sampler is sampler
        sampler.set_epoch(0)
        got = []
        for step, batch in enumerate(prepared, 1):
            got.append(torch.as_tensor(batch).tolist())
            steps = pydist.DistributedSampler.state_dict(sampler)["position"]
            assert steps == prepared.state_dict()["position"]
            assert steps == 10 or steps > 2 * (step - 1)
        assert got == expected
        assert sampler.epoch == 1


def test_batches_of_all_ranks_may_be_split() -> None:
    plain = DataLoader(range(10), 4)  # type: ignore[arg-type,var-annotated]
    parts = [
        pydist.prepare(plain, split_batches=True, num_replicas=3, rank=rank) for rank in range(3)
    ]
    got = [[batch.tolist() for batch in part] for part in parts]
    assert {part.batch_size for part in parts} == {2}
    assert got == [[[0, 3], [4, 7], [8]], [[1], [5], [9]], [[2], [6], [0]]]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_iterable_data_sets_are_left_alone_with_a_word() -> None:
    plain = DataLoader(Stream())
    assert pydist.prepare(plain) is plain  # alone, there is nothing to say
    with pytest.warns(UserWarning, match=r"a Stream, is iterable: .* among the 2 ranks"):
        assert pydist.prepare(plain, num_replicas=2, rank=0) is plain


class Evens(torch.utils.data.Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(0, 10, 2))


DATA = range(10)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"sampler": Evens()}, r"an Evens, .*pydist\.Order"),
        ({"sampler": SubsetRandomSampler([1, 2])}, "a SubsetRandomSampler"),
        ({"sampler": WeightedRandomSampler([1.0] * 10, 10)}, "a WeightedRandomSampler"),
        ({"sampler": RandomSampler(DATA, replacement=True)}, "with replacement"),
        ({"sampler": RandomSampler(DATA, num_samples=5)}, "another number of samples"),
        ({"sampler": RandomSampler(range(5))}, "goes through 5 samples, and its data set has 10"),
        ({"sampler": SequentialSampler(range(5))}, "goes through 5 samples"),
        ({"sampler": TorchSampler(DATA, 2, 0)}, "make it a pydist"),  # type: ignore[arg-type,var-annotated]
        ({"batch_sampler": [[1, 2], [3]]}, "a list, .*pydist.BatchSampler"),
        ({"in_order": False, "num_workers": 1}, "in_order=False"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_samplers_with_a_meaning_of_their_own_are_refused(
    settings: dict[str, Any], complaint: str
) -> None:
    plain = DataLoader(DATA, **settings)  # type: ignore[arg-type,var-annotated]
    with pytest.raises(pydist.InvalidUsage, match=complaint):
        pydist.prepare(plain, num_replicas=2, rank=0)


def test_what_can_not_be_prepared_is_named() -> None:
    with pytest.raises(pydist.InvalidUsage, match="got a range"):
        pydist.prepare(DATA)  # type: ignore[arg-type]
    for name in ("seed", "num_replicas", "rank"):
        wrong: Any = {"num_replicas": 2, "rank": 0, name: "one"}
        with pytest.raises(pydist.InvalidUsage, match=f"{name}='one' is not valid; use a whole"):
            pydist.prepare(DataLoader(DATA, 4), **wrong)  # type: ignore[arg-type,var-annotated]
    with pytest.raises(pydist.InvalidUsage, match="pad='no' is not valid"):
        pydist.prepare(DataLoader(DATA, 4), pad="no")  # type: ignore[arg-type,var-annotated]
    with pytest.raises(pydist.InvalidUsage, match="split_batches is 'no', a str; it must be a"):
        pydist.prepare(DataLoader(DATA, 4), split_batches="no")  # type: ignore[arg-type,var-annotated]
    with pytest.raises(pydist.InvalidUsage, match="there are none"):
        pydist.prepare(DataLoader(DATA, batch_size=None), split_batches=True)  # type: ignore[arg-type]
