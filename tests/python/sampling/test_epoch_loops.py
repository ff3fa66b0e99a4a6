"""Loops over epochs, as people and libraries write them: which epoch an iterator goes through.

The epoch is that of the moment when the first batch is asked for, not when the iterator is made:
Lightning makes its iterator, then sets the epoch, then asks for batches.
"""

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import pytest
import torch
from thorough import everyday
from torch.utils.data import DataLoader
from torch.utils.data import DistributedSampler as TorchSampler

import pydist

pytestmark = [
    pytest.mark.timeout(60),
    # Of machines with one core, and of Python 3.12 and later about fork.
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:This process:DeprecationWarning"),
]

DATA: Any = range(14)
STEPS = 4
EPOCHS = 4

WORKERS: list[dict[str, Any]] = [
    {},
    {"num_workers": 2},
    {"num_workers": 1, "persistent_workers": True},
]
EACH = pytest.mark.parametrize("workers", WORKERS, ids=["none", "fresh", "persistent"])


def prepared(workers: dict[str, Any]) -> pydist.PreparedLoader[Any]:
    return pydist.prepare(DataLoader(DATA, 4, shuffle=True, **workers), seed=3)


def lists(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


@pytest.fixture(scope="module")
def epochs() -> list[list[list[int]]]:
    """The batches of each epoch of a loop that nothing interrupts."""
    loader = prepared({})
    return [lists(loader) for _ in range(EPOCHS)]


# --- which epoch it is ---------------------------------------------------------------------------


@EACH
def test_the_epoch_may_be_set_after_the_iterator_is_made(
    workers: dict[str, Any], epochs: list[list[list[int]]]
) -> None:
    loader = prepared(workers)
    for epoch in (0, 2, 1, 1):
        iterator = iter(loader)
        loader.set_epoch(epoch)
        assert lists(iterator) == epochs[epoch]
        assert loader.state_dict()["epoch"] == epoch + 1


@EACH
def test_the_epoch_may_be_set_before(
    workers: dict[str, Any], epochs: list[list[list[int]]]
) -> None:
    loader = prepared(workers)
    sampler = loader.sampler
    assert isinstance(sampler, TorchSampler)
    for epoch in (0, 1, 3, 3):
        sampler.set_epoch(epoch)
        assert lists(loader) == epochs[epoch]
    # Without it they follow one another, also where nobody asks for more than there is.
    loader.set_epoch(0)
    for epoch in range(EPOCHS):
        iterator = iter(loader)
        assert [next(iterator).tolist() for _ in range(STEPS)] == epochs[epoch]


@EACH
def test_a_state_may_be_loaded_after_the_iterator_is_made(
    workers: dict[str, Any], epochs: list[list[list[int]]]
) -> None:
    first = prepared(workers)
    first.set_epoch(2)
    next(iter(first))
    state = first.state_dict()
    second = prepared(workers)
    iterator = iter(second)
    second.load_state_dict(state)
    assert lists(iterator) == epochs[2][1:]


@EACH
def test_a_glance_changes_nothing(workers: dict[str, Any], epochs: list[list[list[int]]]) -> None:
    """As of libraries that look whether a loader can be iterated over."""
    loader = prepared(workers)
    iterator = iter(loader)
    got = [next(iterator).tolist()]
    iter(loader)
    assert loader.state_dict()["position"] == 4
    got += lists(iterator)
    assert got == epochs[0]
    assert lists(loader) == epochs[1]


def test_an_iterator_that_has_begun_keeps_its_epoch(epochs: list[list[list[int]]]) -> None:
    loader = prepared({})
    iterator = iter(loader)
    first = next(iterator).tolist()
    loader.set_epoch(2)
    assert [first, *lists(iterator)] == epochs[0]
    assert lists(loader) == epochs[2]


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize(
    ("looks", "workers"),
    [
        ("one batch", WORKERS[0]),
        ("one batch", WORKERS[1]),
        # Of workers that persist torch itself has one iterator at a time.
        *(("evaluation", workers) for workers in WORKERS[:3]),
    ],
)
def test_another_iterator_amid_an_epoch_leaves_the_state_to_the_loop(
    looks: str, workers: dict[str, Any], epochs: list[list[list[int]]]
) -> None:
    """A training loop looks at a batch of its own loader, or evaluates with it, and then saves."""
    loader = pydist.prepare(DataLoader(DATA, 4, shuffle=True, **workers), seed=3, pad="none")
    got, states = [], []
    for step, batch in enumerate(loader):
        got.append(batch.tolist())
        if step == 1:
            if looks == "one batch":
                assert next(iter(loader)).tolist() == epochs[0][0]
            else:
                found = pydist.evaluate(None, loader, lambda _, seen: {"mean": seen.double()})
                assert found == {"mean": sum(DATA) / len(DATA)}
        states.append(loader.state_dict())
    assert got == epochs[0]
    assert loader.ledger().count == len(DATA)
    for step, state in enumerate(states):
        resumed = prepared(workers)
        resumed.load_state_dict(state)
        resumed.set_epoch(0)
        assert lists(resumed) == epochs[0][step + 1 :]
    assert lists(loader) == epochs[1]
    # Who leaves a loop early has been as far as that loop.
    for _ in loader:
        break
    assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (2, 4)


def test_batches_without_a_loader_begin_with_the_first_one(
    epochs: list[list[list[int]]],
) -> None:
    """As torch's batch sampler does; torch's DistributedSampler begins with its iterator."""
    batches = pydist.BatchSampler(pydist.DistributedSampler(DATA, seed=3), 4)
    iterator = iter(batches)
    batches.set_epoch(2)
    assert list(iterator) == epochs[2]
    plain = DataLoader(DATA, batch_sampler=batches)
    late = iter(plain)
    batches.set_epoch(1)
    assert lists(late) == epochs[1]
    sampler = batches.sampler
    sampler.set_epoch(0)
    indices = iter(sampler)
    sampler.set_epoch(1)
    assert list(indices) == [index for batch in epochs[0] for index in batch]


# --- Lightning's loop ----------------------------------------------------------------------------


@runtime_checkable
class Stateful(Protocol):
    """What Lightning, torchdata and torch's checkpoints take for something that has a state."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class Trainer:
    """Lightning's fit loop, as far as it touches a loader.

    It makes an iterator when it is set up, and one more for each epoch but the first of a run. It
    sets the epoch behind the first iterator, and in front of the others. It counts batches, and
    never asks for one more than there are.
    """

    def __init__(self, loader: pydist.PreparedLoader[Any]) -> None:
        assert isinstance(loader, Stateful)
        self.loader = loader
        self.epoch = 0
        self.batches_done = 0

    def save(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "batches": self.batches_done,
            "loader": self.loader.state_dict(),
        }

    def load(self, checkpoint: dict[str, Any]) -> None:
        self.epoch, self.batches_done = checkpoint["epoch"], checkpoint["batches"]
        self.loader.load_state_dict(checkpoint["loader"])

    def fit(self) -> Iterator[list[int]]:
        iterator = iter(self.loader)
        is_first = True
        while self.epoch < EPOCHS:
            self.loader.sampler.set_epoch(self.epoch)  # type: ignore[attr-defined]
            if not is_first:
                iterator = iter(self.loader)
            is_first = False
            while self.batches_done < len(self.loader):
                batch = next(iterator)
                self.batches_done += 1
                yield batch.tolist()
            self.epoch, self.batches_done = self.epoch + 1, 0


@EACH
@pytest.mark.parametrize("done", everyday(0, 1, STEPS, thorough=(STEPS - 1, STEPS + 2, 2 * STEPS)))
def test_lightnings_loop_resumes_where_it_was(
    workers: dict[str, Any], epochs: list[list[list[int]]], done: int
) -> None:
    whole = [batch for epoch in epochs for batch in epoch]
    trainer = Trainer(prepared(workers))
    running = trainer.fit()
    assert [next(running) for _ in range(done)] == whole[:done]
    checkpoint = trainer.save()
    assert list(running) == whole[done:]

    again = Trainer(prepared(workers))
    again.load(checkpoint)
    assert list(again.fit()) == whole[done:]
    if done % STEPS == 0 and done:
        # Saved with the last batch of an epoch, and resumed at the next.
        again = Trainer(prepared(workers))
        again.load({**checkpoint, "epoch": checkpoint["epoch"] + 1, "batches": 0})
        assert list(again.fit()) == whole[done:]
        # Without the loader's state: the epoch says enough.
        again = Trainer(prepared(workers))
        again.epoch = checkpoint["epoch"] + 1
        assert list(again.fit()) == whole[done:]


# --- a plain loop, resumed -----------------------------------------------------------------------


@EACH
@pytest.mark.parametrize("sets_epoch", [True, False])
@pytest.mark.filterwarnings("ignore:the state of the sampler was made with the last")
def test_a_state_of_an_epochs_last_batch(
    workers: dict[str, Any], sets_epoch: bool, epochs: list[list[list[int]]]
) -> None:
    """The epoch is over: resumed in it nothing is left, and resumed at the next all of that."""
    loader = prepared(workers)
    for batch in loader:
        assert isinstance(batch, torch.Tensor)
        state = loader.state_dict()
    assert (state["epoch"], state["position"]) == (0, len(DATA))

    again = prepared(workers)
    again.load_state_dict(state)
    got = []
    for epoch in range(EPOCHS):
        if sets_epoch:
            again.set_epoch(epoch)
        got.append(lists(again))
    assert got == [[], *epochs[1:]]

    again = prepared(workers)
    again.load_state_dict(state)
    for epoch in range(1, EPOCHS):
        iterator = iter(again)
        again.set_epoch(epoch)
        assert lists(iterator) == epochs[epoch]


@EACH
def test_a_state_of_between_epochs(workers: dict[str, Any], epochs: list[list[list[int]]]) -> None:
    loader = prepared(workers)
    list(loader)
    again = prepared(workers)
    again.load_state_dict(loader.state_dict())
    assert lists(again) == epochs[1]
    again.load_state_dict(loader.state_dict())
    iterator = iter(again)
    again.set_epoch(1)
    assert lists(iterator) == epochs[1]
