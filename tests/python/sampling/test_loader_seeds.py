"""Where a prepared loader's seed comes from, and what its workers make of it.

What a script seeds decides: torch's generators before preparing or before iterating, and those of
the workers in worker_init_fn. The ranks go by rank 0's seed, and a resumption by the state's.
"""

import json
import os
import random
import time
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from launch import rank_outcomes, run_ranks
from thorough import everyday
from torch.utils.data import DataLoader, Dataset, RandomSampler

import pydist

pytestmark = [
    pytest.mark.timeout(60),
    # Of machines with one core, and of Python 3.12 and later about fork.
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:This process:DeprecationWarning"),
]

SAMPLES = 23
Batches = list[list[list[float]]]


class Noisy(Dataset[tuple[int, float, float, float]]):
    """Samples that know their index, with something drawn from each generator."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, torch.rand(()).item(), float(np.random.rand()), random.random()


def plain(**settings: Any) -> DataLoader[Any]:
    return DataLoader(Noisy(), 4, **{"shuffle": True, **settings})


def got(batches: Any) -> Batches:
    """Indices and draws of each batch."""
    return [[part.tolist() for part in batch] for batch in batches]


def indices(batches: Batches) -> list[float]:
    return [index for batch in batches for index in batch[0]]


def draws(batches: Batches) -> list[float]:
    return [value for batch in batches for part in batch[1:] for value in part]


# --- what the script has seeded ------------------------------------------------------------------


def seeded_before_preparing(seed: int, **settings: Any) -> Batches:
    torch.manual_seed(seed)
    return got(pydist.prepare(plain(**settings)))


def seeded_before_iterating(seed: int, **settings: Any) -> Batches:
    torch.seed()
    loader = pydist.prepare(plain(**settings))
    torch.manual_seed(seed)
    return got(loader)


def seeded_generator(seed: int, **settings: Any) -> Batches:
    torch.seed()
    return got(pydist.prepare(plain(generator=torch.Generator().manual_seed(seed), **settings)))


def seeded_generator_of_the_sampler(seed: int, **settings: Any) -> Batches:
    torch.seed()
    generator = torch.Generator().manual_seed(seed)
    sampler = RandomSampler(Noisy(), generator=generator)
    return got(pydist.prepare(plain(shuffle=False, sampler=sampler, **settings)))


SEEDINGS = [
    seeded_before_preparing,
    seeded_before_iterating,
    seeded_generator,
    seeded_generator_of_the_sampler,
]


@pytest.mark.parametrize("seeded", SEEDINGS, ids=lambda seeded: seeded.__name__)
def test_order_and_draws_follow_what_the_script_has_seeded(seeded: Callable[..., Batches]) -> None:
    one, again, two = seeded(1), seeded(1), seeded(2)
    assert indices(one) == indices(again)
    assert sorted(indices(one)) == sorted(indices(two)) == list(range(SAMPLES))
    assert indices(one) != indices(two)
    one, again, two = (seeded(seed, num_workers=1) for seed in (1, 1, 2))
    assert one == again
    assert not set(draws(one)) & set(draws(two))


def test_loaders_of_one_script_differ() -> None:
    """As with torch, which draws for each of them."""
    torch.manual_seed(1)
    first, second = pydist.prepare(plain()), pydist.prepare(plain())
    assert indices(got(first)) != indices(got(second))
    generator = torch.Generator().manual_seed(1)
    first, second = (pydist.prepare(plain(generator=generator)) for _ in range(2))
    assert indices(got(first)) != indices(got(second))


def test_preparing_draws_once_and_iterating_not_at_all() -> None:
    for settings in ({}, {"num_workers": 1}):
        torch.manual_seed(5)
        torch.empty((), dtype=torch.int64).random_()
        untouched = torch.rand(3)
        torch.manual_seed(5)
        list(pydist.prepare(plain(**settings)))
        if settings:  # without workers, the data set draws
            assert torch.rand(3).equal(untouched)
    torch.manual_seed(5)
    untouched = torch.rand(3)
    for settings in ({"seed": 3}, {}):
        torch.manual_seed(5)
        generator = torch.Generator() if not settings else None
        list(pydist.prepare(plain(num_workers=1, generator=generator), **settings))
        assert torch.rand(3).equal(untouched)


def test_generators_draw_differently() -> None:
    """Python's and NumPy's are of one kind, and would draw alike from one seed."""
    for _, *parts in got(pydist.prepare(plain(num_workers=2))):
        for of_torch, of_numpy, of_python in zip(*parts, strict=True):
            assert len({of_torch, of_numpy, of_python}) == 3


def test_a_seed_that_is_given_counts_alone() -> None:
    torch.manual_seed(1)
    one = got(pydist.prepare(plain(num_workers=1), seed=3))
    torch.manual_seed(2)
    generator = torch.Generator().manual_seed(4)
    assert got(pydist.prepare(plain(num_workers=1, generator=generator), seed=3)) == one


def test_torchs_sampler_has_seed_0() -> None:
    orders = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        orders.append(list(pydist.DistributedSampler(Noisy(), 2, 0)))
    assert orders[0] == orders[1] == list(pydist.DistributedSampler(Noisy(), 2, 0, seed=0))


# --- in states -----------------------------------------------------------------------------------


def test_a_state_has_the_seed_once_there_is_one() -> None:
    torch.manual_seed(1)
    first = pydist.prepare(plain())
    unborn = json.loads(json.dumps(first.state_dict()))
    assert unborn["seed"] is None
    iterator = iter(first)
    begun = got([next(iterator)])
    state = json.loads(json.dumps(first.state_dict()))
    assert type(state["seed"]) is int
    rest = got(iterator)

    torch.manual_seed(2)
    second = pydist.prepare(plain())
    second.load_state_dict(state)
    assert indices(got(second)) == indices(rest)
    # A state without a seed leaves it to the loader that gets the state.
    torch.manual_seed(1)
    third = pydist.prepare(plain())
    third.load_state_dict(unborn)
    assert indices(got(third)) == indices(begun + rest)
    fixed = pydist.prepare(plain(), seed=8)
    fixed.load_state_dict(unborn)
    assert fixed.state_dict()["seed"] == 8


def test_older_states_load() -> None:
    state = {"version": 1, "length": SAMPLES, "order": None, "seed": 0, "epoch": 1, "position": 8}
    state |= {"batch": 4, "order": pydist.prepare(plain()).state_dict()["order"]}
    loader = pydist.prepare(plain())
    loader.load_state_dict(state)
    fixed = pydist.prepare(plain(), seed=0)
    fixed.set_epoch(1)
    assert indices(got(loader)) == indices(got(fixed))[8:]


# --- on several ranks ----------------------------------------------------------------------------


def prepare_on_ranks(seeds: list[int]) -> dict[str, Any]:
    """Prepares and iterates; each rank seeded by itself."""
    pydist.init()
    torch.manual_seed(seeds[pydist.rank()])
    loader = pydist.prepare(plain())
    unborn = loader.state_dict()
    epochs = [indices(got(loader)) for _ in range(2)]
    return {"epochs": epochs, "unborn": unborn, "state": loader.state_dict()}


def test_rank_0s_seed_counts() -> None:
    results = run_ranks(prepare_on_ranks, 3, [5, 6, 7])
    again = run_ranks(prepare_on_ranks, 3, [5, 1, 1])
    other = run_ranks(prepare_on_ranks, 3, [6, 6, 7])
    assert results == again
    assert results[0]["state"]["seed"] != other[0]["state"]["seed"]
    assert all(rank["state"] == results[0]["state"] for rank in results)
    assert all(rank["unborn"] == results[0]["unborn"] for rank in results)
    for epoch in range(2):
        shares = [index for rank in results for index in rank["epochs"][epoch]]
        assert set(shares) == set(range(SAMPLES))
        assert len(shares) < SAMPLES + 3


def iterate_on_some_ranks() -> list[float]:
    pydist.init()
    torch.manual_seed(3)
    numbers = DataLoader(range(SAMPLES), 4, shuffle=True)  # type: ignore[arg-type,var-annotated]
    shared = pydist.prepare(numbers)
    alone = pydist.prepare(numbers, num_replicas=1, rank=0)
    in_order = pydist.prepare(plain(shuffle=False))
    if pydist.rank() == 0:
        assert (len(list(shared)), len(list(alone))) == (3, 6)
    else:
        assert len(list(in_order)) == 3  # no rank asks another about this one
    return indices(got(pydist.prepare(plain())))


def test_some_ranks_may_iterate_alone() -> None:
    """And the ranks agree on the next loader."""
    zero, one = run_ranks(iterate_on_some_ranks, 2)
    assert set(zero + one) == set(range(SAMPLES))


def keep_generators_alike() -> list[float]:
    pydist.init()
    torch.manual_seed(3)
    loader = pydist.prepare(DataLoader(range(SAMPLES), 4, shuffle=True))  # type: ignore[arg-type]
    if pydist.rank() == 0:
        list(loader)
    return torch.rand(3).tolist()


def test_ranks_that_were_seeded_alike_stay_alike() -> None:
    zero, one = run_ranks(keep_generators_alike, 2)
    assert zero == one


def reseed_before_iterating() -> list[float]:
    pydist.init()
    loader = pydist.prepare(plain())
    torch.manual_seed(3 + pydist.rank())
    return indices(got(loader))


def test_ranks_agree_on_what_was_seeded_before_iterating() -> None:
    first, again = (run_ranks(reseed_before_iterating, 2) for _ in range(2))
    assert set(first[0] + first[1]) == set(range(SAMPLES))
    assert first == again


def resume_on_ranks(state: dict[str, Any], everybody_loads: bool) -> list[float]:
    pydist.init()
    loader = pydist.prepare(plain())
    if everybody_loads or pydist.rank() == 0:
        loader.load_state_dict(state)
    loader.set_epoch(5)
    return indices(got(loader))


@pytest.mark.parametrize("everybody_loads", [True, False])
def test_a_states_seed_counts_for_all(everybody_loads: bool) -> None:
    loader = pydist.prepare(plain(), seed=11)
    ranks = run_ranks(resume_on_ranks, 2, loader.state_dict(), everybody_loads)
    loader.set_epoch(5)
    whole = indices(got(loader))
    assert [ranks[0], ranks[1][:-1]] == [whole[0::2], whole[1::2]]


def iterate_under_torchs_group() -> list[float]:
    # By the environment that the launcher has set.
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    mine = indices(got(pydist.prepare(plain())))
    dist.destroy_process_group()
    return mine


def test_a_group_of_torchs_own_will_do() -> None:
    zero, one = run_ranks(iterate_under_torchs_group, 2)
    assert set(zero + one) == set(range(SAMPLES))


# --- where the ranks can't agree -----------------------------------------------------------------


def prepare_other_loaders() -> None:
    pydist.init()
    if pydist.rank() == 0:
        got(pydist.prepare(DataLoader(range(7), 2, shuffle=True)))  # type: ignore[arg-type]
    got(pydist.prepare(plain()))


def never_begin_on_rank_0(ends: bool) -> None:
    pydist.init(timeout=2)
    loader = pydist.prepare(plain())
    pydist.barrier()
    if pydist.rank() == 0:
        if ends:
            os._exit(3)
        time.sleep(5)
    else:
        next(iter(loader))


def test_ranks_that_prepare_different_loaders_are_told() -> None:
    _, one = rank_outcomes(prepare_other_loaders, 2)
    assert one.error == "Mismatch"
    assert (
        "rank 1 begins with (samples 23, order shuffled, ranks 2, prepared at line " in one.message
    )
    assert "the 1st that it has prepared without seed=" in one.message
    assert "rank 0 is another (samples 7, order shuffled, ranks 2, " in one.message
    assert "prepare(seed=)" in one.message


def test_nobody_waits_for_ever() -> None:
    zero, one = rank_outcomes(never_begin_on_rank_0, 2, False)
    assert zero.ok
    assert one.error == "Timeout"
    assert "rank 0, whose seed counts, has not within 2 s" in one.message


def test_nobody_waits_for_the_dead() -> None:
    _, one = rank_outcomes(never_begin_on_rank_0, 2, True, env={"PYDIST_BACKEND": "native"})
    assert one.error == "PeerLost"
    assert "rank 0 " in one.message
    assert "has died" in one.message


def begin_before_joining() -> tuple[str, str]:
    loader = pydist.prepare(plain())
    with pytest.raises(pydist.InvalidUsage) as early:
        next(iter(loader))
    pydist.init()
    list(loader)
    part = pydist.prepare(plain(), num_replicas=3, rank=pydist.rank())
    with pytest.raises(pydist.InvalidUsage) as unknown:
        list(part)
    assert len(list(pydist.prepare(plain(), num_replicas=3, rank=0, seed=0))) == 2
    return str(early.value), str(unknown.value)


def test_a_seed_needs_a_job() -> None:
    for early, unknown in run_ranks(begin_before_joining, 2):
        assert "call pydist.init() (or init_process_group) before iterating" in early
        assert "3 ranks share the samples" in unknown
        assert "in a job of 2" in unknown
        assert "give pydist.prepare(seed=)" in unknown
    loader = pydist.prepare(plain(), num_replicas=2, rank=1)
    with pytest.raises(pydist.InvalidUsage, match=r"this process is alone, .*seed="):
        list(loader)
    # Of samples as they come, without workers, nothing depends on a seed.
    in_order = pydist.prepare(plain(shuffle=False), num_replicas=2, rank=1)
    assert indices(got(in_order))[:3] == [1, 3, 5]


# --- what worker_init_fn has seeded --------------------------------------------------------------


class Seeding:
    """A worker_init_fn that seeds one generator, each worker otherwise."""

    def __init__(self, name: str, seed: int) -> None:
        self.name = name
        self.seed = seed

    def __call__(self, worker: int) -> None:
        seed = self.seed + worker
        if self.name == "numpy":
            np.random.seed(seed)
        elif self.name == "random":
            random.seed(seed)
        elif self.name == "torch":
            torch.manual_seed(seed)
        else:
            # As PyTorch's notes on reproducibility do.
            np.random.seed(torch.initial_seed() % 2**32)
            random.seed(torch.initial_seed())


def nothing(worker: int) -> None:
    """A worker_init_fn that seeds nothing."""


def alike(worker: int) -> None:
    np.random.seed(7)


def initialised(function: Any, workers: int = 2, **settings: Any) -> Batches:
    loader = plain(num_workers=workers, worker_init_fn=function, **settings)
    return got(pydist.prepare(loader, seed=0))


@pytest.mark.parametrize("name", ["numpy", "random", "torch"])
def test_what_worker_init_fn_seeds_counts(name: str) -> None:
    one, again, two = (initialised(Seeding(name, seed)) for seed in (1, 1, 100))
    assert one == again
    assert indices(one) == indices(two)
    assert not set(draws(one)) & set(draws(two))


def test_worker_init_fn_that_seeds_nothing_changes_nothing() -> None:
    assert initialised(nothing) == initialised(None, workers=1)
    assert initialised(alike, workers=1) == initialised(alike, workers=3)
    assert initialised(alike) != initialised(nothing)
    prepared = pydist.prepare(plain(num_workers=1, worker_init_fn=nothing))
    list(prepared)
    assert prepared.worker_init_fn is nothing


@pytest.mark.parametrize("method", everyday("forkserver", thorough=("spawn",)))
@pytest.mark.timeout(120)
def test_workers_that_are_started_afresh(method: str) -> None:
    function = Seeding("numpy", 1)
    expected = initialised(function)
    assert initialised(function, multiprocessing_context=method) == expected


class Failing:
    def __call__(self, worker: int) -> None:
        np.random.seed(worker)
        if worker == 1:
            raise ArithmeticError("boom")


def test_worker_init_fn_that_raises() -> None:
    iterator = iter(pydist.prepare(plain(num_workers=2, worker_init_fn=Failing()), seed=0))
    next(iterator)
    with pytest.raises(ArithmeticError, match="boom"):
        next(iterator)


# --- resumption ----------------------------------------------------------------------------------


def generators() -> tuple[Any, ...]:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def restore(states: tuple[Any, ...]) -> None:
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


@pytest.mark.parametrize("function", [None, Seeding("numpy", 5), Seeding("recipe", 0)])
@pytest.mark.parametrize(
    "workers",
    [
        {},
        {"num_workers": 1},
        {"num_workers": 2},
        {"num_workers": 1, "persistent_workers": True},
        {"num_workers": 2, "persistent_workers": True},
    ],
    ids=["0", "1", "2", "1 persistent", "2 persistent"],
)
def test_a_resumption_in_mid_epoch_is_exact(workers: dict[str, Any], function: Any) -> None:
    """Indices and draws; a script that draws in its main process keeps the generators' states."""

    def prepared() -> pydist.PreparedLoader[Any]:
        generator = torch.Generator().manual_seed(9)
        return pydist.prepare(plain(worker_init_fn=function, generator=generator, **workers))

    first = prepared()
    got(first)
    iterator = iter(first)
    got(islice(iterator, 3))  # an odd number: the next batch would have been worker 1's
    state, states = first.state_dict(), generators()
    rest = got(iterator)
    following = got(first)

    torch.seed()
    second = prepared()
    second.load_state_dict(json.loads(json.dumps(state)))
    restore(states)
    assert got(second) == rest
    assert got(second) == following
    assert sorted(indices(following)) == list(range(SAMPLES))
