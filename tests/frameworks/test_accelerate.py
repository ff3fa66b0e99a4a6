"""Accelerate on pydist, beside its own DDP on gloo."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import Ranks, run_command, run_ranks
from torch import nn
from torch.utils.data import DataLoader

if importlib.util.find_spec("accelerate") is None:
    pytest.skip(
        "accelerate is not installed: make test-frameworks installs it", allow_module_level=True
    )

import accelerate_runs as runs
import toy_training as toy

LIMIT_S = 50.0
PROGRAM = Path(__file__).with_name("accelerate_program.py")


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def launched(whose: str) -> list[float]:
    """The program's losses under `accelerate launch`, on a free port, where it sees no GPU."""
    launcher = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2"]
    launcher += ["--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
    launcher += ["--main_process_port=0", "--num_cpu_threads_per_process=1"]
    environment = {"PYTHONPATH": ":".join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": ""}
    ended = run_command(
        [sys.executable, *launcher, str(PROGRAM), whose], env=environment, timeout=LIMIT_S
    )
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    return [float(line.removeprefix("loss ")) for line in lines if line.startswith("loss ")]


def test_a_script_with_one_import_changed_has_the_same_losses() -> None:
    ours = launched("ours")
    assert len(ours) == 12
    # Matrix products in float32 may differ in the last bit for memory that lies elsewhere, and so
    # do the steps that follow: by 2e-7 where it was seen.
    assert ours == pytest.approx(launched("stock"), rel=3e-6)


@runs.leaving()
def trained(whose: str, settings: dict[str, Any], shuffle: bool, path: str) -> Any:
    """Two epochs; each rank's losses, the wrapper's class, and the saved model."""
    from accelerate import DataLoaderConfiguration

    config = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=5)
    accelerator = runs.accelerator_of(whose, dataloader_config=config, **settings)
    model = toy.network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    loader = DataLoader(toy.Points(24), batch_size=3, shuffle=shuffle)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses, seen = [], []
    for _ in range(2):
        for numbers, inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            seen.append(sorted(accelerator.gather(numbers).tolist()))
    accelerator.save_state(path, safe_serialization=False)
    accelerator.wait_for_everyone()
    kept = torch.load(Path(path, "pytorch_model.bin"))
    plain = {name: tensor.tolist() for name, tensor in kept.items()}
    unwrapped = type(accelerator.unwrap_model(model)).__name__
    return losses, seen, plain, type(model).__module__, unwrapped


@pytest.mark.parametrize("shuffle", [False, True], ids=["in order", "shuffled"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"gradient_accumulation_steps": 2}, {"mixed_precision": "bf16"}],
    ids=["plain", "accumulation", "bf16"],
)
def test_the_same_losses_and_checkpoint_as_ddp(
    two: Ranks, tmp_path: Path, settings: dict[str, Any], shuffle: bool
) -> None:
    ours, theirs = (
        two.run(trained, whose, settings, shuffle, str(tmp_path / whose), timeout=LIMIT_S)
        for whose in ("ours", "stock")
    )
    assert ours[0][3].startswith("pydist.")
    assert theirs[0][3].startswith("torch.")
    assert ours[0][4] == theirs[0][4] == "Sequential"
    assert ours[0][1] == theirs[0][1]
    # bf16 rounds the gradients of other halves of a batch before they are averaged.
    tolerance = 0.02 if settings.get("mixed_precision") else 1e-5
    means = [runs.mean_of([losses for losses, *_ in outcome]) for outcome in (ours, theirs)]
    assert means[0] == pytest.approx(means[1], rel=tolerance)
    torch.testing.assert_close(ours[0][2], theirs[0][2], rtol=tolerance, atol=tolerance)


def test_stock_accelerate_runs_on_a_group_of_pydists(two: Ranks, tmp_path: Path) -> None:
    ours, theirs = (
        two.run(trained, whose, {}, True, str(tmp_path / whose), timeout=LIMIT_S)
        for whose in ("stock on pydist", "stock")
    )
    for own, their in zip(ours, theirs, strict=True):
        assert own[0] == pytest.approx(their[0], rel=1e-6)
        assert own[1] == their[1]
    assert two.run(backend_of_stock, timeout=LIMIT_S) == ["pydist", "pydist"]


@runs.leaving()
def backend_of_stock() -> str:
    runs.accelerator_of("stock on pydist")
    return torch.distributed.get_backend()


@runs.leaving()
def stepped(path: str, save_after: int | None, shuffle: bool, skips: bool, length: int = 32) -> Any:
    """Three epochs of batches of 8 of all ranks; or what is left of them, from a checkpoint."""
    from accelerate import DataLoaderConfiguration

    torch.manual_seed(11)
    config = DataLoaderConfiguration(split_batches=True, even_batches=False)
    accelerator = runs.accelerator_of(
        "ours", dataloader_config=config, gradient_accumulation_steps=2
    )
    model = toy.network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 9)
    torch.manual_seed(11 if save_after else 12)  # a checkpoint brings its order along
    loader = DataLoader(toy.Points(length), batch_size=8, shuffle=shuffle)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if save_after is None:
        accelerator.load_state(path)
    done, steps = 0, []
    while loader.iteration < 3:
        if skips and not steps:
            loader = accelerator.skip_first_batches(loader, 2)
        for numbers, inputs, targets in loader:
            with accelerator.accumulate(model):
                squares = (model(inputs) - targets).square()
                accelerator.backward(squares.mean())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            whole = accelerator.gather_for_metrics({"squares": squares, "numbers": numbers})
            steps.append((float(whole["squares"].mean()), whole["numbers"].tolist()))
            done += 1
            if done == save_after:
                accelerator.save_state(path)
                accelerator.wait_for_everyone()
    return steps


@pytest.mark.parametrize(
    ("shuffle", "skips"),
    [(False, False), (True, False), (True, True)],
    ids=["in order", "shuffled", "a script that skips"],
)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_checkpoint_from_mid_epoch_goes_on_with_any_number_of_processes(
    two: Ranks, tmp_path: Path, ranks: int, shuffle: bool, skips: bool
) -> None:
    path = str(tmp_path / "amid")
    # The 6th of 12 batches, the second of the second epoch.
    whole = two.run(stepped, path, 6, shuffle, False, timeout=LIMIT_S)[0]
    for epoch in range(3):
        seen = sorted(n for _, numbers in whole[4 * epoch : 4 * epoch + 4] for n in numbers)
        assert seen == list(range(32))
    # On three ranks the shares are of 3, 3 and 2.
    rest = run_ranks(stepped, ranks, path, None, shuffle, skips, timeout=LIMIT_S)[0]
    assert [numbers for _, numbers in rest] == [numbers for _, numbers in whole[6:]]
    assert [loss for loss, _ in rest] == pytest.approx([loss for loss, _ in whole[6:]], rel=1e-5)


@pytest.mark.parametrize("ranks", [1, 3])
def test_an_epoch_that_comes_out_unevenly_goes_on_with_any_number_of_processes(
    two: Ranks, tmp_path: Path, ranks: int
) -> None:
    """Of 29 samples, the last 5 of an epoch: shares of 3 and 2, or of 2, 2 and 1."""
    path = str(tmp_path / "amid")
    whole = two.run(stepped, path, 6, True, False, 29, timeout=LIMIT_S)[0]
    rest = run_ranks(stepped, ranks, path, None, True, False, 29, timeout=LIMIT_S)[0]
    assert [len(numbers) for _, numbers in rest] == [8, 5, 8, 8, 8, 5]
    assert [numbers for _, numbers in rest] == [numbers for _, numbers in whole[6:]]
    assert sorted(n for _, numbers in whole[4:6] + rest[:2] for n in numbers) == list(range(29))
    assert [loss for loss, _ in rest] == pytest.approx([loss for loss, _ in whole[6:]], rel=1e-5)
