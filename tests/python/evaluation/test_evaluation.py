"""Evaluation on 1, 2, 3 and 4 ranks: the same to the last bit, and no rank left waiting.

One job for each number of ranks does all the checks of agreement, and returns what must be alike.
"""

import importlib.util
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from evaluated import CLASSES, SAMPLES, Job, data, measure, measures, network
from launch import Ranks
from thorough import everyday
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SubsetRandomSampler,
)
from training import LIMIT_S, joined

import pydist
from pydist import metrics

pytestmark = pytest.mark.timeout(40)

# It is in the group "test" of pyproject.toml, as what users evaluate with, not as a dependency.
HAS_TORCHMETRICS = importlib.util.find_spec("torchmetrics") is not None


def plain(result: dict[str, Any]) -> dict[str, Any]:
    return {k: v.tolist() if isinstance(v, Tensor) else v for k, v in result.items()}


# -- agreement


def evaluate_in_every_way() -> Job:
    rank, size = joined()
    model = pydist.DataParallel(network())
    seen: Job = {}
    for samples in (SAMPLES, 7, 1, 0):  # in batches of 4: some ranks get none
        result = pydist.evaluate(model, data(samples), measure, metrics=measures(), batch_size=4)
        seen[f"{samples} samples"] = plain(result)
    loader: Any = DataLoader(data(), batch_size=8)
    seen["loader"] = plain(pydist.evaluate(model, loader, measure, metrics=measures()))
    subset = SubsetRandomSampler(range(3, 50), torch.Generator().manual_seed(5))
    loader = DataLoader(data(), batch_size=8, sampler=subset)
    seen["sampler"] = plain(pydist.evaluate(model, loader, measure, metrics=measures()))
    one_by_one: Any = DataLoader(data(9), batch_size=None)
    seen["no batches"] = pydist.evaluate(model, one_by_one, lambda _, row: {"mean": row[0]})
    sharing = min(size, 3)  # the fourth rank has nothing at all
    own = [[t[rank::sharing] for t in data()[:]]] if rank < sharing else []
    result = pydist.evaluate(model, own, measure, metrics=measures())
    counts = ("right", "accuracy", "confusion")
    seen["own share"] = {k: plain(result)[k] for k in counts}
    # Samplers that share out single samples: counts are the same, losses to rounding.
    sampler = pydist.DistributedSampler(data(), shuffle=True, pad="none")
    loader = DataLoader(data(), 8, sampler=sampler)
    result = pydist.evaluate(model, loader, measure, metrics=measures())
    seen["pydist's sampler"] = {k: plain(result)[k] for k in counts}
    prepared = pydist.prepare(DataLoader(data(2), 8), pad="none")
    result = pydist.evaluate(model, prepared, measure, metrics=measures())
    seen["prepared, fewer samples than ranks"] = {k: plain(result)[k] for k in counts}
    return seen


def reduce_in_every_way() -> Job:
    """Sums of the same values, shared out in another way for each number of ranks."""
    rank, size = joined()
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(1001, generator=generator, dtype=torch.float64)
    values *= torch.randn(1001, generator=generator, dtype=torch.float64).mul(30).exp()
    weights = torch.randint(0, 9, (1001,), generator=generator)
    cut = torch.arange(1001) % (size + 1)  # rank 0 has two shares, and the last none if it is 3
    if size == 4:
        cut[cut == 3] = 1
    mine = (cut == rank) | ((cut == size) & (rank == 0))
    total = metrics.Sum()
    total.update(values[mine])
    return {
        "mean": metrics.mean(values[mine]),
        "weighted": metrics.mean(values[mine], weights[mine]),
        "sum": total.compute(),
        "sum again": total.compute(),
        "nothing": math.isnan(metrics.mean(torch.empty(0))),
    }


DTYPES = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64]


DTYPES += [torch.complex64, torch.float8_e4m3fn, torch.uint16]


def gather_in_every_way() -> Job:
    rank, size = joined()
    length = 3 * rank if rank != 1 else 0  # none on ranks 0 and 1
    lengths = [3 * r if r != 1 else 0 for r in range(size)]
    for dtype in DTYPES:
        whole = (torch.arange(2 * sum(lengths)).view(-1, 2) % 7).to(torch.float32).to(dtype)
        mine = whole.split(lengths)[rank]
        gathered = metrics.all_gather_ragged(mine)
        assert gathered.dtype == dtype
        assert torch.equal(gathered.view(torch.uint8), whole.view(torch.uint8))
        strided = torch.stack([mine, mine], -1)[..., 1] if mine.numel() else mine
        at_last = metrics.gather_ragged(strided, size - 1)
        assert (at_last is not None) == (rank == size - 1)
        assert at_last is None or torch.equal(at_last.view(torch.uint8), whole.view(torch.uint8))
        # Whoever has none may not know of what kind it would be.
        mine_or_none = mine if length else (None if rank == 0 else torch.empty(0))
        gathered = metrics.all_gather_ragged(mine_or_none)
        assert torch.equal(gathered.view(torch.uint8), whole.view(torch.uint8)) or size <= 2
    assert metrics.all_gather_ragged(torch.ones(length, 0, 3)).shape == (sum(lengths), 0, 3)
    assert metrics.all_gather_ragged(torch.ones(0, 2)).shape == (0, 2)
    assert metrics.all_gather_ragged(None).shape == (0,)
    array = metrics.all_gather_ragged(np.arange(rank, rank + 2))
    assert isinstance(array, np.ndarray)
    assert array.tolist() == [x for r in range(size) for x in (r, r + 1)]
    leaf = torch.ones(1, requires_grad=True)
    assert not metrics.all_gather_ragged(leaf).requires_grad

    indices = torch.tensor(list(DistributedSampler(range(23), size, rank, seed=2)))  # type: ignore[arg-type]
    rows = data(23).tensors[0][indices]
    ordered = metrics.all_gather_ragged(rows, positions=indices)  # repeated ones dropped
    at_first = metrics.gather_ragged(rows, positions=indices)
    assert rank != 0 or (at_first is not None and torch.equal(at_first, ordered))
    return {"ordered": ordered.tolist(), "expected": data(23).tensors[0].tolist()}


def use_torchmetrics() -> Job:
    """Objects of torchmetrics as they come, which synchronise by torch.distributed."""
    rank, size = joined()
    if not HAS_TORCHMETRICS:
        return {}
    from torchmetrics import aggregation, classification

    accuracy = classification.MulticlassAccuracy(CLASSES, average="micro")
    confusion = classification.MulticlassConfusionMatrix(CLASSES)
    mean, rows = aggregation.MeanMetric(), aggregation.CatMetric()
    curve = classification.MulticlassAUROC(CLASSES, thresholds=None)  # keeps all rows
    found = pydist.evaluate(
        network(),
        data(),
        lambda model, batch: {
            "accuracy": (model(batch[0]), batch[1]),
            "confusion": (model(batch[0]), batch[1]),
            "auroc": (model(batch[0]), batch[1]),
            "mean": batch[0].double(),
            "ours": (model(batch[0]), batch[1]),
        },
        metrics={
            "accuracy": accuracy,
            "confusion": confusion,
            "auroc": curve,
            "mean": mean,
            "ours": metrics.ConfusionMatrix(CLASSES),
        },
        batch_size=4,
    )
    assert torch.equal(found["confusion"], found["ours"])
    rows.update(torch.arange(rank + 2.0))  # another number on each rank
    assert sorted(rows.compute().tolist()) == sorted(x for r in range(size) for x in range(r + 2))
    return {
        "accuracy": found["accuracy"].item(),
        "confusion": found["confusion"].tolist(),
        "auroc": round(found["auroc"].item(), 5),  # float32, in the order of the ranks
        "mean": round(found["mean"].item(), 5),
    }


def check_all() -> dict[str, Job]:
    jobs = (evaluate_in_every_way, reduce_in_every_way, gather_in_every_way, use_torchmetrics)
    return {job.__name__: job() for job in jobs}


@pytest.fixture(scope="module")
def alone() -> Iterator[dict[str, Job]]:
    with Ranks(1) as ranks:
        yield ranks.run(check_all, timeout=LIMIT_S)[0]


def test_one_rank_computes_what_torch_does(alone: dict[str, Job]) -> None:
    model = network().eval()
    inputs, targets = data()[:]
    with torch.no_grad():
        scores = model(inputs)
        losses = F.cross_entropy(scores.double(), targets, reduction="none")
    found = alone["evaluate_in_every_way"][f"{SAMPLES} samples"]
    right = int((scores.argmax(1) == targets).sum())
    assert found["accuracy"] == found["right"] == right / SAMPLES
    assert found["loss"] == pytest.approx(losses.mean().item(), rel=1e-6)
    assert found["weighted"] == pytest.approx(losses.mean().item(), rel=1e-6)
    torch.testing.assert_close(torch.tensor(found["outputs"]), scores)
    assert sum(map(sum, found["confusion"])) == SAMPLES
    gathered = alone["gather_in_every_way"]
    assert gathered["ordered"] == gathered["expected"]
    assert repr(alone["evaluate_in_every_way"]["0 samples"]["accuracy"]) == "nan"


@pytest.fixture(
    scope="module",
    params=everyday((3, "native"), thorough=((2, "native"), (3, "gloo"), (4, "native"))),
    ids=str,
)
def everybody(request: pytest.FixtureRequest) -> list[dict[str, Job]]:
    nprocs, backend = request.param
    with Ranks(nprocs, {"PYDIST_BACKEND": backend}) as ranks:
        return ranks.run(check_all, timeout=LIMIT_S)


def assert_same(job: Any, alone: dict[str, Job], everybody: list[dict[str, Job]]) -> None:
    for rank, found in enumerate(everybody):
        for name, value in alone[job.__name__].items():
            # As text, in which NaN equals itself and floats are whole.
            assert repr(found[job.__name__][name]) == repr(value), f"{name} on rank {rank}"


def test_evaluation_is_the_same(alone: dict[str, Job], everybody: list[dict[str, Job]]) -> None:
    assert_same(evaluate_in_every_way, alone, everybody)


def test_reductions_are_the_same(alone: dict[str, Job], everybody: list[dict[str, Job]]) -> None:
    assert_same(reduce_in_every_way, alone, everybody)


def test_gathered_rows_are_the_same(alone: dict[str, Job], everybody: list[dict[str, Job]]) -> None:
    assert_same(gather_in_every_way, alone, everybody)


@pytest.mark.skipif(not HAS_TORCHMETRICS, reason="torchmetrics is not installed: `make build`")
def test_torchmetrics_are_the_same(alone: dict[str, Job], everybody: list[dict[str, Job]]) -> None:
    assert_same(use_torchmetrics, alone, everybody)


# -- what goes wrong


def evaluate_in_a_group() -> list[Any]:
    """Ranks 2 and 0 evaluate; rank 1 is elsewhere."""
    joined()
    members = pydist.new_group([2, 0])
    if isinstance(members, int):
        return []
    arguments = {"metrics": measures(), "batch_size": 4}
    found = pydist.evaluate(network(), data(), measure, group=members, **arguments)
    mine = data()[:][0][members.rank :: 2]
    mean = metrics.mean(mine, group=members)
    rows = metrics.gather_ragged(mine, 1, group=members)
    assert (rows is not None) == (members.rank == 1)
    assert rows is None or len(rows) == SAMPLES
    return [plain(found), mean]


@pytest.fixture(scope="module")
def three_native() -> Iterator[Ranks]:
    with Ranks(3) as ranks:
        yield ranks


def test_some_ranks_evaluate_by_themselves(three_native: Ranks, alone: dict[str, Job]) -> None:
    first, other, last = three_native.run(evaluate_in_a_group, timeout=LIMIT_S)
    assert other == []
    assert first == last
    expected = alone["evaluate_in_every_way"][f"{SAMPLES} samples"]
    assert repr(first[0]) == repr(expected)


# -- a world of one


class Held(nn.Module):
    """A metric that is a module, as those of torchmetrics are."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = metrics.Mean()

    def reset(self) -> None:
        self.mean.reset()

    def update(self, values: Tensor) -> None:
        self.mean.update(values)

    def compute(self) -> Any:
        return self.mean.compute()


@pytest.mark.usefixtures("world_of_one")
def test_a_collection_that_is_no_dict() -> None:
    collection: Any = nn.ModuleDict({"held": Held()})
    loader: Any = DataLoader(torch.arange(5.0), 2)  # type: ignore[arg-type]
    found = pydist.evaluate(None, loader, lambda _, b: {"held": b}, metrics=collection)
    assert found == {"held": 2.0}
    if HAS_TORCHMETRICS:
        import torchmetrics

        collection = torchmetrics.MetricCollection({"mean": torchmetrics.MeanMetric()})
        found = pydist.evaluate(None, loader, lambda _, b: {"mean": b}, metrics=collection)
        assert found["mean"] == 2.0


class Pairs(torch.utils.data.Sampler[list[int]]):
    """Batches of one's own, which say little of themselves."""

    drop_last = True

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        indices = list(self.sampler)
        return (indices[i : i + 2] for i in range(0, len(indices), 2))


@pytest.mark.usefixtures("world_of_one")
def test_a_batch_sampler_without_a_size() -> None:
    pydist.init()
    own = Pairs(pydist.DistributedSampler(data(7), pad="none"))
    loader: Any = DataLoader(data(7), batch_sampler=own)
    found = pydist.evaluate(None, loader, lambda _, batch: {"count": (1.0, len(batch[0]))})
    assert found == {"count": 1.0}


class Numbers(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(5.0))


@pytest.mark.usefixtures("world_of_one")
def test_loaders_keep_all_that_they_are() -> None:
    """Joins by itself; workers, a collation and an iterable data set work, also twice."""
    collated: list[int] = []

    def collate(rows: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        collated.append(len(rows))
        return [torch.stack(column) for column in zip(*rows, strict=True)]

    loader: Any = DataLoader(data(), 10, collate_fn=collate, drop_last=True)
    expected = pydist.evaluate(network(), loader, measure, metrics=measures())
    assert collated == [10] * 10
    workers: Any = DataLoader(data(), 10, num_workers=1, drop_last=True, persistent_workers=True)
    for _ in range(2):
        found = pydist.evaluate(network(), workers, measure, metrics=measures())
        assert repr(plain(found)) == repr(plain(expected))
    assert len(list(loader)) == 10  # as it was
    stream: Any = DataLoader(Numbers(), 2)
    assert pydist.evaluate(None, stream, lambda _, batch: {"mean": batch}) == {"mean": 2.0}
    weighted = pydist.evaluate(None, stream, lambda _, batch: {"mean": (batch, batch)})
    assert weighted == {"mean": 3.0}
