"""What goes wrong in an evaluation is told on all ranks."""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from evaluated import CLASSES, Job, data, measure, measures, network
from launch import Ranks
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    TensorDataset,
)
from training import LIMIT_S, joined

import pydist
from pydist import metrics

pytestmark = pytest.mark.timeout(40)


class Unreadable(TensorDataset):
    """Fails at one sample."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        if index == 50:
            raise OSError("sample 50 can't be read")
        return super().__getitem__(index)


def fail_on_one_rank() -> Job:
    """What each failure raises on this rank; between failures, all is well."""
    rank, size = joined()
    model = network()
    model[1].eval()  # a layer that is frozen stays so
    modes = [module.training for module in model.modules()]
    seen: Job = {}

    def attempt(name: str, *arguments: Any, **keywords: Any) -> None:
        try:
            pydist.evaluate(model, *arguments, **keywords)
        except Exception as error:
            seen[name] = (type(error).__name__, str(error))
        else:
            seen[name] = ("none", "")
        assert [module.training for module in model.modules()] == modes
        assert torch.is_grad_enabled()
        result = pydist.evaluate(model, data(), measure, metrics=measures(), batch_size=8)
        assert result["right"] == result["accuracy"]

    def measure_badly(model: nn.Module, batch: list[Tensor]) -> dict[str, Any]:
        assert not any(module.training for module in model.modules())
        assert not torch.is_grad_enabled()
        if rank == 1 and batch[0][0, 0] == data()[8 * (size + 1)][0][0]:
            raise ValueError("no such thing")
        return measure(model, batch)

    attempt("measure", data(), measure_badly, metrics=measures(), batch_size=8)
    broken = Unreadable(*data().tensors)
    attempt("sample", broken, measure, metrics=measures(), batch_size=5)
    shuffled: Any = DataLoader(
        data(), 8, shuffle=True, generator=torch.Generator().manual_seed(rank)
    )
    attempt("order", shuffled, measure, metrics=measures())
    kind = metrics.Accuracy() if rank < size - 1 else metrics.ConfusionMatrix(CLASSES)
    attempt("metrics", data(), lambda *_: {}, metrics={"x": kind}, batch_size=8)
    sampler: Any = DistributedSampler(data(), size, rank, shuffle=False)
    attempt("repeats", DataLoader(data(), 8, sampler=sampler), measure, metrics=measures())
    prepared = pydist.prepare(DataLoader(data(), 8))
    attempt("prepared repeats", prepared, measure, metrics=measures())
    for name, shares in (
        ("all samples on each", {"num_replicas": 1, "rank": 0}),
        ("shares of others", {"num_replicas": 2 * size, "rank": rank}),
        ("left out", {"pad": "drop"}),
    ):
        sampler = pydist.DistributedSampler(data(), **{"pad": "none", **shares})  # type: ignore[arg-type]
        attempt(name, DataLoader(data(), 8, sampler=sampler), measure, metrics=measures())
    resumed = pydist.prepare(DataLoader(data(), 8), pad="none")
    resumed.load_state_dict({**resumed.state_dict(), "position": 24})
    attempt("resumed", resumed, measure, metrics=measures())
    uneven: Any = DataLoader(data(), 8, drop_last=True)
    attempt("last batch", pydist.prepare(uneven, pad="none"), measure, metrics=measures())
    own = pydist.DistributedSampler(data(), pad="none")
    uneven = DataLoader(data(), 8, sampler=own, drop_last=True)
    attempt("last batch of each", uneven, measure, metrics=measures())
    # Of one rank alone, before anybody measures.
    forms: list[tuple[str, Any]] = [
        ("a list", [metrics.Mean()]),
        ("a class", {"x": metrics.Mean}),
        ("no metric", {"x": 3}),
        ("no name", {3: metrics.Mean()}),
    ]

    def never(*_: Any) -> Any:
        raise AssertionError("measured for nothing")

    for name, form in forms:
        wrong = form if rank == 1 else {"x": metrics.Mean()}
        attempt(name, data(), never, metrics=wrong, batch_size=8)
    for name, returned in (
        ("lists", ([1], [1])),
        ("arrays", (np.ones(2), torch.ones(2))),
        ("too many", (torch.ones(2),) * 3),
    ):
        wrong_measure = {"x": returned if rank == 1 else (torch.ones(2).long(),) * 2}
        accuracy = {"x": metrics.Accuracy()}
        attempt(name, data(), lambda m, b, w=wrong_measure: w, metrics=accuracy, batch_size=40)
    attempt("rows", data(), lambda m, b: {"x": [1]}, metrics={"x": metrics.Rows()}, batch_size=40)
    attempt("numbers", data(), lambda m, b: {1: b[1]}, batch_size=40)
    attempt("one value", data(), lambda m, b: {"loss": b[0].mean()}, batch_size=8)
    attempt("no dict", data(), lambda m, b: b[0], batch_size=8)
    attempt("metric forgotten", data(), measure, batch_size=8)
    attempt("no batch size", data(), measure)
    attempt("batch size twice", shuffled, measure, batch_size=8)
    attempt("no batch", data(), measure, batch_size=0)
    attempt("no data", 5 if rank == 1 else data(), never, batch_size=None if rank == 1 else 8)
    attempt("no function", data(), {} if rank == 1 else never, batch_size=8)
    attempt("no seconds", data(), never, batch_size=8, timeout="soon" if rank == 1 else 9)
    return seen


def misgather() -> Job:
    rank, _ = joined()
    seen: Job = {}

    def attempt(name: str, *arguments: Any, **keywords: Any) -> None:
        try:
            metrics.all_gather_ragged(*arguments, **keywords)
        except pydist.Error as error:
            seen[name] = (type(error).__name__, str(error))
        assert metrics.all_gather_ragged(torch.ones(rank)).tolist() == [1.0] * 3

    attempt("shape", torch.ones(2, 3 if rank else 4))
    attempt("dtype", torch.ones(2, dtype=torch.float64 if rank == 2 else torch.float32))
    attempt("some positions", torch.ones(2), positions=None if rank else torch.arange(2))
    attempt("positions", torch.ones(2), positions=torch.arange(2 + (rank == 1)))
    attempt("scalar", torch.tensor(1.0))
    attempt("list", [1.0])
    return seen


@pytest.fixture(scope="module")
def three_native() -> Iterator[Ranks]:
    with Ranks(3) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def misuses(three_native: Ranks) -> list[Job]:
    return three_native.run(fail_on_one_rank, timeout=LIMIT_S)


def test_a_failure_on_one_rank_ends_all(misuses: list[Job]) -> None:
    assert misuses[1]["measure"] == ("ValueError", "no such thing")
    kind, message = misuses[2]["measure"]
    assert (kind, misuses[0]["measure"][0]) == ("Error", "Error")
    expected = "rank 1 raised in pydist.evaluate, after 1 batches: ValueError: no such thing"
    assert message == expected
    failed = 50 // 5 % 3
    for rank, seen in enumerate(misuses):
        assert seen["sample"][0] == ("OSError" if rank == failed else "Error")
        assert "sample 50 can't be read" in seen["sample"][1]


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("order", "Mismatch", "order of samples differs between ranks 0 and 1"),
        ("metrics", "Mismatch", "ConfusionMatrix of 25 numbers'} on rank 2"),
        ("repeats", "InvalidUsage", "105 for a data set of 103, so 2 would count twice"),
        ("prepared repeats", "InvalidUsage", "so 2 would count twice"),
        ("all samples on each", "InvalidUsage", "that of rank 0 of 1, and this is rank"),
        ("shares of others", "InvalidUsage", "of 6, and this is rank"),
        ("left out", "InvalidUsage", "leaves out 1 of 103 samples"),
        ("last batch", "InvalidUsage", "so 7 of 103 samples would be left out"),
        ("last batch of each", "InvalidUsage", "so 7 of 103 samples would be left out"),
        ("a list", "InvalidUsage", "metrics= is a list; it must be a dict"),
        ("a class", "InvalidUsage", "has the class Mean for 'x'; it must be a metric"),
        ("no metric", "InvalidUsage", "has 3 for 'x'; it must be a metric"),
        ("no name", "InvalidUsage", "a name 3, which is no str"),
        ("lists", "InvalidUsage", "predictions is a list; it must be a tensor"),
        ("arrays", "InvalidUsage", "predictions is an ndarray; it must be a tensor"),
        ("too many", "InvalidUsage", "'x': Accuracy can't take what measure returned"),
        ("rows", "InvalidUsage", "rows is a list; it must be a tensor"),
        ("numbers", "InvalidUsage", "a name 1, which is no str"),
        ("resumed", "InvalidUsage", "the 24 samples before would be missing"),
        ("one value", "InvalidUsage", "one value for 'loss'"),
        ("no dict", "InvalidUsage", "measure returned a Tensor"),
        ("metric forgotten", "InvalidUsage", "'accuracy', which is not in metrics="),
        ("no batch size", "InvalidUsage", "give batch_size="),
        ("batch size twice", "InvalidUsage", "not with a DataLoader"),
        ("no batch", "InvalidUsage", "batch_size=0"),
        ("no data", "InvalidUsage", "data is an int; it must be a DataLoader, a data set"),
        ("no function", "InvalidUsage", "measure is a dict; it must be a function"),
        ("no seconds", "InvalidUsage", "timeout='soon' is not valid; it must be a number"),
    ],
)
def test_misuse_is_refused_on_all_ranks(
    misuses: list[Job], name: str, kind: str, message: str
) -> None:
    for seen in misuses:
        assert seen[name][0] == kind
        assert message in seen[name][1]


def test_rows_that_do_not_go_together_are_refused_on_all_ranks(three_native: Ranks) -> None:
    everybody = three_native.run(misgather, timeout=LIMIT_S)
    for rank, seen in enumerate(everybody):
        assert seen["shape"] == (
            "Mismatch",
            "rank 0 gathers rows of shape (4,) and torch.float32, rank 1 rows of shape (3,) and "
            "torch.float32.",
        )
        assert seen["dtype"][0] == seen["some positions"][0] == "Mismatch"
        assert seen["positions"][0] == ("InvalidUsage" if rank == 1 else "Error")
        assert "has shape (3,) and dtype torch.int64; 2 rows need" in seen["positions"][1]
        assert "rank 1" in seen["positions"][1] or rank == 1
        assert seen["scalar"][0] == seen["list"][0] == "InvalidUsage"


def lose_a_rank() -> None:
    rank, _ = joined()

    def measure_or_die(model: nn.Module, batch: list[Tensor]) -> dict[str, Any]:
        if rank == 2:
            os._exit(3)
        return measure(model, batch)

    pydist.evaluate(network(), data(), measure_or_die, metrics=measures(), batch_size=8)


def test_a_rank_that_dies_is_named() -> None:
    with Ranks(3) as ranks:
        first, second, third = ranks.outcomes(lose_a_rank, timeout=LIMIT_S)
    assert third.exit_code == 3
    for outcome in (first, second):
        assert outcome.error == "PeerLost"
        assert "rank 2" in outcome.message
