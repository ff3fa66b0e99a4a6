"""The loaders that Lightning's Trainer and Fabric get on pydist, beside those of its own DDP."""

import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import lightning_runs as runs
import pytest
import toy_training as toy
from launch import Ranks
from torch.utils.data import DataLoader, DistributedSampler

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None,
    reason="lightning is not installed: make test-frameworks installs it",
)

LIMIT_S = 50.0


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2, runs.TORCHRUN) as ranks:
        yield ranks


def fabric_of(strategy: str) -> Any:
    importlib.import_module("pydist.integrations.lightning")
    tree = importlib.import_module("lightning.fabric")
    fabric = tree.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    return fabric


def batches_of(loader: Any) -> list[Any]:
    return [runs.plain(batch) for batch in loader]


def loader_of(rank: int, length: int, *, own_sampler: bool, **settings: Any) -> Any:
    """Over numbers. A sampler of the script's own is over the first 9 alone."""
    data = list(range(length))
    if own_sampler:
        settings["sampler"] = DistributedSampler(range(9), 2, rank, drop_last=True)
    else:
        settings["shuffle"] = True
    return DataLoader(data, batch_size=4, **settings)


@toy.leaving()
def fabric_batches(strategy: str, length: int, settings: dict[str, Any]) -> list[Any]:
    fabric = fabric_of(strategy)
    given = loader_of(fabric.global_rank, length, **settings)
    loader = fabric.setup_dataloaders(given)
    return [batches_of(loader) for _ in range(2)]


@toy.leaving()
def trainer_batches(strategy: str, length: int, settings: dict[str, Any]) -> list[Any]:
    """The batches of two epochs, in a row."""
    quiet = {"max_epochs": 2, "limit_val_batches": 0}
    trainer = runs.trainer_of("lightning", strategy, 2, **quiet)
    seen = []

    class Looks(type(runs.regression("lightning", 1, 1))):  # type: ignore[misc]
        def training_step(self, batch: Any, step: int) -> Any:
            seen.append(batch.tolist())
            return sum(parameter.sum() for parameter in self.parameters())

    rank = trainer.strategy.cluster_environment.global_rank()
    model = Looks()
    trainer.fit(model, loader_of(rank, length, **settings))
    return seen


@pytest.mark.parametrize("batches", [fabric_batches, trainer_batches], ids=["fabric", "trainer"])
def test_a_sampler_of_the_scripts_own_stays(two: Ranks, batches: Any) -> None:
    settings = {"own_sampler": True}
    ours, theirs = (
        two.run(batches, strategy, 20, settings, timeout=LIMIT_S) for strategy in ("pydist", "ddp")
    )
    assert ours == theirs


# In batches of 4 on each of 2 ranks: the last batch is full once a sample is repeated, or is not.
@pytest.mark.parametrize("length", [15, 16, 17, 22])
def test_drop_last_leaves_out_what_it_does_on_ddp(two: Ranks, length: int) -> None:
    settings = {"own_sampler": False, "drop_last": True}
    ours, theirs = (
        two.run(fabric_batches, strategy, length, settings, timeout=LIMIT_S)
        for strategy in ("pydist", "ddp")
    )
    assert ours == theirs
