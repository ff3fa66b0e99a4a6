"""Transformers' Trainer on pydist, beside its own DDP on gloo."""

import importlib.util
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import Ranks, rank_outcomes, run_command, run_ranks

if importlib.util.find_spec("transformers") is None:
    pytest.skip(
        "transformers is not installed: make test-frameworks installs it", allow_module_level=True
    )

import transformers_runs as runs
from transformers import TrainingArguments

import pydist
from pydist.integrations.transformers import Trainer

LIMIT_S = 80.0
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def told(whose: str) -> list[float]:
    """The losses that the program says under torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = str(Path(__file__).with_name("transformers_program.py"))
    environment = {"PYTHONPATH": ":".join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    ended = run_command(
        [sys.executable, *launcher, program, whose], env=environment, timeout=LIMIT_S
    )
    assert ended.returncode == 0, ended.stderr
    lines = [line.split() for line in ended.stdout.splitlines() if line.startswith("loss ")]
    return [float(value) for _, value in lines]


def test_a_script_with_one_import_changed_has_the_same_losses() -> None:
    ours = told("ours")
    assert len(ours) == 8
    # Transformers rounds to four digits what it logs.
    assert ours == pytest.approx(told("stock"), abs=1.01e-4)


@pytest.mark.parametrize(
    "settings",
    [{}, {"gradient_accumulation_steps": 2}, {"bf16": True}],
    ids=["plain", "accumulation", "bf16"],
)
def test_the_same_losses_and_weights_as_ddp(
    two: Ranks, tmp_path: Path, settings: dict[str, Any]
) -> None:
    settings = {"per_device_train_batch_size": 4, **settings}
    ours, theirs, on_group = (
        two.run(runs.trained, whose, "language", str(tmp_path), settings, None, timeout=LIMIT_S)
        for whose in ("ours", "stock", "stock on pydist")
    )
    tolerance = 0.02 if "bf16" in settings else 1e-4
    assert ours[0][2].startswith("pydist.")
    assert theirs[0][2] == on_group[0][2] == "torch.nn.parallel.distributed"
    assert len(ours[0][0]) == 8 // settings.get("gradient_accumulation_steps", 1)
    for outcome in (ours[0], on_group[0]):
        assert outcome[0] == pytest.approx(theirs[0][0], rel=tolerance)
        torch.testing.assert_close(outcome[1], theirs[0][1], rtol=tolerance, atol=tolerance)


# In batches of 8 of all processes, 6 and 7 lines are left for the last one.
@pytest.mark.parametrize("length", [30, 31])
@pytest.mark.parametrize("even", [True, False])
def test_the_last_step_of_an_epoch_is_that_of_ddp_as_the_docs_say(
    two: Ranks, tmp_path: Path, length: int, even: bool
) -> None:
    settings: dict[str, Any] = {"per_device_train_batch_size": 4, "length": length}
    if not even:
        settings["accelerator_config"] = {"even_batches": False}
    ours, theirs = (
        two.run(runs.trained, whose, "language", str(tmp_path), settings, None, timeout=LIMIT_S)
        for whose in ("ours", "stock")
    )
    handed_out = 2 * (length if not even else length + length % 2)
    assert sum(len(lines) for *_, lines in ours) == handed_out
    assert sum(len(lines) for *_, lines in theirs) == (64 if even else 2 * length)
    losses, expected = ours[0][0], theirs[0][0]
    assert losses[:3] == pytest.approx(expected[:3], rel=1e-4)
    is_same = not even or handed_out == 64
    assert (losses == pytest.approx(expected, rel=1e-4)) == is_same


@pytest.mark.parametrize("ranks", [1, 3])
def test_an_epoch_that_comes_out_unevenly_goes_on_with_any_number_of_processes(
    two: Ranks, tmp_path: Path, ranks: int
) -> None:
    folder = str(tmp_path)
    config = {"split_batches": True, "even_batches": False}
    settings = {**SPLIT, "length": 30, "accelerator_config": config}
    outcomes = two.run(runs.trained, "ours", "language", folder, settings, None, timeout=LIMIT_S)
    path = f"{folder}/checkpoint-6"
    arguments = (runs.trained, ranks, "ours", "language", f"{folder}/rest", settings, path)
    resumed = run_ranks(*arguments, timeout=LIMIT_S)
    # Each of two processes has 15 lines of an epoch, 8 of them in its first two steps.
    before = [line for outcome in outcomes for line in outcome[3][15:23]]
    after = [line for outcome in resumed for line in outcome[3]]
    assert sorted(before + after) == list(range(30))
    assert resumed[0][0] == pytest.approx(outcomes[0][0][6:], rel=1e-4)
    torch.testing.assert_close(resumed[0][1], outcomes[0][1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("kind", ["language", "tagger"])
def test_means_over_uneven_tokens_are_those_of_one_process(
    two: Ranks, tmp_path: Path, kind: str, accumulation: int
) -> None:
    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": accumulation}
    ours = two.run(runs.trained, "ours", kind, str(tmp_path), settings, None, timeout=LIMIT_S)
    # One step of one process has the samples of all, in one batch.
    alone = {"per_device_train_batch_size": 8 * accumulation}
    ((_, expected, *_),) = run_ranks(
        runs.trained, 1, "stock", kind, str(tmp_path), alone, None, timeout=LIMIT_S
    )
    for _, weights, *_ in ours:
        torch.testing.assert_close(weights, expected, rtol=1e-3, atol=1e-4)


# 32 lines in batches of 8 of all processes; the checkpoint is from the middle of the second epoch.
SPLIT: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "accelerator_config": {"split_batches": True},
    "save_strategy": "steps",
    "save_steps": 6,
}


@pytest.mark.parametrize("kind", ["language", "tagger"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_checkpoint_from_mid_epoch_goes_on_with_any_number_of_processes(
    two: Ranks, tmp_path: Path, ranks: int, kind: str
) -> None:
    folder = str(tmp_path)
    outcomes = two.run(runs.trained, "ours", kind, folder, SPLIT, None, timeout=LIMIT_S)
    whole = outcomes[0]
    assert len(whole[0]) == 8
    path = f"{folder}/checkpoint-6"
    resumed = run_ranks(
        runs.trained, ranks, "ours", kind, f"{folder}/rest", SPLIT, path, timeout=LIMIT_S
    )
    rest = resumed[0]
    # Each of two processes has 4 lines of a step: the first 8 of its second epoch are trained on.
    before = [line for outcome in outcomes for line in outcome[3][16:24]]
    after = [line for outcome in resumed for line in outcome[3]]
    assert sorted(before + after) == list(range(32))
    if kind == "language":  # the other one's logged mean is over processes, not over tokens
        assert rest[0] == pytest.approx(whole[0][6:], rel=1e-4)
    torch.testing.assert_close(rest[1], whole[1], rtol=1e-4, atol=1e-5)


def test_another_number_of_samples_in_a_step_is_refused(two: Ranks, tmp_path: Path) -> None:
    folder = str(tmp_path)
    two.run(runs.trained, "ours", "tagger", folder, SPLIT, None, timeout=LIMIT_S)
    settings = {**SPLIT, "per_device_train_batch_size": 4}
    path = f"{folder}/checkpoint-6"
    for outcome in rank_outcomes(
        runs.trained, 2, "ours", "tagger", folder, settings, path, timeout=LIMIT_S
    ):
        assert outcome.error == "InvalidUsage", outcome.describe()
        assert "8 samples in a step" in outcome.message


@runs.leaving()
def began(calls_init: bool) -> tuple[list[str], str, str]:
    """The warnings of making a Trainer, torch's backend, and what pydist averages on."""
    if calls_init:
        pydist.init()
    arguments = TrainingArguments("unused", use_cpu=True, report_to=[])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            Trainer(runs.language_model(), arguments, train_dataset=runs.Lines(8))
    said = [str(each.message) for each in caught if "pydist.init()" in str(each.message)]
    return said, torch.distributed.get_backend(), pydist.backend()


def test_a_group_that_was_there_before_is_told_of_once() -> None:
    for said, backend, engine in run_ranks(began, 2, False, timeout=LIMIT_S):
        assert (backend, engine) == ("gloo", "native")
        (text,) = said
        assert "backend 'gloo'" in text
    for said, backend, _ in run_ranks(began, 2, True, timeout=LIMIT_S):
        assert (said, backend) == ([], "pydist")


@runs.leaving()
def counted_without_cpu() -> None:
    pydist.init()
    arguments = TrainingArguments("unused", report_to=[])
    Trainer(runs.language_model(), arguments, train_dataset=runs.Lines(8))


@pytest.mark.skipif(torch.cuda.is_available(), reason="Accelerate counts processes there")
def test_a_machine_without_gpus_is_told_of_use_cpu() -> None:
    for outcome in rank_outcomes(counted_without_cpu, 2, timeout=LIMIT_S):
        assert outcome.error == "InvalidUsage", outcome.describe()
        assert "TrainingArguments(use_cpu=True)" in outcome.message
        assert "--multi_gpu --num_processes 2" in outcome.message
