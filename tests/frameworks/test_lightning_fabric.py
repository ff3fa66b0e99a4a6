"""Lightning's Fabric on pydist, beside its own DDP on gloo."""

import importlib
import importlib.util
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning_runs as runs
import pytest
import torch
import toy_training as toy
from launch import Ranks, run_ranks
from torch import nn
from torch.utils.data import DataLoader

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


@toy.leaving()
def trained(package: str, strategy: str, path: str) -> Any:
    """Eight backwards, of which every second averages, with a save and a load in between."""
    fabric = runs.fabric_of(package, strategy)
    network = toy.network()
    model, optimizer = fabric.setup(network, torch.optim.AdamW(network.parameters(), lr=0.05))
    points = toy.Points(32)
    losses = []
    for step in range(8):
        _, inputs, targets = points[4 * step + torch.arange(2) + 2 * fabric.global_rank]
        with fabric.no_backward_sync(model, enabled=step % 2 == 0):
            loss = nn.functional.mse_loss(model(inputs), targets)
            fabric.backward(loss)
        if step % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
        if step == 3:
            fabric.save(path, {"model": model, "optimizer": optimizer})
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            fabric.load(path, {"model": model, "optimizer": optimizer})
        losses.append(loss.item())
    return losses, runs.plain(torch.load(path, weights_only=False))


@pytest.mark.parametrize("package", ["lightning", "lightning_fabric"])
@pytest.mark.parametrize("strategy", ["pydist", "pydist_sharded", "pydist_sharded_stage_2"])
def test_the_same_losses_and_checkpoint_as_ddp(
    two: Ranks, tmp_path: Path, package: str, strategy: str
) -> None:
    ours, theirs = (
        two.run(trained, package, name, str(tmp_path / name), timeout=LIMIT_S)
        for name in (strategy, "ddp")
    )
    for own, their in zip(ours, theirs, strict=True):
        assert own[0] == pytest.approx(their[0], rel=1e-6)
        torch.testing.assert_close(own[1], their[1], rtol=1e-5, atol=1e-6)


@toy.leaving()
def unevenly_shared(strategy: str, ranks: int) -> Any:
    """Weights after four steps of 8 samples of all ranks, of which three have 3, 3 and 2."""
    fabric = runs.fabric_of("lightning", strategy, ranks)
    network = toy.network()
    model, optimizer = fabric.setup(network, torch.optim.AdamW(network.parameters(), lr=0.05))
    loader = DataLoader(toy.Points(32), batch_size=8)
    for _, inputs, targets in fabric.setup_dataloaders(pydist.prepare(loader, split_batches=True)):
        loss = nn.functional.mse_loss(model(inputs), targets)
        with fabric.strategy.weighted(model, len(inputs)):
            fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(pydist.InvalidUsage, match=r"fabric\.setup has returned"):
        fabric.strategy.weighted(toy.network(), 1)
    return runs.plain(network.state_dict())


@pytest.mark.parametrize("strategy", ["pydist", "pydist_sharded"])
def test_uneven_shares_can_be_weighted(strategy: str) -> None:
    alone, *_ = run_ranks(unevenly_shared, 1, "pydist", 1, env=runs.TORCHRUN, timeout=LIMIT_S)
    arguments = (unevenly_shared, 3, strategy, 3)
    for weights in run_ranks(*arguments, env=runs.TORCHRUN, timeout=LIMIT_S):
        torch.testing.assert_close(weights, alone, rtol=1e-4, atol=1e-5)


@toy.leaving()
def went_on(strategy: str, ranks: int, path: str, resumes: bool) -> Any:
    """Three epochs of three steps, with a checkpoint after the fifth; or what follows it."""
    fabric = runs.fabric_of("lightning", strategy, ranks)
    network = toy.network()
    model, optimizer = fabric.setup(network, torch.optim.AdamW(network.parameters(), lr=0.05))
    loader = fabric.setup_dataloaders(DataLoader(toy.Points(36), 12 // ranks, shuffle=True))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if strategy != "ddp":
        state["loader"] = loader
    if resumes:
        fabric.load(path, state)
    losses, seen = [], []
    while state["step"] < 9:
        for numbers, inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(fabric.all_reduce(loss.detach(), reduce_op="mean")))
            seen.append(numbers.tolist())
            state["step"] += 1
            if state["step"] == 5:
                fabric.save(path, state)
    return losses, seen


def samples_of_steps(outcomes: list[Any]) -> list[list[int]]:
    """For each step, those of all ranks."""
    columns = zip(*(seen for _, seen in outcomes), strict=True)
    return [sorted(number for part in column for number in part) for column in columns]


def test_a_loader_has_the_samples_of_ddp(two: Ranks, tmp_path: Path) -> None:
    ours, theirs = (
        two.run(went_on, strategy, 2, str(tmp_path / strategy), False, timeout=LIMIT_S)
        for strategy in ("pydist", "ddp")
    )
    for own, their in zip(ours, theirs, strict=True):
        assert own[1] == their[1]
        assert own[0] == pytest.approx(their[0], rel=1e-6)


@pytest.mark.parametrize(
    ("strategy", "ranks"), [("pydist", 1), ("pydist", 3), ("pydist_sharded_stage_2", 3)]
)
def test_a_checkpoint_from_mid_epoch_goes_on_with_any_number_of_ranks(
    two: Ranks, tmp_path: Path, strategy: str, ranks: int
) -> None:
    path = str(tmp_path / "amid.ckpt")
    whole = two.run(went_on, strategy, 2, path, False, timeout=LIMIT_S)
    steps = samples_of_steps(whole)
    for epoch in range(3):
        seen = sorted(number for step in steps[3 * epoch : 3 * epoch + 3] for number in step)
        assert seen == list(range(36))
    assert steps[:3] != steps[3:6]
    rest = run_ranks(
        went_on, ranks, strategy, ranks, path, True, env=runs.TORCHRUN, timeout=LIMIT_S
    )
    assert samples_of_steps(rest) == steps[5:]
    assert rest[0][0] == pytest.approx(whole[0][0][5:], rel=1e-5)


@toy.leaving()
def scheduled(strategy: str, together: bool) -> Any:
    """Clips and schedules; model and optimizer are set up together or one after the other."""
    fabric = runs.fabric_of("lightning", strategy)
    network = toy.network()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    if together:
        model, optimizer, schedule = fabric.setup(network, optimizer, scheduler=schedule)
    else:
        model = fabric.setup_module(network)
        optimizer = fabric.setup_optimizers(optimizer)
    losses, norms = [], []
    for step in range(4):
        _, inputs, targets = toy.Points(16)[4 * step + torch.arange(2) + 2 * fabric.global_rank]
        loss = nn.functional.mse_loss(model(inputs), targets)
        fabric.backward(loss)
        norms.append(float(fabric.clip_gradients(model, optimizer, max_norm=0.1)))
        optimizer.step()
        optimizer.zero_grad()
        if together:
            schedule.step()
        losses.append(loss.item())
    return losses, norms, optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("together", [True, False], ids=["together", "apart"])
def test_sharded_optimizers_are_clipped_and_scheduled(two: Ranks, together: bool) -> None:
    ours, theirs = (
        two.run(scheduled, strategy, together, timeout=LIMIT_S)
        for strategy in ("pydist_sharded_stage_2", "ddp")
    )
    for own, their in zip(ours, theirs, strict=True):
        assert own[0] == pytest.approx(their[0], rel=1e-5)
        assert own[1] == pytest.approx(their[1], rel=1e-5)
        assert own[2] == their[2] == (0.025 if together else 0.1)


@toy.leaving()
def optimizer_first() -> None:
    fabric = runs.fabric_of("lightning", "pydist_sharded")
    fabric.setup_optimizers(torch.optim.SGD(toy.network().parameters(), lr=0.1))


def test_a_sharded_optimizer_comes_after_its_model(two: Ranks) -> None:
    for outcome in two.outcomes(optimizer_first, timeout=LIMIT_S):
        assert outcome.error == "InvalidUsage"
        assert "set the model up first" in outcome.message


@toy.leaving()
def reduced() -> dict[str, Any]:
    fabric = runs.fabric_of("lightning", "pydist")
    rank = fabric.global_rank
    block = torch.tensor([1.0 + rank], requires_grad=True)
    gathered = fabric.all_gather(block, sync_grads=True)
    (gathered * torch.tensor([[2.0], [3.0]])).sum().backward()
    return {
        "mean of integers": float(fabric.all_reduce(torch.tensor(3 + rank))),
        "sum of integers": int(fabric.all_reduce(torch.tensor(3 + rank), reduce_op="sum")),
        "mean": float(fabric.all_reduce(torch.tensor(1.0 + rank))),
        "max": int(fabric.all_reduce(torch.tensor(rank), reduce_op="max")),
        "broadcast": fabric.broadcast({"rank": rank}, src=1),
        "gathered": gathered.tolist(),
        "gradient": block.grad.tolist() if block.grad is not None else None,
    }


def test_what_is_reduced_gathered_and_broadcast(two: Ranks) -> None:
    for rank, outcome in enumerate(two.run(reduced, timeout=LIMIT_S)):
        assert outcome == {
            "mean of integers": 3.5,
            "sum of integers": 7,
            "mean": 1.5,
            "max": 1,
            "broadcast": {"rank": 1},
            "gathered": [[1.0], [2.0]],
            # Of the sum of both ranks' results.
            "gradient": [2 * (2.0, 3.0)[rank]],
        }


@toy.leaving()
def other_backend() -> None:
    module = importlib.import_module("pydist.integrations.lightning")
    strategy = module.LightningFabricStrategy(process_group_backend="gloo")
    importlib.import_module("lightning.fabric").Fabric(
        accelerator="cpu", devices=2, strategy=strategy
    ).launch()


def test_another_process_group_backend_is_refused(two: Ranks) -> None:
    for outcome in two.outcomes(other_backend, timeout=LIMIT_S):
        assert outcome.error == "InvalidUsage"
        assert "PYDIST_BACKEND" in outcome.message


@pytest.mark.parametrize("strategy", ["pydist_spawn", "pydist_sharded"])
def test_spawned_processes_can_be_given_the_strategy(strategy: str) -> None:
    importlib.import_module("pydist.integrations.lightning")
    tree = importlib.import_module("lightning.fabric")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a Slurm that is not used
        fabric = tree.Fabric(accelerator="cpu", devices=1, strategy=strategy)
    copy = pickle.loads(pickle.dumps(fabric.strategy))
    assert type(copy) is type(fabric.strategy)
