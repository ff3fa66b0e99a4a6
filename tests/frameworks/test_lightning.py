"""Lightning's Trainer on pydist, beside its own DDP on gloo."""

import contextlib
import copy
import importlib
import importlib.util
import math
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import lightning_runs as runs
import pytest
import torch
import toy_training as toy
from launch import Ranks, run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader

from pydist import _native

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None,
    reason="lightning is not installed: make test-frameworks installs it",
)
LIMIT_S = 50.0


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2, runs.TORCHRUN) as ranks:
        yield ranks


@toy.leaving()
def trained(package: str, strategy: str, path: str, settings: dict[str, Any]) -> Any:
    """Two epochs; the losses, the logged mean and what the checkpoint holds."""
    trainer = runs.trainer_of(package, strategy, 2, max_epochs=2, **settings)
    model = runs.regression(package, length=24, batch_size=3)
    trainer.fit(model)
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=False)
    logged = float(trainer.callback_metrics["loss"])
    kept = {name: runs.plain(saved[name]) for name in ("state_dict", "optimizer_states")}
    return model.losses, logged, kept, saved["global_step"]


@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"accumulate_grad_batches": 2},
        {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "norm"},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"precision": "bf16-mixed"},
    ],
    ids=["plain", "accumulation", "norm", "value", "bf16"],
)
def test_the_same_losses_and_checkpoint_as_ddp(
    two: Ranks, tmp_path: Path, package: str, settings: dict[str, Any]
) -> None:
    ours, theirs = (
        two.run(trained, package, strategy, str(tmp_path / strategy), settings, timeout=LIMIT_S)
        for strategy in ("pydist", "ddp")
    )
    for own, their in zip(ours, theirs, strict=True):
        assert len(own[0]) == 8
        assert own[0] == pytest.approx(their[0], rel=1e-6)
        assert own[1] == pytest.approx(their[1], rel=1e-6)
        assert own[3] == their[3]
        assert own[2].keys() == their[2].keys()
        torch.testing.assert_close(own[2], their[2], rtol=1e-5, atol=1e-6)


@toy.leaving()
def decided_and_gathered(strategy: str) -> Any:
    """What ranks decide together, and a gradient through what the model gathers of all."""
    trainer = runs.trainer_of("lightning", strategy, 2, max_epochs=1)
    decisions = []

    class Gathers(type(runs.regression("lightning", 12, 3))):  # type: ignore[misc]
        def training_step(self, batch: Any, step: int) -> Tensor:
            mine = self.global_rank == 1
            for decision in (False, mine, True):
                for every in (True, False):
                    decisions.append(trainer.strategy.reduce_boolean_decision(decision, every))
            everywhere = self.all_gather(self.network(batch[1]).mean(), sync_grads=True)
            loss = (everywhere * torch.tensor([2.0, 3.0])).sum()
            self.losses.append(loss.item())
            return loss

    model = Gathers()
    trainer.fit(model)
    return decisions, model.losses, runs.plain(model.state_dict())


def test_ranks_decide_and_gather_as_on_ddp(two: Ranks) -> None:
    ours, theirs = (
        two.run(decided_and_gathered, strategy, timeout=LIMIT_S) for strategy in ("pydist", "ddp")
    )
    for own, their in zip(ours, theirs, strict=True):
        assert own[0] == their[0] == [False, False, False, True, True, True] * 2
        assert own[1] == pytest.approx(their[1], rel=1e-6)
        torch.testing.assert_close(own[2], their[2], rtol=1e-5, atol=1e-6)


@toy.leaving()
def evaluated(method: str, length: int) -> tuple[float, float, list[int]]:
    """The mean over ranks, that of one process over all samples, and this rank's samples."""
    trainer = runs.trainer_of("lightning", "pydist", 2)
    model = runs.regression("lightning", length, batch_size=2)
    (results,) = getattr(trainer, method)(model, verbose=False)
    points = [toy.Points(length)[index] for index in range(length)]
    _, inputs, targets = (torch.stack(column) for column in zip(*points, strict=True))
    with torch.no_grad():
        whole = nn.functional.mse_loss(model.network(inputs), targets)
    return results["val_loss"], float(whole), model.seen_outside


@pytest.mark.parametrize("method", ["validate", "test"])
def test_every_sample_counts_once_over_uneven_shares(two: Ranks, method: str) -> None:
    outcomes = two.run(evaluated, method, 7, timeout=LIMIT_S)
    assert sorted(number for *_, seen in outcomes for number in seen) == list(range(7))
    for mean, whole, _ in outcomes:
        assert mean == pytest.approx(whole, rel=1e-6)


@toy.leaving()
def evaluated_with_few(method: str) -> dict[str, float]:
    """What a rank has logged of two loaders, of two samples and of seven."""
    trainer = runs.trainer_of("lightning", "pydist", 3)

    class Logs(type(runs.regression("lightning", 2, 2))):  # type: ignore[misc]
        def validation_step(self, batch: Any, step: int, dataloader_idx: int = 0) -> None:
            numbers, _, _ = batch
            value = numbers.float().mean() + 5
            everyone = {"sync_dist": True, "add_dataloader_idx": False}
            each = f"{dataloader_idx}"
            self.log(f"mean {each}", value, **everyone)
            self.log(f"infinite {each}", value / (numbers.sum() != 0), **everyone)
            self.log(f"number {each}", int(numbers.sum()), reduce_fx="sum", **everyone)
            self.log(f"max {each}", numbers.max(), reduce_fx=torch.max, **everyone)
            self.log(f"min {each}", numbers.min() + 1, reduce_fx="min", **everyone)

        test_step = validation_step

    loaders = [DataLoader(toy.Points(length), 2) for length in (2, 7)]
    results = getattr(trainer, method)(Logs(), loaders, verbose=False)
    return {name: value for each in results for name, value in each.items()}


@pytest.mark.parametrize("method", ["validate", "test"])
def test_a_rank_without_samples_takes_no_part_in_what_is_logged(method: str) -> None:
    arguments = (evaluated_with_few, 3, method)
    for results in run_ranks(*arguments, env=runs.TORCHRUN, timeout=LIMIT_S):
        assert results.pop("infinite 0") == math.inf  # of sample 0 itself, on the first rank
        results.pop("infinite 1")
        assert results == pytest.approx(
            {"mean 0": 5.5, "number 0": 1, "max 0": 1, "min 0": 1}
            | {"mean 1": 8, "number 1": 21, "max 1": 6, "min 1": 1}
        )


@toy.leaving()
def trained_with_few(length: int) -> Any:
    """Two epochs with a validation of few samples, whose mean decides when to end.

    Returns:
        The mean of the last validation, that of one process, the epoch, and the warnings.
    """
    callbacks = importlib.import_module("lightning.pytorch.callbacks")
    given = [callbacks.EarlyStopping("val_loss", check_finite=True)]
    settings = {"max_epochs": 2, "callbacks": given}
    trainer = runs.trainer_of("lightning", "pydist", 3, **settings)
    model = runs.regression("lightning", 24, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model, val_dataloaders=DataLoader(toy.Points(length), 2))
    points = [toy.Points(length)[index] for index in range(length)]
    _, inputs, targets = (torch.stack(column) for column in zip(*points, strict=True))
    with torch.no_grad():
        whole = nn.functional.mse_loss(model.network(inputs), targets)
    said = [str(each.message) for each in caught]
    return float(trainer.callback_metrics["val_loss"]), float(whole), trainer.current_epoch, said


@pytest.mark.parametrize("length", [1, 2])
def test_training_validates_with_fewer_samples_than_ranks(length: int) -> None:
    for mean, whole, epoch, said in run_ranks(
        trained_with_few, 3, length, env=runs.TORCHRUN, timeout=LIMIT_S
    ):
        assert mean == pytest.approx(whole, rel=1e-5)
        assert epoch == 2
        assert not [text for text in said if "did not begin" in text]


@toy.leaving()
def gathered_in_each_step(method: str, logs: bool) -> None:
    """Three batches on the first rank and two on the second."""
    trainer = runs.trainer_of("lightning", "pydist", 2)

    class Gathers(type(runs.regression("lightning", 5, 1))):  # type: ignore[misc]
        def validation_step(self, batch: Any, step: int) -> None:
            self.all_gather(batch[1].mean())
            if logs:
                self.log("input", batch[1].mean(), sync_dist=True)

        test_step = validation_step

    getattr(trainer, method)(Gathers(), verbose=False)


@pytest.mark.parametrize("logs", [False, True])
@pytest.mark.parametrize("method", ["validate", "test"])
def test_ranks_out_of_step_are_told_of_unequally_many_batches(method: str, logs: bool) -> None:
    with Ranks(2, runs.TORCHRUN) as ranks:
        outcomes = ranks.outcomes(gathered_in_each_step, method, logs, timeout=LIMIT_S)
    # Without anything that is logged the second rank has nothing to wait for.
    # With it, the first to raise may leave before the other has seen why.
    assert outcomes[0].error in (["Mismatch", "PeerLost"] if logs else ["PeerLost"])
    for outcome in outcomes if logs else outcomes[:1]:
        assert "unequally many batches, from 2 to 3" in outcome.message
        assert "at the end of the epoch" in outcome.message


@toy.leaving()
def evaluated_together() -> None:
    combined = importlib.import_module("lightning.pytorch.utilities").CombinedLoader
    trainer = runs.trainer_of("lightning", "pydist", 3)

    class Logs(type(runs.regression("lightning", 2, 2))):  # type: ignore[misc]
        def validation_step(self, batch: Any, step: int) -> None:
            self.log("sum", batch[0][0].float().sum(), sync_dist=True, batch_size=1)

    loaders = [DataLoader(toy.Points(length), 2) for length in (2, 7)]
    trainer.validate(Logs(), combined(loaders, "max_size_cycle"), verbose=False)


def test_what_loaders_that_are_evaluated_together_cant_weigh_is_refused() -> None:
    with Ranks(3, runs.TORCHRUN) as ranks:
        outcomes = ranks.outcomes(evaluated_together, timeout=LIMIT_S)
    assert outcomes[2].error == "InvalidUsage"
    assert "one loader after the other" in outcomes[2].message


@toy.leaving()
def copied_in_training() -> list[list[int]]:
    copies = []  # made before a training and amid it, for another strategy

    class Copies(type(runs.regression("lightning", 4, 2))):  # type: ignore[misc]
        def setup(self, stage: str) -> None:
            copies.append(copy.deepcopy(self))  # as weights are averaged

        def on_train_batch_end(self, *_: Any) -> None:
            copies.append(copy.deepcopy(self))

    runs.trainer_of("lightning", "pydist", 1, max_steps=1, limit_val_batches=0).fit(Copies())
    for each in (made := copies[:]):  # a copy's own setup() makes one more
        runs.trainer_of("lightning", "ddp", 1).validate(each, verbose=False)
    return [each.seen_outside for each in made]


def test_copies_of_a_model_go_on_without_pydist() -> None:
    seen = run_ranks(copied_in_training, 1, env=runs.TORCHRUN, timeout=LIMIT_S)
    assert seen == [[list(range(4))] * 2]


@toy.leaving()
def predicted(length: int) -> tuple[list[list[float]], Any]:
    """This rank's predictions, and those of all put in order as docs/frameworks.md says."""
    trainer = runs.trainer_of("lightning", "pydist", 2)
    predictions = torch.cat(trainer.predict(runs.regression("lightning", length, batch_size=2)))
    parts: list[Any] = [None] * trainer.world_size
    torch.distributed.all_gather_object(parts, predictions)
    ordered = torch.empty(sum(map(len, parts)), *predictions.shape[1:])
    for rank, part in enumerate(parts):
        ordered[rank :: trainer.world_size] = part
    return predictions.tolist(), ordered


@pytest.mark.parametrize("length", [7, 9])
def test_each_sample_is_predicted_once_and_in_a_known_order(two: Ranks, length: int) -> None:
    points = torch.stack([toy.Points(length)[index][1] for index in range(length)])
    with torch.no_grad():
        expected = torch.cat([torch.arange(length)[:, None], toy.network()(points)], dim=1)
    for rank, (own, ordered) in enumerate(two.run(predicted, length, timeout=LIMIT_S)):
        assert [int(number) for number, _ in own] == list(range(rank, length, 2))
        torch.testing.assert_close(ordered, expected, rtol=1e-5, atol=1e-6)


def test_the_gan_tutorial_needs_no_flag(two: Ranks) -> None:
    ours = two.run(runs.gan, "pydist", timeout=LIMIT_S)
    theirs = two.run(runs.gan, "ddp_find_unused_parameters_true", timeout=LIMIT_S)
    for own, their in zip(ours, theirs, strict=True):
        assert len(own[0]) == 16
        assert own[0] == pytest.approx(their[0], rel=1e-5)
    assert ours[0][1] == ours[1][1]
    torch.testing.assert_close(ours[0][1], theirs[0][1], rtol=1e-4, atol=1e-5)


# Of the trainings that are halted and resumed. Workers fetch batches ahead of the position.
SHUFFLED: dict[str, Any] = {"shuffle": True, "num_workers": 1}


@toy.leaving()
def halted(path: str, length: int = 36) -> Any:
    """Trains to the end, and saves after the 5th of 9 steps: the second of the second epoch."""
    toy.allow_workers()
    callbacks = [runs.saving_at("lightning", 5, path)]
    trainer = runs.trainer_of("lightning", "pydist", 2, max_epochs=3, callbacks=callbacks)
    model = runs.regression("lightning", length, batch_size=6, **SHUFFLED)
    trainer.fit(model)
    return model.losses, model.seen


@toy.leaving()
def resumed(path: str, length: int, ranks: int) -> Any:
    toy.allow_workers()
    trainer = runs.trainer_of("lightning", "pydist", ranks, max_epochs=3)
    model = runs.regression("lightning", length, batch_size=12 // ranks, **SHUFFLED)
    trainer.fit(model, ckpt_path=path)
    return model.losses, model.seen


def steps_of(outcomes: list[Any]) -> list[tuple[float, list[int]]]:
    """For each step, the mean loss and the samples of all ranks."""
    steps = []
    for k in range(len(outcomes[0][0])):
        mean = sum(losses[k] for losses, _ in outcomes) / len(outcomes)
        steps.append((mean, sorted(number for _, seen in outcomes for number in seen[k])))
    return steps


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_checkpoint_from_mid_epoch_goes_on_with_any_number_of_ranks(
    two: Ranks, tmp_path: Path, ranks: int
) -> None:
    path = str(tmp_path / "amid.ckpt")
    whole = steps_of(two.run(halted, path, timeout=LIMIT_S))
    assert len(whole) == 9
    for epoch in range(3):
        seen = sorted(n for _, numbers in whole[3 * epoch : 3 * epoch + 3] for n in numbers)
        assert seen == list(range(36))
        assert [numbers for _, numbers in whole[:3]] != [numbers for _, numbers in whole[3:6]]
    rest = steps_of(run_ranks(resumed, ranks, path, 36, ranks, env=runs.TORCHRUN, timeout=LIMIT_S))
    assert [numbers for _, numbers in rest] == [numbers for _, numbers in whole[5:]]
    assert [loss for loss, _ in rest] == pytest.approx([loss for loss, _ in whole[5:]], rel=1e-5)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_an_epoch_that_is_filled_up_goes_on_with_any_number_of_ranks(
    two: Ranks, tmp_path: Path, ranks: int
) -> None:
    """Of 33 samples, the last 9 of an epoch: two ranks have 5 each, and three have 3."""
    path = str(tmp_path / "amid.ckpt")
    whole = steps_of(two.run(halted, path, 33, timeout=LIMIT_S))
    rest = steps_of(run_ranks(resumed, ranks, path, 33, ranks, env=runs.TORCHRUN, timeout=LIMIT_S))
    if ranks == 2:
        assert rest == whole[5:]
    filled = [12, 12, 10] if ranks == 2 else [12, 12, 9]
    assert [len(numbers) for _, numbers in rest] == [filled[-1], *filled]
    amid = {n for _, numbers in whole[3:5] for n in numbers}
    assert amid | set(rest[0][1]) == set(range(33))
    for step, (_, numbers) in enumerate(rest):
        # What fills up a batch is from the front of the epoch.
        repeated = set(whole[5 + step][1]) - set(numbers)
        assert len(repeated) <= (ranks != 2)
        assert set(numbers) <= set(whole[5 + step][1])


@toy.leaving()
def logged(names_of_ranks: list[list[str]], on_step: bool) -> Any:
    """Two epochs of three steps that log the rank; the means at the end."""
    settings = {"max_epochs": 2, "limit_val_batches": 0}
    trainer = runs.trainer_of("lightning", "pydist", 2, **settings)

    class Logs(type(runs.regression("lightning", 18, 3))):  # type: ignore[misc]
        def training_step(self, batch: Any, step: int) -> Tensor:
            for place, name in enumerate(names_of_ranks[self.global_rank]):
                value = torch.tensor(float(self.global_rank + 10 * place))
                self.log(name, value, sync_dist=True, on_step=on_step, on_epoch=not on_step)
            return self.network(batch[1]).mean()

    trainer.fit(Logs())
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("on_step", [True, False], ids=["step", "epoch"])
def test_ranks_that_log_the_same_names_get_the_means(two: Ranks, on_step: bool) -> None:
    names = ["loss", "accuracy"]
    for means in two.run(logged, [names, names], on_step, timeout=LIMIT_S):
        assert means == {"loss": 0.5, "accuracy": 10.5}


def counted(names: list[str], on_step: bool) -> dict[str, int]:
    """How many operations of each kind a training takes that logs some names."""
    counts: Counter[str] = Counter()

    def counting(owner: Any, name: str) -> Any:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            counts[f"{owner.__name__}.{name}"] += 1
            return original(*args, **kwargs)

        return mock.patch.object(owner, name, call)

    with contextlib.ExitStack() as patches:
        for name in ("all_gather", "all_reduce", "barrier", "broadcast"):
            patches.enter_context(counting(_native.Communicator, name))
            patches.enter_context(counting(torch.distributed, name))
        logged([names, names], on_step)
    return dict(counts)


# Of the two epochs of three steps, whose means take the sum of the values and that of the weights.
@pytest.mark.parametrize(("on_step", "collectives"), [(True, 6), (False, 4)])
def test_a_logged_mean_takes_at_most_two_collectives_and_no_barrier(
    two: Ranks, on_step: bool, collectives: int
) -> None:
    counts, without = (
        two.run(counted, names, on_step, timeout=LIMIT_S) for names in (["loss"], [])
    )
    for own, plain in zip(counts, without, strict=True):
        more = Counter(own)
        more.subtract(plain)
        assert {name: count for name, count in more.items() if count} == {
            "Communicator.all_gather": collectives
        }


@pytest.mark.parametrize("on_step", [True, False], ids=["step", "epoch"])
@pytest.mark.parametrize("names", [["loss", "cat"], ["dog", "loss"]], ids=["other", "order"])
def test_ranks_that_log_different_names_get_a_mismatch(names: list[str], on_step: bool) -> None:
    with Ranks(2, runs.TORCHRUN) as ranks:
        outcomes = ranks.outcomes(logged, [["loss", "dog"], names], on_step, timeout=LIMIT_S)
    differing = "'cat'" if "cat" in names else "'loss'"
    for outcome in outcomes:
        assert outcome.error == "Mismatch"
        assert "self.log" in outcome.message
        assert "'dog'" in outcome.message
        assert differing in outcome.message


@pytest.mark.parametrize("on_step", [True, False], ids=["step", "epoch"])
def test_a_rank_that_logs_fewer_names_ends_the_training(on_step: bool) -> None:
    with Ranks(2, runs.TORCHRUN) as ranks:
        outcomes = ranks.outcomes(logged, [["loss", "dog"], ["loss"]], on_step, timeout=LIMIT_S)
    errors = {outcome.error for outcome in outcomes}
    # The first to raise may leave before the other has seen why.
    assert "Mismatch" in errors
    assert errors <= {"Mismatch", "PeerLost"}


@toy.leaving()
def resumed_with(path: str, batch_size: int) -> None:
    trainer = runs.trainer_of("lightning", "pydist", 2, max_epochs=3)
    trainer.fit(runs.regression("lightning", 36, batch_size, shuffle=True), ckpt_path=path)


def test_resuming_with_another_global_batch_is_refused(two: Ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "amid.ckpt")
    two.run(halted, path, timeout=LIMIT_S)
    with Ranks(2, runs.TORCHRUN) as ranks:
        for outcome in ranks.outcomes(resumed_with, path, 3, timeout=LIMIT_S):
            assert outcome.error == "InvalidUsage"
            assert "batch_size=6, a rank's, on these 2 ranks" in outcome.message


@toy.leaving()
def averaged(strategy: str, callback: str, arguments: dict[str, Any]) -> Any:
    callbacks = importlib.import_module("lightning.pytorch.callbacks")
    given = [getattr(callbacks, callback)(**arguments)]
    trainer = runs.trainer_of("lightning", strategy, 2, max_epochs=3, callbacks=given)
    model = runs.regression("lightning", length=24, batch_size=3)
    trainer.fit(model)
    return runs.plain(model.state_dict())


@pytest.mark.parametrize(
    ("callback", "arguments"),
    [
        ("EMAWeightAveraging", {}),
        ("StochasticWeightAveraging", {"swa_lrs": 0.01, "swa_epoch_start": 1}),
    ],
)
@pytest.mark.parametrize("strategy", ["pydist", "pydist_sharded"])
def test_averages_of_weights_are_those_of_ddp(
    two: Ranks, callback: str, arguments: dict[str, Any], strategy: str
) -> None:
    if not hasattr(importlib.import_module("lightning.pytorch.callbacks"), callback):
        pytest.skip(f"this version of Lightning has no {callback}")
    ours, theirs = (
        two.run(averaged, name, callback, arguments, timeout=LIMIT_S) for name in (strategy, "ddp")
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
