"""Transformers' Trainer with a sharded optimizer, beside its own DDP on gloo."""

import importlib.util
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from launch import Ranks, run_ranks

if importlib.util.find_spec("transformers") is None:
    pytest.skip(
        "transformers is not installed: make test-frameworks installs it", allow_module_level=True
    )

import transformers_runs as runs
from accelerate_runs import leaving
from transformers.trainer_utils import HPSearchBackend

LIMIT_S = 80.0
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def language_runs(two: Ranks, folder: Path, whose: str, settings: dict[str, Any]) -> list[Any]:
    """What both ranks had of a training, which saves into a folder of its own."""
    out = str(folder / whose)
    return two.run(runs.trained, whose, "language", out, settings, None, timeout=LIMIT_S)


def saved_at(folder: Path, step: int) -> dict[str, Any]:
    """What a checkpoint holds of optimizer and schedule."""
    place = folder / f"checkpoint-{step}"
    names = ("optimizer", "scheduler")
    return {name: torch.load(place / f"{name}.pt", weights_only=True) for name in names}


@pytest.mark.parametrize("whose", ["stage 1", "stage 2"])
@pytest.mark.parametrize(
    "settings",
    [
        {"lr_scheduler_type": "cosine", "warmup_steps": 2, "weight_decay": 0.3},
        {"gradient_accumulation_steps": 2, "max_grad_norm": 0.05},
        {"optim": "sgd", "optim_args": "momentum=0.9", "learning_rate": 0.5, "bf16": True},
    ],
    ids=["groups and schedule", "accumulation and norm", "bf16"],
)
def test_the_same_losses_and_checkpoint_as_ddp(
    two: Ranks, tmp_path: Path, whose: str, settings: dict[str, Any]
) -> None:
    steps = 8 // settings.get("gradient_accumulation_steps", 1)
    settings = {
        **settings,
        "per_device_train_batch_size": 4,
        "save_strategy": "steps",
        "save_steps": steps,
    }
    ours, theirs = (language_runs(two, tmp_path, each, settings) for each in (whose, "stock"))
    tolerance = 0.02 if "bf16" in settings else 1e-4
    for outcome in ours:
        assert len(outcome[0]) == steps or not outcome[0]  # the first process logs
        torch.testing.assert_close(outcome[1], theirs[0][1], rtol=tolerance, atol=tolerance)
    assert ours[0][0] == pytest.approx(theirs[0][0], rel=tolerance)
    torch.testing.assert_close(
        saved_at(tmp_path / whose, steps),
        saved_at(tmp_path / "stock", steps),
        rtol=tolerance,
        atol=tolerance,
    )


@pytest.mark.parametrize("whose", ["stage 1", "stage 2"])
def test_a_model_in_bf16_is_updated_in_bf16_or_through_float32(
    two: Ranks, tmp_path: Path, whose: str
) -> None:
    # So small a rate that bf16 rounds each update of a 1 off, and float32 adds them up.
    settings = {"per_device_train_batch_size": 4, "learning_rate": 1e-3}
    weights = {}
    for name, each, more in (
        ("stock", "stock", {}),
        ("bf16", whose, {"master_weights": False}),
        ("auto", whose, {}),
    ):
        outcomes = two.run(
            runs.trained,
            each,
            "language in bf16",
            str(tmp_path / name),
            {**settings, **more},
            None,
            timeout=LIMIT_S,
        )
        weights[name] = outcomes[0][1]
    torch.testing.assert_close(weights["bf16"], weights["stock"], rtol=0.02, atol=1e-3)
    scale = "transformer.ln_f.weight"
    ones = [1.0] * len(weights["stock"][scale])
    assert weights["bf16"][scale] == weights["stock"][scale] == ones
    assert weights["auto"][scale] != ones


@leaving()
def saved_with_hooks(whose: str, folder: str) -> list[str]:
    """A training of an optimizer with hooks that saves; the calls of hooks on this rank."""
    model = runs.language_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    called = []
    optimizer.register_state_dict_pre_hook(lambda _: called.append("before"))

    def extended(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        called.append("behind")
        return {**state, "count": len(state["state"])}

    optimizer.register_state_dict_post_hook(extended)
    settings = {"per_device_train_batch_size": 4, "save_strategy": "steps", "save_steps": 8}
    trainer = runs.trainer_of(
        whose, model, folder, runs.Records(), optimizers=(optimizer, None), **settings
    )
    called.clear()
    trainer.train()
    return called


@pytest.mark.parametrize("ranks", [1, 2])
def test_hooks_on_saving_get_the_whole_state(two: Ranks, tmp_path: Path, ranks: int) -> None:
    folders = {whose: tmp_path / whose for whose in ("stage 1", "stock")}
    for whose, folder in folders.items():
        call = (saved_with_hooks, whose, str(folder))
        if ranks == 2:
            calls = two.run(*call, timeout=LIMIT_S)
        else:
            calls = run_ranks(call[0], 1, *call[1:], timeout=LIMIT_S)
        assert calls[0][-2:] == ["before", "behind"]
    ours, theirs = (saved_at(folder, 8)["optimizer"] for folder in folders.values())
    assert ours.keys() == theirs.keys()
    assert ours["count"] == theirs["count"] == len(ours["state"])


@leaving()
def searched(whose: str, folder: str) -> None:
    """Two trials, as a search with Ray Tune makes them; keeps what this rank reports at the end."""
    settings = {
        "per_device_train_batch_size": 4,
        "save_strategy": "epoch",
        "eval_strategy": "epoch",
        "model_init": runs.language_model,
    }
    trainer = runs.trainer_of(whose, None, folder, runs.Records(), **settings)
    trainer.hp_search_backend = HPSearchBackend.RAY
    trainer.hp_name, trainer.compute_objective = None, lambda metrics: metrics["eval_loss"]

    def report(metrics: Any, checkpoint: Any) -> None:
        found = Path(checkpoint.path, "checkpoint-8")
        if (found / "optimizer.pt").exists():
            shutil.copytree(found, Path(folder, "checkpoint-8"), dirs_exist_ok=True)

    with mock.patch("ray.tune.report", report), mock.patch("ray.tune.get_context") as context:
        for number, rate in enumerate((0.05, 0.01)):
            context().get_trial_id.return_value = str(number)
            trainer.train(trial={"learning_rate": rate})


@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="ray is not installed: make test-frameworks installs it",
)
@pytest.mark.parametrize("whose", ["stage 1", "stage 2"])
def test_ray_tune_gets_the_whole_state(two: Ranks, tmp_path: Path, whose: str) -> None:
    for each in (whose, "stock"):
        two.run(searched, each, str(tmp_path / each), timeout=LIMIT_S)
    ours, theirs = (saved_at(tmp_path / each, 8) for each in (whose, "stock"))
    assert theirs["optimizer"]["state"]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


# 32 lines in batches of 8 of all processes; the checkpoint is from the middle of the second epoch.
SPLIT: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "accelerator_config": {"split_batches": True},
    "save_strategy": "steps",
    "save_steps": 6,
    "weight_decay": 0.3,
}


@pytest.mark.parametrize(
    ("before", "after", "ranks"),
    [
        ("stage 1", "stage 1", 3),
        ("stage 2", "stage 1", 1),
        ("stage 2", "ours", 3),
        ("stage 1", "stock", 2),
        ("ours", "stage 2", 3),
    ],
)
def test_a_checkpoint_from_mid_epoch_goes_on_sharded_or_not(
    two: Ranks, tmp_path: Path, before: str, after: str, ranks: int
) -> None:
    folder = str(tmp_path)
    outcomes = two.run(runs.trained, before, "language", folder, SPLIT, None, timeout=LIMIT_S)
    whole = outcomes[0]
    assert len(whole[0]) == 8
    path = f"{folder}/checkpoint-6"
    rest = run_ranks(
        runs.trained, ranks, after, "language", f"{folder}/rest", SPLIT, path, timeout=LIMIT_S
    )
    assert rest[0][0] == pytest.approx(whole[0][6:], rel=1e-4)
    for _, weights, *_ in rest:
        torch.testing.assert_close(weights, whole[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("whose", ["stage 1", "stage 2"])
def test_the_best_model_is_loaded_at_the_end(two: Ranks, tmp_path: Path, whose: str) -> None:
    settings = {
        "per_device_train_batch_size": 4,
        "save_strategy": "epoch",
        "eval_strategy": "epoch",
        "load_best_model_at_end": True,
        # So that the best one is not the last.
        "metric_for_best_model": "loss",
        "greater_is_better": True,
    }
    ours, theirs = (language_runs(two, tmp_path, each, settings) for each in (whose, "stock"))
    state = json.loads((tmp_path / whose / "checkpoint-8" / "trainer_state.json").read_text())
    assert state["best_global_step"] == 4
    for _, weights, *_ in ours:
        torch.testing.assert_close(weights, theirs[0][1], rtol=1e-3, atol=1e-4)


@leaving()
def given_and_trained_again(whose: str, folder: str) -> Any:
    """An optimizer and a schedule of the program's own, and two trainings by one Trainer."""
    model = runs.Tagger()
    optimizer = torch.optim.AdamW([{"params": list(model.parameters())}, {"params": []}], lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    records = runs.Records()
    settings = {"per_device_train_batch_size": 4, "num_train_epochs": 1}
    trainer = runs.trainer_of(
        whose, model, folder, records, optimizers=(optimizer, schedule), **settings
    )
    for _ in range(2):
        trainer.train()
    weights = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
    kind = type(trainer.optimizer.optimizer).__name__
    return records.losses, weights, schedule.get_last_lr(), kind


@pytest.mark.parametrize("whose", ["stage 1", "stage 2"])
def test_an_optimizer_of_the_program_and_its_schedule(
    two: Ranks, tmp_path: Path, whose: str
) -> None:
    ours, theirs = (
        two.run(given_and_trained_again, each, str(tmp_path), timeout=LIMIT_S)
        for each in (whose, "ours")
    )
    assert len(ours[0][0]) == 8
    for own, their in zip(ours, theirs, strict=True):
        assert own[0] == pytest.approx(their[0], rel=1e-4)
        torch.testing.assert_close(own[1], their[1], rtol=1e-4, atol=1e-5)
        assert own[2] == pytest.approx(their[2])
        assert (own[3], their[3]) == ("ShardedOptimizer", "AdamW")


@leaving()
def made(folder: str, sharded: Any, settings: dict[str, Any]) -> None:
    model = runs.language_model()
    trainer = runs.trainer_of("ours", model, folder, runs.Records(), sharded=sharded, **settings)
    trainer.train()


@pytest.mark.parametrize(
    ("sharded", "settings", "said"),
    [
        (1, {"optim": "adafactor"}, "Adafactor"),
        (3, {}, "sharded=3"),
        (True, {}, "sharded=True"),
        (1, {"auto_find_batch_size": True}, "auto_find_batch_size=True"),
        (2, {"save_on_each_node": True}, "save_on_each_node=True"),
        (0, {"master_weights": False}, "master_weights=False"),
    ],
)
def test_what_cannot_be_sharded_is_refused(
    two: Ranks, tmp_path: Path, sharded: Any, settings: dict[str, Any], said: str
) -> None:
    for outcome in two.outcomes(made, str(tmp_path), sharded, settings, timeout=LIMIT_S):
        assert outcome.error == "InvalidUsage", outcome.describe()
        assert said in outcome.message
