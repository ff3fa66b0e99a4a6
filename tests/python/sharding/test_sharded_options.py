"""Options of parameter groups that differ between the ranks of a `pydist.ShardedOptimizer`."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import Runner, batch, joined
from twins import TIME_LIMIT, Twins, small_model

import pydist

pytestmark = TIME_LIMIT


def differ_in_one_step(on_rank: int, stage: int) -> None:
    """A rank's own rate is noticed before the step, on all ranks; mended, training goes on."""
    rank, _ = joined()
    model = pydist.DataParallel(small_model())
    optimizer: Any = pydist.ShardedOptimizer(
        model,
        torch.optim.AdamW,
        stage=stage,  # type: ignore[arg-type]
        lr=0.1,
    )
    optimizer.param_groups[0]["note"] = f"of rank {rank}"  # which no class reads

    def train(number: int) -> None:
        optimizer.zero_grad()
        model(batch(rank, 4, 10, step=number, dtype=torch.float32)).square().mean().backward()
        optimizer.step()

    train(0)
    own = 0.5 if rank == on_rank else 0.1
    optimizer.param_groups[0]["lr"] = own
    said = ("0.5", "0.1") if on_rank == 0 else ("0.1", "0.5")
    text = (
        rf"ShardedOptimizer's step differs between ranks 0 and {on_rank or 1}: rank 0 has "
        rf"lr={said[0]} in group 0, where rank {on_rank or 1} has lr={said[1]}.*schedule by what "
        "all ranks have"
    )
    for number in (1, 2, 3):
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(pydist.Mismatch, match=text):
            train(number)
        assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.step()
    for number in (4, 5):
        train(number)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_rate_of_one_ranks_own(run_sharded: Runner, stage: int) -> None:
    for on_rank in (0, 1):
        run_sharded(differ_in_one_step, on_rank, stage)


def change_alike() -> None:
    """What all ranks change alike is nobody's fault, however it changes."""
    rate = torch.tensor(0.01)
    twins = Twins(small_model(), torch.optim.AdamW, options={"lr": rate}, stage=2)
    twins.step(0)
    for optimizer in twins.optimizers:
        optimizer.param_groups[0]["lr"].mul_(0.5)
    twins.step(1)
    for optimizer in twins.optimizers:
        optimizer.param_groups[0].update(lr=0.02, weight_decay=0.3, betas=[0.8, 0.9])
    twins.step(2)
    twins.check("changed alike")
    schedulers: list[Any] = [
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
        for optimizer in twins.optimizers
    ]
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**8) for _ in range(2)]
    for number in range(3, 9):
        for model, optimizer, scheduler, scaler in zip(
            twins.models, twins.optimizers, schedulers, scalers, strict=True
        ):
            x = batch(twins.rank, 4, 10, step=number, dtype=torch.float32)

            def closure(model: Any = model, optimizer: Any = optimizer, x: Tensor = x) -> Tensor:
                optimizer.zero_grad()
                loss: Tensor = model(x).square().mean()
                loss.backward()
                return loss

            if number % 2:
                optimizer.step(closure)
            else:
                optimizer.zero_grad()
                loss = model(x).square().mean()
                if number == 6 and twins.rank == 1:
                    loss = loss * float("inf")  # all ranks leave this step out
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            scheduler.step()
    twins.check("scheduled", exact=False)
    torch.manual_seed(9)
    model = twins.models[0]
    model.module.append(nn.Linear(1, 3))
    twins.ours.add_param_group(
        {"params": list(model.get_submodule("5").named_parameters("5")), "lr": 0.7}
    )
    for number in range(2):
        twins.ours.zero_grad()
        x = batch(twins.rank, 4, 10, step=number, dtype=torch.float32)
        model(x).square().mean().backward()
        twins.ours.step()


def test_options_that_all_ranks_change(run_sharded: Runner) -> None:
    run_sharded(change_alike)


def differ_in_one_of_two() -> None:
    """Of two optimizers of a model, the one whose options differ says so."""
    rank, _ = joined()
    model = pydist.DataParallel(nn.Sequential(nn.Linear(10, 5), nn.Linear(5, 1)))
    first, second = (
        pydist.ShardedOptimizer(model.get_submodule(name).parameters(), torch.optim.SGD, lr=0.1)
        for name in ("0", "1")
    )
    for number in range(2):
        model(batch(rank, 4, 10, step=number, dtype=torch.float32)).square().mean().backward()
        first.step()
        second.param_groups[0]["momentum"] = 0.5 * rank
        with pytest.raises(pydist.Mismatch, match=r"rank 0 has momentum=0\.0 in group 0"):
            second.step()
        first.zero_grad()
        second.zero_grad()


def test_options_of_one_optimizer_of_two(run_native: Runner) -> None:
    run_native(differ_in_one_of_two)


def remove(what: str) -> None:
    """On one rank; the others are told."""
    rank, _ = joined()
    model = pydist.DataParallel(small_model())
    groups = [{"params": [p], "lr": 0.1 * (i + 1)} for i, p in enumerate(model.parameters())]
    optimizer = pydist.ShardedOptimizer(groups, torch.optim.SGD)
    if rank == 0:
        if what == "group":
            del optimizer.param_groups[0]
        else:
            optimizer.param_groups[1]["params"].clear()
    found = "7 in 7" if what == "group" else "7 in 8"
    said = rf"8 parameters in 8 groups, and step\(\) finds {found}.*freeze its parameters instead"
    kind = pydist.InvalidUsage if rank == 0 else pydist.Error
    with pytest.raises(kind, match=said):
        optimizer.step()


@pytest.mark.parametrize("what", ["group", "parameter"])
def test_removed_groups(run_native: Runner, what: str) -> None:
    run_native(remove, what)
