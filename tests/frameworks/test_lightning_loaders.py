"""The loaders that Lightning's Trainer and Fabric get on pydist, beside those of its own DDP."""

import importlib
import importlib.util
import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning_runs as runs
import pytest
import torch
import toy_training as toy
from launch import Ranks, run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

import pydist

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None,
    reason="lightning is not installed: make test-frameworks installs it",
)

LIMIT_S = 50.0


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2, runs.TORCHRUN) as ranks:
        yield ranks


def batches_of(batches: Any) -> list[Any]:
    return [runs.plain(batch) for batch in batches]


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
    fabric = runs.fabric_of("lightning", strategy)
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


@toy.leaving()
def epochs_after_resuming(path: str, kind: str, saves_at: int) -> Any:
    """Three epochs of three batches; what a run does that goes on from a checkpoint of them.

    Args:
        path: Of the checkpoint.
        kind: Who prepares the loader, or sets its epochs besides Fabric.
        saves_at: The batch with which the checkpoint is made.

    Returns:
        All batches, those after resuming, those after resuming what was resumed, and the warnings.
    """
    fabric = runs.fabric_of("lightning", "pydist")

    def one_run(begin: int, saves: int | None) -> list[Any]:
        loaders = []
        for seed in (5, 6):
            loader = DataLoader(range(24), batch_size=4, shuffle=True)
            loaders.append(
                fabric.setup_dataloaders(
                    pydist.prepare(loader, seed=seed) if kind == "prepared" else loader
                )
            )
        train, other = loaders
        state = {"train": train, "other": other, "step": 0}
        if begin:
            fabric.load(path, state)
        amid = iter(other)
        if not begin:
            next(amid)
        seen = []
        while state["step"] < 9:
            if kind == "script's epochs":
                train.sampler.set_epoch(state["step"] // 3)
            for batch in train:
                seen.append(batch.tolist())
                state["step"] += 1
                if state["step"] == saves:
                    fabric.save(path, state)
        seen.append(batches_of(amid))
        return seen

    whole = one_run(0, saves_at)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rest = one_run(saves_at, saves_at + 2)
    again = one_run(saves_at + 2, None)
    return whole, rest, again, [str(warning.message) for warning in caught]


@pytest.mark.parametrize("saves_at", [3, 5])
@pytest.mark.parametrize("kind", ["fabric's", "prepared", "script's epochs"])
def test_several_loaders_go_on_in_fabric_again_and_again(
    two: Ranks, tmp_path: Path, kind: str, saves_at: int
) -> None:
    path = str(tmp_path / "amid.ckpt")
    outcomes = two.run(epochs_after_resuming, path, kind, saves_at, timeout=LIMIT_S)
    for whole, rest, again, warned in outcomes:
        assert whole[:3] != whole[3:6] != whole[6:9]
        assert rest == whole[saves_at:]
        assert again == whole[saves_at + 2 :]
        assert len(whole[-1]) == 2
        at_an_end = [text for text in warned if "the last batch of epoch 0" in text]
        assert len(at_an_end) == (1 if saves_at == 3 else 0)


@toy.leaving()
def began_with_the_next_epoch(path: str) -> Any:
    """Two epochs; and the second anew, from a state of the first one's last batch."""
    fabric = runs.fabric_of("lightning", "pydist")

    def prepared() -> Any:
        return fabric.setup_dataloaders(DataLoader(range(24), batch_size=4, shuffle=True))

    loader = prepared()
    for number, _ in enumerate(loader):
        if number == 2:
            fabric.save(path, {"loader": loader})
    second = batches_of(loader)
    loader = prepared()
    fabric.load(path, {"loader": loader})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in loader:  # as the warning advises
            raise AssertionError("the epoch has a batch left")
    return second, batches_of(loader), [str(warning.message) for warning in caught]


def test_fabric_is_told_how_to_begin_with_the_next_epoch(two: Ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "end.ckpt")
    for second, again, warned in two.run(began_with_the_next_epoch, path, timeout=LIMIT_S):
        assert len(second) == 3
        assert again == second
        (said,) = (text for text in warned if "the last batch of epoch 0" in text)
        assert "for _ in loader: pass" in said
        assert "calls set_epoch()" not in said


@toy.leaving()
def weighted(path: str, ranks: int, resumes: bool) -> Any:
    """Batches of 8 samples of all ranks together, each of which counts alike.

    Returns:
        The numbers of the samples of each step, and the weights at the end.
    """

    class Weighted(type(runs.regression("lightning", 40, 8, shuffle=True))):  # type: ignore[misc]
        def train_dataloader(self) -> Any:
            return pydist.prepare(super().train_dataloader(), split_batches=True, seed=3)

        def backward(self, loss: Tensor) -> None:
            loss = loss * self.trainer.accumulate_grad_batches
            with self.trainer.strategy.model.weighted(len(self.seen[-1])):
                loss.backward()

    callbacks = [] if resumes else [runs.saving_at("lightning", 2, path)]
    trainer = runs.trainer_of("lightning", "pydist", ranks, max_epochs=2, callbacks=callbacks)
    model = Weighted()
    trainer.fit(model, ckpt_path=path if resumes else None)
    return model.seen, toy.weights_of(model).tolist()


@pytest.mark.parametrize("ranks", [1, 3])
def test_uneven_shares_of_a_batch_can_be_weighted(two: Ranks, tmp_path: Path, ranks: int) -> None:
    path = str(tmp_path / "amid.ckpt")

    def steps(outcomes: list[Any]) -> list[list[int]]:
        shares = zip(*(seen for seen, _ in outcomes), strict=True)
        return [sorted(itertools.chain(*each)) for each in shares]

    whole = two.run(weighted, path, 2, False, timeout=LIMIT_S)
    rest = run_ranks(weighted, ranks, path, ranks, True, env=runs.TORCHRUN, timeout=LIMIT_S)
    assert steps(rest) == steps(whole)[2:]
    assert sorted(itertools.chain(*steps(whole)[:5])) == list(range(40))
    # 3, 3 and 2 samples on three ranks.
    assert {len(seen) for outcome in rest for seen in outcome[0]} == ({8} if ranks == 1 else {2, 3})
    for outcome in rest:
        assert outcome[1] == pytest.approx(whole[0][1], rel=1e-4, abs=1e-6)


@toy.leaving()
def step_of_sgd(length: int, accumulated: int) -> tuple[Tensor, Tensor]:
    """What a step changes by a rate of 1, and the gradient that one process has of all samples."""

    class Weighted(type(runs.regression("lightning", length, 8))):  # type: ignore[misc]
        def train_dataloader(self) -> Any:
            return pydist.prepare(super().train_dataloader(), split_batches=True, pad="none")

        def training_step(self, batch: Any, step: int) -> Tensor:
            numbers, inputs, targets = batch
            self.samples = len(numbers)
            return nn.functional.mse_loss(self.network(inputs.double()), targets.double())

        def backward(self, loss: Tensor) -> None:  # as docs/frameworks.md has it
            loss = loss * self.trainer.accumulate_grad_batches
            with self.trainer.strategy.model.weighted(self.samples):
                loss.backward()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    model = Weighted()
    model.network.double()
    before = toy.weights_of(model)
    settings = {"max_steps": 1, "accumulate_grad_batches": accumulated, "limit_val_batches": 0}
    runs.trainer_of("lightning", "pydist", 2, **settings).fit(model)
    return before - toy.weights_of(model), toy.gradient_of_all(length)


@pytest.mark.parametrize(("length", "accumulated"), [(7, 1), (13, 2), (23, 3)])
def test_weighted_shares_leave_the_gradient_of_one_process(
    two: Ranks, length: int, accumulated: int
) -> None:
    for change, gradient in two.run(step_of_sgd, length, accumulated, timeout=LIMIT_S):
        torch.testing.assert_close(change, gradient)


@toy.leaving()
def evaluated_nothing(strategy: str, length: int) -> list[int]:
    model = runs.regression("lightning", length, 4)
    loader = DataLoader(toy.Points(length), 4, drop_last=True)
    trainer = runs.trainer_of("lightning", strategy, 2)
    trainer.validate(model, loader, verbose=False)
    found: list[int] = model.seen_outside
    return found


@pytest.mark.parametrize("length", [0, 5])
@pytest.mark.parametrize("strategy", ["ddp", "pydist"])
def test_an_evaluation_without_batches_is_skipped(two: Ranks, strategy: str, length: int) -> None:
    assert two.run(evaluated_nothing, strategy, length, timeout=LIMIT_S) == [[], []]


# In batches of 12 on all ranks: 3 steps, 2, 1, and 2 of which the second is smaller.
LENGTHS = {"long": 36, "short": 24, "shortest": 12, "ragged": 18}
MODES = ["max_size_cycle", "min_size", "max_size"]


def _with_several(mode: str, batch_size: int) -> Any:
    """A model that takes down its losses, and which samples each loader gave."""
    combined = importlib.import_module("lightning.pytorch.utilities").CombinedLoader

    class Several(type(runs.regression("lightning", 1, 1))):  # type: ignore[misc]
        def training_step(self, batch: Any, step: int) -> Tensor:
            given = {name: each for name, each in batch.items() if each is not None}
            loss = sum(
                nn.functional.mse_loss(self.network(inputs), targets)
                for _, inputs, targets in given.values()
            )
            self.losses.append(float(loss))
            self.seen.append({name: numbers.tolist() for name, (numbers, *_) in given.items()})
            return loss

        def train_dataloader(self) -> Any:
            loaders = {
                name: DataLoader(toy.Points(length), batch_size, shuffle=True)
                for name, length in LENGTHS.items()
                # With it, the epochs of the mode that ends with the shortest have one step.
                if not (mode == "min_size" and name == "shortest")
            }
            return combined(loaders, mode)

    return Several()


def _saving_each_step(folder: str) -> Any:
    class Saves(runs.tree_of("lightning").Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.save_checkpoint(f"{folder}/{trainer.global_step}.ckpt")

    return Saves()


@toy.leaving()
def trained_with_several(strategy: str, mode: str, folder: str | None) -> Any:
    """Three epochs; the losses and samples of each step."""
    callbacks = [] if folder is None else [_saving_each_step(folder)]
    quiet = {"max_epochs": 3, "limit_val_batches": 0, "callbacks": callbacks}
    trainer = runs.trainer_of("lightning", strategy, 2, **quiet)
    model = _with_several(mode, 6)
    trainer.fit(model)
    return model.losses, model.seen


@toy.leaving()
def resumed_with_several(mode: str, folder: str, step: int, ranks: int) -> Any:
    """The same from a checkpoint on."""
    quiet = {"max_epochs": 3, "limit_val_batches": 0}
    trainer = runs.trainer_of("lightning", "pydist", ranks, **quiet)
    model = _with_several(mode, 12 // ranks)
    trainer.fit(model, ckpt_path=f"{folder}/{step}.ckpt")
    return model.losses, model.seen


@pytest.mark.parametrize("mode", MODES)
def test_each_loader_gives_the_samples_that_it_does_on_ddp(two: Ranks, mode: str) -> None:
    ours, theirs = (
        two.run(trained_with_several, strategy, mode, None, timeout=LIMIT_S)
        for strategy in ("pydist", "ddp")
    )
    for own, their in zip(ours, theirs, strict=True):
        assert len(own[1]) == (6 if mode == "min_size" else 9)
        assert own[1] == their[1]
        assert own[0] == pytest.approx(their[0], rel=1e-6)


def _steps_of_several(outcomes: list[Any]) -> list[Any]:
    """For each step, the samples of all ranks, of each loader."""
    return [
        {name: sorted(n for given in step for n in given[name]) for name in step[0]}
        for step in zip(*(seen for _, seen in outcomes), strict=True)
    ]


# Amid the second epoch, after a loader's end, after its second one, and at the end of the epoch.
@pytest.mark.parametrize(
    ("mode", "steps"), [("max_size_cycle", [4, 5, 6]), ("min_size", [3]), ("max_size", [4, 5])]
)
def test_a_checkpoint_of_any_step_goes_on_with_the_batches_that_would_have_come(
    two: Ranks, tmp_path: Path, mode: str, steps: list[int]
) -> None:
    folder = str(tmp_path)
    whole = _steps_of_several(
        two.run(trained_with_several, "pydist", mode, folder, timeout=LIMIT_S)
    )
    for step in steps:
        rest = _steps_of_several(
            two.run(resumed_with_several, mode, folder, step, 2, timeout=LIMIT_S)
        )
        assert rest == whole[step:], step
    step = max(step for step in steps if step < 6)
    for ranks in (1, 3):
        arguments = (resumed_with_several, ranks, mode, folder, step, ranks)
        rest = _steps_of_several(run_ranks(*arguments, env=runs.TORCHRUN, timeout=LIMIT_S))
        assert rest == whole[step:], ranks


@toy.leaving()
def gone_through_by_hand() -> list[list[int]]:
    """Two epochs of a prepared loader that the Trainer has trained with."""
    trainer = runs.trainer_of("lightning", "pydist", 2, max_epochs=1, limit_val_batches=0)
    model = runs.regression("lightning", 24, 3)
    loader = pydist.prepare(DataLoader(toy.Points(24), 3, shuffle=True), seed=5)
    trainer.fit(model, loader)
    return [[n for numbers, *_ in loader for n in numbers.tolist()] for _ in range(2)]


def test_a_prepared_loader_goes_on_by_itself_after_training(two: Ranks) -> None:
    for first, second in two.run(gone_through_by_hand, timeout=LIMIT_S):
        assert len(first) == len(second) == 12
        assert first != second
